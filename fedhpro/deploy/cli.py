"""fedhpro deploy: the same methods on a federation of real machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..config import configure, parse
from ..errors import ConfigError

deploy_app = typer.Typer(
    name="deploy", help="Run a federation on real machines, over Flower with TLS and keys.", no_args_is_help=True
)


@deploy_app.callback()
def _deploy() -> None:
    """So that a single command is still called by its name."""


@deploy_app.command()
def app(
    folder: Annotated[Path, typer.Argument(help="Where to; it must be new or empty.")],
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Any key of the config.", show_default=False)
    ] = None,
) -> None:
    """Write a Flower app for `flwr run`: the run of these keys."""
    from .app import write_app

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not an empty folder: choose another")
    write_app(folder, configure(**({"engine": "flower"} | parse(keys or []))))
    typer.echo(f"written: {folder}; start it with `flwr run {folder} --stream`")
