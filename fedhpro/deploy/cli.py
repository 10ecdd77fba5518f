"""fedhpro deploy: the same methods on a federation of real machines."""

from __future__ import annotations

import typer

from .commands import register_commands

deploy_app = typer.Typer(
    name="deploy", help="Run a federation on real machines, over Flower with TLS and keys.", no_args_is_help=True
)
register_commands(deploy_app)
