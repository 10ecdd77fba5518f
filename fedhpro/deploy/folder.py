"""The folder of a deployment: what `fedhpro deploy init` writes, and the changes to it."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import json
import re
import secrets
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import Config, configure, load
from ..errors import UserError
from ..files import write_atomically
from . import texts

MOST_NODES = 10_000  # of one init: keys are cheap, but a typing error makes many
ALWAYS = ("localhost", "127.0.0.1", "::1")  # the server's own processes reach it so


class DeployError(UserError):
    """A deployment folder, or a server, that cannot be used as asked."""


@dataclass
class Node:
    name: str
    partition: int  # the number of the client that it is; who replaces a revoked node takes its number over
    revoked: str | None = None  # when


class Deployment:
    """A folder with everything of one federation; federation.json remembers what the other files do not say."""

    def __init__(
        self,
        path: Path,
        hosts: list[str],
        port: int,
        insecure: bool,
        nodes: list[Node],
        run_folder: str | None = None,
        run_keys: dict[str, Any] | None = None,
    ) -> None:
        self.path, self.hosts, self.port, self.insecure, self.nodes = path, hosts, port, insecure, nodes
        self.run_folder = run_folder  # of the last run, in the server's folder
        self.run_keys = run_keys or {}  # that it was given in place of the app's
        self.ca, self.server, self.operator = path / "ca", path / "server", path / "operator"

    @classmethod
    def create(
        cls, path: Path, config: Config, nodes: int, hosts: Sequence[str] = (), port: int = 8443, insecure: bool = False
    ) -> Deployment:
        if not 1 <= port <= 65535:
            raise DeployError(f"--port {port}: a port is a number from 1 to 65535")
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise DeployError(f"{path} exists already and is not empty: name a new folder")
        made = cls(path, [_checked(host) for host in hosts] or ["127.0.0.1"], port, insecure, [])
        try:
            _folder(path)
            made._write_keys()
            made._write_server()
            made._write_app(config)
            made._add(range(nodes))
        except BaseException:  # half a deployment is none
            shutil.rmtree(path, ignore_errors=True)
            raise
        return made

    @classmethod
    def open(cls, path: Path) -> Deployment:
        try:
            found = json.loads((path / "federation.json").read_text(encoding="utf-8"))
            nodes = [Node(**node) for node in found["nodes"]]
            last = found["run_folder"], found.get("run_keys")
            return cls(path, found["hosts"], found["port"], found["insecure"], nodes, *last)
        except (FileNotFoundError, NotADirectoryError):
            raise DeployError(
                f"{path} is not the folder of a deployment (no federation.json): `fedhpro deploy init {path}` makes one"
            ) from None
        except PermissionError:
            raise DeployError(f"{path} cannot be read: it belongs to another user") from None
        except (ValueError, KeyError, TypeError) as error:
            raise DeployError(f"{path / 'federation.json'} is damaged: {error}") from None

    def save(self) -> None:
        found = {
            "hosts": self.hosts, "port": self.port, "insecure": self.insecure,
            "nodes": [vars(node) for node in self.nodes], "run_folder": self.run_folder,
            "run_keys": self.run_keys,
        }  # fmt: skip
        write_atomically(self.path / "federation.json", json.dumps(found, indent=2) + "\n")

    @property
    def address(self) -> str:
        """Where nodes and operator find the server."""
        host = self.hosts[0]
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    @property
    def config(self) -> Config:
        return load(self.path)

    def site(self, node: Node) -> Path:
        return self.path / "sites" / node.name

    def node(self, name: str) -> Node:
        for node in self.nodes:
            if node.name == name:
                return node
        raise DeployError(
            f"there is no node {name!r}: this federation has {self.nodes[0].name} to {self.nodes[-1].name}"
        )

    def expiry(self) -> dict[str, float]:
        """Days until each certificate ends."""
        if self.insecure:
            return {}
        from . import pki

        files = {"server": self.server / "server.crt", "operator": self.operator / "operator.crt"}
        return {name: pki.days_left(file) for name, file in (files | {"CA": self.operator / "ca.crt"}).items()}

    def add_nodes(self, count: int = 1) -> list[Node]:
        """As new clients, or in place of revoked ones."""
        present = {node.partition for node in self.nodes if node.revoked is None}
        free = [number for number in range(len(present) + len(self.nodes) + count) if number not in present][:count]
        total = len(present | set(free))
        if total > self.config.clients:
            self._write_app(checked(self.config.replace(clients=total), total))
        return self._add(free)

    def _add(self, partitions: Iterable[int]) -> list[Node]:
        added = [Node(f"node-{len(self.nodes) + 1 + i}", number) for i, number in enumerate(partitions)]
        for node in added:
            self._write_site(node)
        self.nodes += added
        self._write_readme()
        self.save()
        return added

    def renew(self) -> None:
        """New certificates for server and operator; from then on the operator's old one is refused."""
        if self.insecure:
            raise DeployError(f"{self.path} was made with --insecure: it has no certificates")
        from . import pki

        authority = self.ca / "ca.key", self.ca / "ca.crt"
        if not authority[0].exists():
            raise DeployError(f"{authority[0]} is not here: bring the CA's key back to sign new certificates")
        names = list(dict.fromkeys([*self.hosts, *ALWAYS]))
        pki.issue(*authority, self.server / "server.key", self.server / "server.crt", "SuperLink", names)
        pki.issue(*authority, self.operator / "operator.key", self.operator / "operator.crt", "operator")
        write_atomically(self.server / "operator.crt", (self.operator / "operator.crt").read_bytes())

    def revoke(self, name: str) -> Node:
        """The gate refuses the key from now on, whatever the SuperLink's database says."""
        if self.insecure:
            raise DeployError(f"{self.path} was made with --insecure: its nodes have no keys")
        from . import pki

        node = self.node(name)
        if node.revoked is not None:
            raise DeployError(f"{name} was revoked already, at {node.revoked}")
        node.revoked = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        file = self.server / "revoked.json"
        revoked = json.loads(file.read_text()) if file.exists() else {}
        key = pki.node_public_key(self.site(node) / "node.pub")
        write_atomically(file, json.dumps(revoked | {hashlib.sha256(key).hexdigest(): name}, indent=2) + "\n")
        self.save()
        return node

    def run_with(self, keys: dict[str, Any], resume: bool) -> dict[str, Any]:
        """The keys of a new run, or of the last one with these in their place, and its folder on the server."""
        if resume and self.run_folder is None:
            raise DeployError(f"{self.path} has no run to go on with: leave --resume out")
        refuse_others(keys)
        keys = self.run_keys | keys if resume else keys
        checked(self.config.replace(**keys), len({node.partition for node in self.nodes}))
        if not resume:
            self.run_folder = f"runs/{datetime.datetime.now():%Y%m%d-%H%M%S}"
        self.run_keys = keys
        return keys | {"out": self.run_folder}

    def _write_app(self, config: Config) -> None:
        from .app import write_app

        write_app(self.path / "app", config)
        write_atomically(self.path / "config.toml", config.to_toml())

    def _write_keys(self) -> None:
        if self.insecure:
            return
        from . import pki

        for folder in (self.ca, self.operator, self.server):
            _folder(folder)
        pki.create_authority(self.ca / "ca.key", self.ca / "ca.crt", f"CA of {self.path.resolve().name}")
        pki.create_signer(self.operator / "signer", self.operator / "signer.pub")
        self.renew()
        for source, target in (
            (self.ca / "ca.crt", self.server),
            (self.ca / "ca.crt", self.operator),
            (self.operator / "signer.pub", self.server),
        ):
            write_atomically(target / source.name, source.read_bytes())
        pki.write_secret(self.server / "runtime.secret", secrets.token_bytes(32))

    def _write_server(self) -> None:
        _folder(self.server)
        everywhere, here = ("::", "::1") if ":" in self.hosts[0] else ("0.0.0.0", "127.0.0.1")
        bind = here if all(_is_loopback(host) for host in self.hosts) else everywhere
        write_atomically(self.server / "server.conf", texts.fill(texts.SERVER_CONF, bind=bind, port=self.port))
        start = texts.INSECURE_SERVER_START if self.insecure else texts.SERVER_START
        _script(self.server / "start.sh", texts.fill(start, environment=texts.ENVIRONMENT))
        self._write_unit(self.server, "fedhpro-superlink.service", "/opt/fedhpro/server", "SuperLink of a federation")

    def _write_site(self, node: Node) -> None:
        folder = self.site(node)
        _folder(folder.parent)
        _folder(folder)
        about: dict[str, Any] = {"name": node.name, "partition": node.partition, "address": self.address}
        about |= {"environment": texts.ENVIRONMENT, "runtime_port": 9094 + node.partition % 50_000}
        about |= {"insecure": " --insecure" if self.insecure else ""}
        about |= {"contents": "" if self.insecure else texts.SITE_CONTENTS, "unit": "fedhpro-supernode.service"}
        about |= {"trust": "" if self.insecure else texts.SITE_TRUST}
        if not self.insecure:
            from . import pki

            pki.create_node_key(folder / "node.key", folder / "node.pub", node.name)
            write_atomically(folder / "ca.crt", (self.operator / "ca.crt").read_bytes())
            write_atomically(folder / "trusted.yaml", pki.trusted_entities(self.operator / "signer.pub"))
            pki.write_secret(folder / "runtime.secret", secrets.token_bytes(32))
        write_atomically(folder / "site.conf", texts.fill(texts.SITE_CONF, **about))
        _script(folder / "start.sh", texts.fill(texts.SITE_START, **about))
        write_atomically(folder / "README.md", texts.fill(texts.SITE_README, **about))
        self._write_unit(folder, str(about["unit"]), f"/opt/fedhpro/{node.name}", f"{node.name} of a federation")

    def _write_unit(self, folder: Path, unit: str, place: str, what: str) -> None:
        write_atomically(folder / unit, texts.fill(texts.UNIT, unit=unit, place=place, what=what))

    def _write_readme(self) -> None:
        security = texts.INSECURE if self.insecure else texts.fill(texts.SECURE, hosts=", ".join(self.hosts))
        content = texts.fill(texts.OPERATOR_README, count=len(self.nodes), security=security)
        write_atomically(self.path / "README.md", content.replace("FOLDER", self.path.name))


def prepared(keys: dict[str, Any], nodes: int) -> Config:
    """The config of a federation of so many nodes; without other keys, each site has its own data."""
    refuse_others(keys)
    if not 1 <= nodes <= MOST_NODES:
        raise DeployError(f"--nodes {nodes}: a federation has 1 to {MOST_NODES:,} nodes")
    return checked(configure(**({"data": "sites"} | keys | {"clients": nodes, "engine": "flower"})), nodes)


def refuse_others(keys: dict[str, Any]) -> None:
    for name in ("clients", "out", "engine"):
        if name in keys:
            who = "--nodes of `fedhpro deploy init`" if name == "clients" else "the deployment"
            raise DeployError(f"{name} is not a key here: {who} says it")


def checked(config: Config, nodes: int) -> Config:
    """Whatever can be wrong with it shows here, and not at the sites."""
    from ..federation import Federation

    found = len(Federation(config).clients)
    if found != nodes:
        raise DeployError(
            f"data={config.data} with scenario={config.scenario} has {found} clients, and there are {nodes} nodes: "
            f"take {found} nodes, or scenario=iid"
        )
    return config


def _checked(host: str) -> str:
    name = host.strip("[]")
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        pass
    label = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
    if not re.fullmatch(rf"{label}(\.{label})*", name) or len(name) > 253 or re.fullmatch(r"[\d.]+", name):
        raise DeployError(f"--host {host}: write a name like fl.example.org or an IP address, without port")
    return name


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _folder(path: Path) -> None:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.chmod(0o700)


def _script(path: Path, content: str) -> None:
    write_atomically(path, content)
    path.chmod(0o700)
