"""The Flower app of a run: a folder that `flwr run` takes. It names no secret and needs nothing but fedhpro."""

from __future__ import annotations

from pathlib import Path

from ..config import Config
from ..errors import ConfigError
from ..federation import build_clients, check_engine, load_source
from ..files import write_atomically
from ..version import __version__

PYPROJECT = f"""[project]
name = "fedhpro-app"
version = "{__version__}"
description = "A federation of fedhpro"
license = "Apache-2.0"
dependencies = []  # Flower would install them at every start; fedhpro is on the machines already

[tool.flwr.app]
publisher = "fedhpro"

[tool.flwr.app.components]
serverapp = "server_app:app"
clientapp = "client_app:app"

[tool.flwr.app.config]
keys = ""  # in place of those in config.toml: flwr run . --run-config 'keys="rounds=20 seed=1"'
nodes = "{{}}"  # which client each node is, {{"node id": client}}: `fedhpro deploy run` says it, from the nodes' keys
"""

SERVER_APP = '''"""The server: the run that config.toml describes."""

from pathlib import Path

from fedhpro.engines.flower import server_app

app = server_app(Path(__file__).with_name("config.toml"))
'''

CLIENT_APP = '''"""A client: its data comes from its node's config, or, in a simulation, from the run's."""

from fedhpro.engines.flower import client_app as app

__all__ = ["app"]
'''


def write_app(folder: Path, config: Config) -> int:
    """The app, and the number of its clients. A run folder that is named is one of the machine that writes this."""
    config = config.replace(engine="flower")
    check_engine(config)
    clients = build_clients(config, load_source(config), config.build_method())
    if config.out != "auto":
        config = config.replace(out=str(Path(config.out).absolute()))
    files = {"pyproject.toml": PYPROJECT, "config.toml": config.to_toml()}
    files |= {"server_app.py": SERVER_APP, "client_app.py": CLIENT_APP}
    try:
        for name, text in files.items():
            write_atomically(folder / name, text)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror or error}") from None
    return len(clients)
