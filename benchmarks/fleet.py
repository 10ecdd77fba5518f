"""What a SuperLink behind its gate spends on its nodes: requests in a second, CPU, memory (docs/federation-scale.md).

    python benchmarks/fleet.py [--nodes 50] [--seconds 10] [--connections 4]

Starts a server in a temporary folder on loopback, registers that many keys, and lets threads here ask for messages as
idle SuperNodes do, signed with the nodes' keys, over TLS, as fast as the server answers. Then it stops the server.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest
from flwr.proto.node_pb2 import Node as NodeId
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedhpro.deploy import pki
from fedhpro.deploy.control import Control
from fedhpro.deploy.folder import DeployError, Deployment, prepared

IDLE_POLL = 3.0  # seconds between two looks of an idle SuperNode, of flwr 1.41


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--connections", type=int, default=4)
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        config = prepared({"classes": "a,b"}, options.nodes)
        deployment = Deployment.create(Path(folder) / "fed", config, options.nodes, port=port)
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        server = subprocess.Popen(
            [deployment.server / "start.sh"], start_new_session=True, env=environment,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            start = time.monotonic()
            while True:
                try:
                    with Control(deployment) as control:
                        control.register()
                    break
                except DeployError:
                    if time.monotonic() - start > 60:
                        raise
                    time.sleep(0.5)
            print(json.dumps(measure(deployment, server.pid, options.seconds, options.connections), indent=2))
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait()


def measure(deployment: Deployment, pid: int, seconds: float, connections: int) -> dict[str, float]:
    clients = [connect(deployment, node.name) for node in deployment.nodes]
    end, taken = time.monotonic() + seconds, []
    cpu = cpu_seconds(pid)

    def ask(first: int) -> None:
        number = first
        while time.monotonic() < end:
            client, node = clients[number % len(clients)]
            before = time.monotonic()
            client.PullMessages(PullMessagesRequest(node=NodeId(node_id=node)))
            taken.append(time.monotonic() - before)
            number += connections

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    per_second, spent = len(taken) / seconds, cpu_seconds(pid) - cpu
    return {
        "nodes": len(clients),
        "requests_per_second": round(per_second, 1),
        "server_cpu_ms_per_request": round(1000 * spent / len(taken), 2),
        "median_ms": round(1000 * statistics.median(taken), 2),
        "idle_nodes_of_one_core": round(IDLE_POLL * len(taken) / spent),
        "server_peak_mb": peak_mb(pid),
        "load": os.getloadavg()[0],
    }


def connect(deployment: Deployment, name: str) -> tuple[FleetHttpClient, int]:
    site = deployment.site(deployment.node(name))
    key = load_ssh_private_key((site / "node.key").read_bytes(), None)
    interceptors = [RuntimeVersionHttpInterceptor("SuperNode"), NodeAuthHttpInterceptor(key, key.public_key())]
    client = FleetHttpClient.from_server_address(deployment.address, False, str(site / "ca.crt"), interceptors)
    public = pki.node_public_key(site / "node.pub")
    return client, client.ActivateNode(ActivateNodeRequest(public_key=public, heartbeat_interval=30)).node_id


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_mb(pid: int) -> float:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return round(int(found[1]) / 1024, 1) if found else 0.0


if __name__ == "__main__":
    main()
