"""The SuperLink with a gate in front of its HTTP API, in one process on one port.

Stock Flower answers whoever reaches the port: anybody can register a node, submit code that every site then runs, or
take a task. Here each part of the API has its own key:

    /v1/control/   the operator's client certificate (TLS), and for a run the operator's signature on the app
    /v1/fleet/     a registered node key, which the SuperLink checks, that is not revoked
    /v1/runtime/   a process on this machine that knows runtime.secret (the SuperLink's own SuperExec and ServerApp)
    /health        anybody
    all else       nobody

The signature of a submitted app is kept here and handed on to the nodes with the app: stock SuperNodes check it with
`--trusted-entities`, so a SuperLink that was broken into cannot make them run other code.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import importlib
import ipaddress
import json
import logging
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from ..files import write_atomically
from . import pki

log = logging.getLogger("fedhpro.deploy")

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

START_RUN, REGISTER, GET_FAB = "/v1/control/start-run", "/v1/control/register-node", "/v1/fleet/get-fab"
LARGEST_APP = 12 * 2**20  # bytes of a request; flwr allows bundles of 10 MiB
NODE_KEY = b"flwr-public-key"


class Refused(Exception):
    """Why a request goes no further; the status says it to programs."""

    def __init__(self, reason: str, status: int = 403) -> None:
        super().__init__(reason)
        self.status = status


class Gate:
    """ASGI: what is not allowed here does not exist behind it."""

    def __init__(self, app: Application, folder: Path) -> None:
        self.app, self.folder = app, folder
        (folder / "signatures").mkdir(mode=0o700, exist_ok=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        try:
            if scope["type"] != "http":
                raise Refused("only HTTP is spoken here", 404)
            await self.pass_on(scope, receive, send)
        except Refused as refusal:
            log.warning("refused %r from %s: %s", scope["path"], (scope.get("client") or ["?"])[0], refusal)
            await answer(send, refusal.status, json.dumps({"detail": str(refusal)}).encode(), b"application/json")

    async def pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]  # the very text that the application routes by
        if path.startswith("/v1/control/"):
            self.check_operator(scope)
            if path in (START_RUN, REGISTER):
                body = await whole(receive)
                (self.check_app if path == START_RUN else self.check_node)(body)
                receive = once(body, receive)
        elif path.startswith("/v1/fleet/"):
            for key in (value for name, value in scope["headers"] if name == NODE_KEY):
                self.check_revoked(key)
            if path == GET_FAB:
                send = self.with_signature(send)
        elif path.startswith("/v1/runtime/"):
            check_local(scope)
        elif path != "/health":
            raise Refused("there is nothing here", 404)
        await self.app(scope, receive, send)

    def check_operator(self, scope: Scope) -> None:
        if scope["state"].get("peer") != pki.fingerprint(self.folder / "operator.crt"):
            raise Refused("this needs the operator's certificate")

    def check_app(self, body: bytes) -> None:
        from flwr.proto.control_pb2 import StartRunRequest

        fab = parsed(StartRunRequest, body).fab
        if not pki.is_signed(fab.content, dict(fab.verifications), self.folder / "signer.pub"):
            raise Refused("this app is not signed by the operator")
        path = self.folder / "signatures" / f"{hashlib.sha256(fab.content).hexdigest()}.json"
        write_atomically(path, json.dumps(dict(fab.verifications)))

    def check_node(self, body: bytes) -> None:
        from flwr.proto.control_pb2 import RegisterNodeRequest

        self.check_revoked(base64.b64encode(parsed(RegisterNodeRequest, body).public_key))

    def check_revoked(self, key: bytes) -> None:
        path = self.folder / "revoked.json"
        revoked = json.loads(path.read_text()) if path.exists() else {}
        try:
            name = revoked.get(hashlib.sha256(base64.b64decode(key, validate=True)).hexdigest())
        except (binascii.Error, ValueError):
            raise Refused("the node key cannot be read", 401) from None
        if name is not None:
            raise Refused(f"the key of {name} is revoked", 401)  # at which a SuperNode stops by itself

    def with_signature(self, send: Send) -> Send:
        """Adds the operator's signature to an app on its way to a node."""
        start: Event = {}
        body = bytearray()

        async def signed(event: Event) -> None:
            if event["type"] == "http.response.start":
                start.update(event)
                return
            body.extend(event.get("body", b""))
            if not event.get("more_body"):
                content = self.sign(bytes(body)) if start["status"] == 200 else bytes(body)
                headers = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
                start["headers"] = [*headers, (b"content-length", str(len(content)).encode())]
                await send(start)
                await send({"type": "http.response.body", "body": content})

        return signed

    def sign(self, response: bytes) -> bytes:
        from flwr.proto.fab_pb2 import GetFabResponse

        found = parsed(GetFabResponse, response)
        path = self.folder / "signatures" / f"{hashlib.sha256(found.fab.content).hexdigest()}.json"
        if path.exists():
            found.fab.verifications.update(json.loads(path.read_text()))
        return bytes(found.SerializeToString())


def check_local(scope: Scope) -> None:
    address = (scope.get("client") or ["0.0.0.0"])[0]
    if not ipaddress.ip_address(address).is_loopback:
        raise Refused("this is for processes on the server alone")


def parsed(kind: Any, body: bytes) -> Any:
    from google.protobuf.message import DecodeError

    try:
        return kind.FromString(body)
    except DecodeError:
        raise Refused("the request cannot be read", 400) from None


async def whole(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        event = await receive()
        if event["type"] != "http.request":
            raise Refused("the request was broken off", 400)
        body.extend(event.get("body", b""))
        if len(body) > LARGEST_APP:
            raise Refused("the request is too large", 413)
        if not event.get("more_body"):
            return bytes(body)


def once(body: bytes, receive: Receive) -> Receive:
    """The body that was already read, then whatever comes after it."""
    waiting = [body]

    async def replay() -> Event:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return replay


async def answer(send: Send, status: int, body: bytes, kind: bytes) -> None:
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def knows_peer(protocol: Any) -> Any:
    """uvicorn's protocol, which also tells the application who is at the other end of the connection."""

    class KnowsPeer(protocol):
        app_state: dict[str, Any]  # uvicorn copies it into the scope of every request

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            connection = transport.get_extra_info("ssl_object")
            certificate = connection.getpeercert(binary_form=True) if connection else None
            peer = hashlib.sha256(certificate).hexdigest() if certificate else None
            self.app_state = self.app_state | {"peer": peer}

    return KnowsPeer


def tls(folder: Path) -> dict[str, Any]:
    """uvicorn's settings: nodes come without a certificate, the operator with one of our CA."""
    return {
        "ssl_certfile": folder / "server.crt", "ssl_keyfile": folder / "server.key",
        "ssl_ca_certs": str(folder / "ca.crt"), "ssl_cert_reqs": ssl.CERT_OPTIONAL,
    }  # fmt: skip


def renewal(context: ssl.SSLContext, certificate: Path, key: Path) -> Callable[[], Awaitable[None]]:
    """New connections see a renewed certificate without a restart; also after it expired, when no request comes in."""
    seen = [certificate.stat().st_mtime_ns]

    async def refresh() -> None:
        if (now := certificate.stat().st_mtime_ns) != seen[0]:
            seen[0] = now
            try:
                context.load_cert_chain(certificate, key)
                log.info("the server's certificate was renewed")
            except (OSError, ssl.SSLError) as error:  # half written: the next renewal or restart puts it right
                log.error("the renewed certificate cannot be used: %s", error)
                seen[0] = 0

    return refresh


def serve(folder: Path, host: str, port: int) -> None:
    """Run the SuperLink of a deployment's server folder, until it is told to stop."""
    import uvicorn
    from flwr.superlink.main import create_app
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    stock = importlib.import_module("flwr.superlink.cli.flower_superlink")  # its package has a function of that name
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("GATE:     %(asctime)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    secret, authority = folder / "runtime.secret", folder / "ca.crt"
    certificate, key = folder / "server.crt", folder / "server.key"
    sys.argv = [
        "flower-superlink", "--host", host, "--port", str(port), "--enable-supernode-auth",
        "--ssl-ca-certfile", str(authority), "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key),
        "--database", str(folder / "state.db"), "--disable-runtime-dependency-installation",
        # the SuperExec is started below, with a secret: the one that Flower would start takes tasks without any
        "--isolation", "process", "--superexec-auth-secret-file", str(secret),
    ]  # fmt: skip
    gate = Gate(create_app(stock._parse_superlink_lifespan_config(), stock.SuperLinkLifespan), folder)
    settings = uvicorn.Config(
        gate, host=host, port=port, http=knows_peer(AutoHTTPProtocol), ws="none", access_log=False, proxy_headers=False,
        **tls(folder),
    )  # fmt: skip
    settings.load()
    assert settings.ssl is not None
    settings.callback_notify, settings.timeout_notify = renewal(settings.ssl, certificate, key), 1
    local = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "::1": "[::1]"}.get(host, host)
    executor = [
        "flower-superexec", "--runtime-api-address", f"{local}:{port}", "--root-certificates", str(authority),
        "--superexec-auth-secret-file", str(secret), "--parent-pid", str(os.getpid()),
    ]  # fmt: skip
    find_programs()
    with kept_running(executor):
        uvicorn.Server(settings).run()


def find_programs() -> None:
    """Flower starts its programs by name: they are beside Python, also where its environment is not activated."""
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))


@contextlib.contextmanager
def kept_running(command: Sequence[str]) -> Iterator[None]:
    """A program beside this one; started again where it ends by itself, as Flower's does after one failed handshake."""
    over = threading.Event()

    def keep() -> None:
        while not over.is_set():
            process = subprocess.Popen(command)
            while process.poll() is None and not over.wait(0.2):
                pass
            if over.is_set():
                process.terminate()
                process.wait()
            else:
                log.warning("%s has ended and is started again", command[0])
                over.wait(1)

    thread = threading.Thread(target=keep)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
