"""`fedhpro watch`: the report of a run that goes on, on this machine only."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ..errors import ConfigError, RunError
from .page import build_page, waiting_page
from .reading import read_run

ADDRESS = "127.0.0.1"


def page_of(folder: Path) -> str:
    try:
        return build_page([read_run(folder)], live=True)
    except RunError as error:
        return waiting_page(str(error))


class Handler(BaseHTTPRequestHandler):
    """One page at one address, to be read. Whoever comes by another name (DNS rebinding) is turned away."""

    server: Server
    server_version, sys_version = "fedhpro", ""

    def do_GET(self) -> None:
        names = {f"{name}:{self.server.server_port}" for name in (ADDRESS, "localhost")}
        if self.headers.get_all("Host") is None or not set(self.headers.get_all("Host", [])) <= names:
            self.answer(403, "open this page by the address that `fedhpro watch` printed\n", "text/plain")
        elif self.path.partition("?")[0] != "/":
            self.answer(404, "there is only one page here, /\n", "text/plain")
        else:
            self.answer(200, page_of(self.server.folder), "text/html")

    do_HEAD = do_GET

    def answer(self, status: int, text: str, kind: str) -> None:
        content = text.encode(errors="replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()[:16]}"')
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """A page that asks every two seconds would fill the terminal."""


HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY"}
HEADERS |= {"Referrer-Policy": "no-referrer", "Cross-Origin-Resource-Policy": "same-origin"}


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0) -> None:
        if not folder.is_dir():
            raise RunError(f"{folder}: there is no such run folder")
        try:
            super().__init__((ADDRESS, port), Handler)
        except OSError as error:
            raise ConfigError(f"port {port} cannot be used: {error.strerror or error}") from None
        self.folder = folder

    def handle_error(self, *arguments: Any) -> None:
        """A browser that goes away in the middle of an answer is nothing to tell."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(*arguments)

    @property
    def address(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/"


def watch(folder: Path, port: int = 0, started: Callable[[str], None] = print) -> None:
    """Until Ctrl-C."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "config.toml").is_file():
        raise RunError(f"{folder} is not a run folder: it has no config.toml")
    with Server(folder, port) as server:
        started(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
