"""The commands of `fedhpro deploy` around a federation's folder: init, register, run, status, audit, renew, ..."""

from __future__ import annotations

import importlib.util
import json
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from ..config import Config, about_keys, configure, names_and_keys, parse
from ..errors import UserError
from .folder import DeployError, Deployment, prepared

if TYPE_CHECKING:
    from .control import Control

out, err = Console(), Console(stderr=True)

Folder = Annotated[Path, typer.Argument(help="The deployment's folder.")]
Keys = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Any key of the config.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="As JSON.")]


def register_commands(app: typer.Typer) -> None:
    for command in (init, serve, node, register, run, status, log, stop, audit, add, revoke, renew):
        app.command()(command)


def init(
    folder: Annotated[Path, typer.Argument(help="A new folder.")],
    keys: Keys = None,
    nodes: Annotated[int, typer.Option(help="How many sites take part.")] = 2,
    host: Annotated[
        list[str] | None, typer.Option(help="Name or address of the server; the first is the one that nodes use.")
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the server.")] = 8443,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS, no keys: for trials on one machine.")] = False,
) -> None:
    """Write the folder of a federation: CA, certificates, node keys, start scripts, the app, and who does what."""
    needs_flower()
    given = parse(keys or [])
    made = Deployment.create(folder, prepared(given, nodes), nodes, host or (), port, insecure)
    tell_about(given, made.config)
    if insecure:
        err.print(
            "WARNING: --insecure: whoever reaches the server's port can read everything and run code on every node",
            style="bold red",
        )
    _print(f"wrote {folder}: {len(made.nodes)} nodes, server {made.address}; next: {folder / 'README.md'}")
    _print_expiry(made)


def serve(
    folder: Annotated[Path, typer.Argument(help="The server's folder (in the deployment's folder).")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8443,
) -> None:
    """Run the SuperLink behind its gate (server/start.sh calls this)."""
    needs_flower()
    from . import gate

    for name in ("server.crt", "server.key", "ca.crt", "operator.crt", "signer.pub", "runtime.secret"):
        if not (folder / name).is_file():
            raise DeployError(f"{folder} is not the server folder of a deployment: it has no {name}")
    _check_port(host, port, "PORT in server.conf")
    gate.serve(folder.resolve(), host, port)


def node(
    folder: Annotated[Path, typer.Argument(help="The site's folder.")],
    superlink: Annotated[str, typer.Option(help="Address of the server, with port.")],
    partition: Annotated[int, typer.Option(help="Which client it is, from 0.")],
    data: Annotated[str, typer.Option(help="folder:/path, csv:/path or python:module:function.")] = "",
    memory: Annotated[Path, typer.Option(help="For what it remembers between rounds.")] = Path("memory"),
    port: Annotated[int, typer.Option(help="A free port of this machine, for its own processes.")] = 9094,
    require: Annotated[str, typer.Option(help="Keys that the operator's config must have, as KEY=VALUE ...")] = "",
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS, no keys.")] = False,
) -> None:
    """Run the SuperNode of a site (its start.sh calls this)."""
    needs_flower()
    from . import node

    _check_port(node.HERE, port, "RUNTIME_PORT in site.conf")
    node.run(folder.resolve(), superlink, partition, data, memory.absolute(), port, require, insecure)


def register(
    folder: Folder,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for a server that is still starting.")] = 30,
) -> None:
    """Tell the server which nodes may take part."""
    end = time.monotonic() + wait
    with _control(folder) as control:
        while not control.answers() and time.monotonic() < end:
            time.sleep(0.5)
        new = control.register()
    _print(f"registered {', '.join(new)}" if new else "every node was registered already")


def run(
    folder: Folder,
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys in place of the app's.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Show the log until the run ends.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the last run, from its checkpoint.")] = False,
) -> None:
    """Sign the app and run it on the nodes; its run folder is in the server's folder."""
    given = parse(keys or [])
    with _control(folder) as control:
        deployment = control.deployment
        number = control.start(folder / "app", deployment.run_with(given, resume))
        deployment.save()  # now that there is such a run
        _print(f"started run {number}; its folder: {deployment.server / str(deployment.run_folder)}")
        if follow:
            for text in control.log(number):
                print(text, end="", flush=True)
            last = next(found for found in control.runs() if found.id == number)
            _print(f"run {number}: {last.status}" + (f" ({last.details})" if last.details else ""))
            if last.status != "finished: completed":
                raise typer.Exit(1)


def log(folder: Folder, number: Annotated[int, typer.Argument(metavar="RUN", help="The run's number.")]) -> None:
    """Show the log of a run, until it ends."""
    with _control(folder) as control:
        for text in control.log(number):
            print(text, end="", flush=True)


def stop(folder: Folder, number: Annotated[int, typer.Argument(metavar="RUN", help="The run's number.")]) -> None:
    """Stop a run."""
    with _control(folder) as control:
        stopped = control.stop(number)
    _print(f"stopped run {number}" if stopped else f"run {number} could not be stopped: is it over?")


def status(
    folder: Folder,
    watch: Annotated[bool, typer.Option("--watch", help="Go on showing it, until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(min=0.5, help="Seconds between two looks.")] = 5,
    as_json: Json = False,
) -> None:
    """Nodes, runs, the last round, and when certificates end."""
    needs_flower()
    from .status import state, view

    deployment = Deployment.open(folder)
    if as_json or not watch:
        found = state(deployment)
        if as_json:
            print(json.dumps(found, indent=2))
        else:
            out.print(view(found), soft_wrap=True)
        if "problem" in found:  # for programs that look after it
            raise typer.Exit(1)
    else:
        with Live(view(state(deployment)), console=out, auto_refresh=False) as live:
            while True:
                time.sleep(every)
                live.update(view(state(Deployment.open(folder))), refresh=True)


def audit(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FOLDER] [KEY=VALUE]...", help="A deployment's folder, or keys of a config."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print exactly which tensors, shapes and bytes leave a site in a round, and which come in."""
    from .audit import COMES, LEAVES, besides, table, tensors

    folders, keys = names_and_keys(arguments or [])
    if len(folders) > 1 or (folders and keys):
        raise DeployError("audit takes one deployment's folder, or keys of a config, not both")
    config = Deployment.open(Path(folders[0])).config if folders else configure(**keys)
    rows = tensors(config)
    tell_about(keys, config)
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        out.print(table(rows, LEAVES), table(rows, COMES), besides(config), sep="\n\n", highlight=False)


def add(folder: Folder, nodes: Annotated[int, typer.Option(min=1, help="How many.")] = 1) -> None:
    """Make the folder of one more node."""
    needs_flower()
    deployment = Deployment.open(folder)
    names = ", ".join(str(deployment.site(node)) for node in deployment.add_nodes(nodes))
    _print(f"wrote {names}; next: fedhpro deploy register {folder}")


def revoke(folder: Folder, node: Annotated[str, typer.Argument(help="For example node-2.")]) -> None:
    """Shut a node's key out, at once and for good."""
    needs_flower()
    from .control import Control

    deployment = Deployment.open(folder)
    revoked = deployment.revoke(node)
    try:
        with Control(deployment) as control:
            known = control.unregister(revoked)
    except DeployError as error:
        _print(f"{node} is revoked in {deployment.server / 'revoked.json'}, which the server reads; but {error}")
        return
    _print(f"{node} is revoked" + ("" if known else "; it was not registered"))


def renew(folder: Folder) -> None:
    """New certificates for the server and the operator, from the same CA."""
    needs_flower()
    deployment = Deployment.open(folder)
    deployment.renew()
    _print("renewed; a server on another machine needs server.crt, server.key and operator.crt of the server folder")
    _print_expiry(deployment)


def needs_flower() -> None:
    if importlib.util.find_spec("flwr") is None or importlib.util.find_spec("cryptography") is None:
        raise UserError('a deployment needs Flower: pip install "fedhpro[flower]"')


def _control(folder: Path) -> Control:
    needs_flower()
    from .control import Control

    return Control(Deployment.open(folder))


def _check_port(host: str, port: int, setting: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise DeployError(f"{host} port {port} cannot be used: {error.strerror}; see {setting}") from None


def _print(text: str) -> None:
    out.print(text, highlight=False, soft_wrap=True, markup=False)


def tell_about(keys: dict[str, Any], config: Config) -> None:
    for sentence in about_keys(keys, config):
        err.print(sentence, style="yellow", markup=False, highlight=False, soft_wrap=True)


def _print_expiry(deployment: Deployment) -> None:
    from .status import expiry_lines

    for line in expiry_lines(deployment.expiry()):
        out.print(line, highlight=False)
