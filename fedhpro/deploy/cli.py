"""fedhpro deploy: the same methods on a federation of real machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..config import configure, parse
from ..data.sources import SITES
from ..errors import ConfigError
from .commands import register_commands, tell_about

deploy_app = typer.Typer(
    name="deploy", help="Run a federation on real machines, over Flower with TLS and keys.", no_args_is_help=True
)


@deploy_app.command()
def app(
    folder: Annotated[Path, typer.Argument(help="Where to; it must be new or empty.")],
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Any key of the config.", show_default=False)
    ] = None,
) -> None:
    """Write a Flower app, the run of these keys, and print the `flwr run` that starts it."""
    from .app import write_app

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not an empty folder: choose another")
    given = parse(keys or [])
    config = configure(**({"engine": "flower"} | given))
    nodes = write_app(folder, config)
    tell_about(given, config)
    simulated = f'--federation-config "num-supernodes={nodes} client-resources-num-cpus=1"'
    typer.echo(f"flwr run {folder} --stream" + ("" if config.data == SITES else f" {simulated}"))


register_commands(deploy_app)
