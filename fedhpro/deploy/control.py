"""What the operator says to the SuperLink: register, run, list, stop. Needs the operator's certificate."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import socket
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import pki
from .folder import DeployError, Deployment, Node

for _name, _value in {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}.items():
    os.environ.setdefault(_name, _value)  # before flwr is imported: nothing is reported or looked up


@dataclass
class NodeState:
    name: str
    status: str  # not registered, registered, online, offline, revoked
    since: str = ""
    id: int | None = None


@dataclass
class RunState:
    id: int
    status: str
    details: str  # why it failed
    started: str
    bytes_down: int
    bytes_up: int


class Control:
    def __init__(self, deployment: Deployment) -> None:
        from flwr.supercore.control import ControlHttpClient

        self.deployment = deployment
        if deployment.insecure:
            self.client = ControlHttpClient(f"http://{deployment.address}")
        else:
            context = ssl.create_default_context(cafile=str(deployment.operator / "ca.crt"))
            context.load_cert_chain(deployment.operator / "operator.crt", deployment.operator / "operator.key")
            self.client = ControlHttpClient(f"https://{deployment.address}", verify=context)

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def answers(self) -> bool:
        """Whether there is a server at all, whatever it thinks of us."""
        host, port = self.deployment.hosts[0], self.deployment.port
        try:
            with socket.create_connection((host, port), timeout=2):
                return True
        except OSError:
            return False

    def nodes(self) -> list[NodeState]:
        """Every node of the folder, as the server sees it; where nodes have no keys, whoever is connected."""
        from flwr.proto.control_pb2 import ListNodesRequest

        with self.explained():
            listed = self.client.ListNodes(ListNodesRequest()).nodes_info
        if self.deployment.insecure:
            return [_node_state(str(info.node_id), info) for info in listed]
        known = {info.public_key: info for info in listed}  # a key that was unregistered stays listed
        found = []
        for node in self.deployment.nodes:
            info = known.get(pki.node_public_key(self.deployment.site(node) / "node.pub"))
            state = NodeState(node.name, "not registered") if info is None else _node_state(node.name, info)
            found.append(NodeState(node.name, "revoked", node.revoked) if node.revoked else state)
        return found

    def clients(self) -> dict[int, int]:
        """Which client each registered node is: no node can be another's. Without keys there is nobody to know."""
        if self.deployment.insecure:
            return {}
        partition = {node.name: node.partition for node in self.deployment.nodes if node.revoked is None}
        return {n.id: partition[n.name] for n in self.nodes() if n.name in partition and n.id is not None}

    def register(self) -> list[str]:
        """Register every node that is not yet; the names of the new ones."""
        from flwr.proto.control_pb2 import RegisterNodeRequest

        if self.deployment.insecure:
            raise DeployError(f"{self.deployment.path} was made with --insecure: nodes need no registration")
        new = [state.name for state in self.nodes() if state.status == "not registered"]
        for name in new:
            key = pki.node_public_key(self.deployment.site(self.deployment.node(name)) / "node.pub")
            with self.explained():
                self.client.RegisterNode(RegisterNodeRequest(public_key=key, name=name))
        return new

    def unregister(self, node: Node) -> bool:
        """Whether the server knew the key."""
        from flwr.proto.control_pb2 import ListNodesRequest, UnregisterNodeRequest

        key = pki.node_public_key(self.deployment.site(node) / "node.pub")
        with self.explained():
            for info in self.client.ListNodes(ListNodesRequest()).nodes_info:
                if info.public_key == key and info.status != "unregistered":
                    self.client.UnregisterNode(UnregisterNodeRequest(node_id=info.node_id))
                    return True
        return False

    def start(self, app: Path, keys: Mapping[str, Any] | None = None) -> int:
        """Bundle the app, sign it, submit it, with these keys in place of its own: the number of the run."""
        from flwr.cli.build import build_fab_from_disk
        from flwr.common.serde import user_config_to_proto
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.proto.fab_pb2 import Fab

        try:
            bundle = build_fab_from_disk(app)
        except (OSError, ValueError) as error:
            raise DeployError(f"{app} is not an app: {' '.join(str(error).split())}") from None
        signature = {} if self.deployment.insecure else pki.sign_app(bundle, self.deployment.operator / "signer")
        fab = Fab(hash_str=hashlib.sha256(bundle).hexdigest(), content=bundle, verifications=signature)
        override: dict[str, bool | float | int | str] = {
            "keys": shlex.join(f"{name}={value}" for name, value in (keys or {}).items()),
            "nodes": json.dumps(self.clients()),
        }
        with self.explained():
            response = self.client.StartRun(StartRunRequest(fab=fab, override_config=user_config_to_proto(override)))
        if not response.HasField("run_id"):
            raise DeployError("the server did not start the run: its log says why")
        return int(response.run_id)

    def runs(self) -> list[RunState]:
        from flwr.proto.control_pb2 import ListRunsRequest

        with self.explained():
            found = self.client.ListRuns(ListRunsRequest()).run_dict
        runs = [_run_state(run) for run in found.values()]
        return sorted(runs, key=lambda run: run.started)

    def stop(self, run: int) -> bool:
        from flwr.proto.control_pb2 import StopRunRequest

        with self.explained():
            return bool(self.client.StopRun(StopRunRequest(run_id=run)).success)

    def log(self, run: int) -> Iterator[str]:
        """The run's log as it is written, until the run ends."""
        from flwr.proto.control_pb2 import StreamLogsRequest

        with self.explained():
            for part in self.client.StreamLogs(StreamLogsRequest(run_id=run, after_timestamp=0.0)):
                yield part.log_output

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """What goes wrong on the way, in a sentence."""
        import httpx

        try:
            yield
        except httpx.HTTPStatusError as error:
            raise DeployError(f"the server refused: {_reason(error.response)}") from None
        except httpx.HTTPError as error:
            if re.search("certificate (has )?expired", str(error)):
                raise DeployError(
                    f"a certificate has expired: `fedhpro deploy renew {self.deployment.path}` makes new ones"
                ) from None
            raise DeployError(
                f"the server at {self.deployment.address} does not answer ({error}): "
                f"start it with {self.deployment.server / 'start.sh'}"
            ) from None


def _node_state(name: str, info: Any) -> NodeState:
    since = {"online": info.last_activated_at, "offline": info.last_deactivated_at, "registered": info.registered_at}
    return NodeState(name, info.status, since.get(info.status, info.unregistered_at), info.node_id)


def _run_state(run: Any) -> RunState:
    status = run.status.status if run.status.status != "finished" else f"finished: {run.status.sub_status}"
    return RunState(run.run_id, status, run.status.details, run.pending_at, run.bytes_sent, run.bytes_recv)


def _reason(response: Any) -> str:
    try:
        found = json.loads(response.text)
        return str(found.get("detail") or found.get("public_message") or found.get("message") or found)
    except (ValueError, AttributeError):
        return f"HTTP {response.status_code} {response.text[:200]}"
