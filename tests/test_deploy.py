"""A federation's folder, its keys, its gate; and, marked slow, a real one on loopback, all of it stopped again."""

import asyncio
import base64
import configparser
import hashlib
import io
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import call
from rich.console import Console

from fedhpro import cli
from fedhpro.config import configure
from fedhpro.deploy import commands, folder
from fedhpro.files import write_atomically

pytest.importorskip("flwr", reason="the extra `flower` is not installed")
from loopback import Loopback, free_port, has_said, wait_for

from fedhpro.deploy import control, gate, pki, status
from fedhpro.deploy import node as supernode
from fedhpro.engines import flower

pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern.*:DeprecationWarning")  # in flwr

# An app as small as can be, without torch: adds one (and the node's number) in every round.
PYPROJECT = """\
[project]
name = "counting"
version = "1.0.0"
dependencies = []
[tool.flwr.app]
publisher = "test"
[tool.flwr.app.components]
serverapp = "counting.app:server"
clientapp = "counting.app:client"
[tool.flwr.app.config]
keys = ""
nodes = "{}"
"""
COUNTING = """\
import time
import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server = ServerApp()
client = ClientApp()

@client.train()
def train(message, context):
    x = message.content["arrays"]["x"].numpy() + 1 + int(context.node_config["partition-id"])
    return Message(RecordDict({"arrays": ArrayRecord({"x": Array(x)})}), reply_to=message)

@server.main()
def main(grid, context):
    deadline = time.time() + 60
    while len(ids := sorted(grid.get_node_ids())) < 2 and time.time() < deadline:
        time.sleep(0.2)
    x = np.zeros(1)
    for number in (1, 2):
        record = RecordDict({"arrays": ArrayRecord({"x": Array(x)})})
        sent = [Message(record, dst_node_id=i, message_type="train", group_id=str(number)) for i in ids]
        replies = list(grid.send_and_receive(sent, timeout=120))
        print("errors", number, [reply.error.reason for reply in replies if reply.has_error()], flush=True)
        x = sum([reply.content["arrays"]["x"].numpy() for reply in replies if not reply.has_error()], np.zeros(1))
        print("sum", number, x.tolist(), flush=True)
"""


def write_counting_app(deployment, config):
    app = deployment.path / "app"
    for name, text in {"pyproject.toml": PYPROJECT, "counting/__init__.py": "", "counting/app.py": COUNTING}.items():
        write_atomically(app / name, text)
    write_atomically(deployment.path / "config.toml", config.to_toml())


@pytest.fixture
def small_app(monkeypatch):
    monkeypatch.setattr(folder.Deployment, "_write_app", write_counting_app)


@pytest.fixture(autouse=True)
def fresh_consoles(monkeypatch):
    for console in (cli.out, cli.err, commands.out, commands.err):  # rich keeps the stream that it first saw
        monkeypatch.setattr(console, "_file", None)
        monkeypatch.setattr(console, "_width", 200)


@pytest.fixture
def federation(tmp_path, small_app):
    config = folder.prepared({"classes": "a,b"}, 3)
    return folder.Deployment.create(tmp_path / "fed", config, 3, ["fl.example.org", "192.0.2.7", "::1"], 9443)


def contents(path):
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


# The folder


def test_private_keys_are_private_and_scripts_are_sound(federation):
    for file, content in contents(federation.path).items():
        if b"PRIVATE KEY" in content or file.name.endswith(".secret"):
            assert file.stat().st_mode & 0o777 == 0o600, file
        if file.suffix == ".sh":
            assert file.stat().st_mode & 0o777 == 0o700
            subprocess.run(["bash", "-n", file], check=True)
            assert "set -euo pipefail" in file.read_text() and "--insecure --superlink" not in file.read_text()
    for path in (federation.path, federation.ca, federation.operator, federation.server, federation.path / "sites"):
        assert path.stat().st_mode & 0o777 == 0o700
    for node in federation.nodes:
        assert federation.site(node).stat().st_mode & 0o777 == 0o700


def test_a_secret_is_in_one_place_and_never_in_the_app(federation):
    secrets = [content for file, content in contents(federation.path).items() if file.stat().st_mode & 0o777 == 0o600]
    assert len(secrets) == 4 + 1 + 2 * 3  # ca, operator, signer, server; the server's runtime secret; two for each node
    everything = contents(federation.path)
    for secret in secrets:
        assert sum(secret in content for content in everything.values()) == 1
    names = {file.name for file in federation.site(federation.nodes[0]).iterdir()}
    assert names == {
        "README.md", "ca.crt", "fedhpro-supernode.service", "node.key", "node.pub", "runtime.secret", "site.conf",
        "start.sh", "trusted.yaml",
    }  # fmt: skip
    assert not any(b"PRIVATE" in content for content in contents(federation.path / "app").values())


def test_certificates_are_of_this_ca_for_these_hosts_and_end_in_time(federation):
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    authority = pki.read_certificate(federation.ca / "ca.crt")
    for path, purpose in (
        (federation.server / "server.crt", ExtendedKeyUsageOID.SERVER_AUTH),
        (federation.operator / "operator.crt", ExtendedKeyUsageOID.CLIENT_AUTH),
    ):
        certificate = pki.read_certificate(path)
        certificate.verify_directly_issued_by(authority)
        assert list(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [purpose]
        assert 364 < pki.days_left(path) <= 365
    names = pki.read_certificate(federation.server / "server.crt").extensions
    names = names.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org", "localhost"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["192.0.2.7", "::1", "127.0.0.1"]
    assert 3649 < federation.expiry()["CA"] <= 3650
    context = ssl.create_default_context(cafile=str(federation.site(federation.nodes[0]) / "ca.crt"))
    assert context.cert_store_stats()["x509_ca"] == 1


def test_flower_reads_the_node_keys(federation):
    from flwr.cli.supernode.register import try_load_public_key
    from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode, _try_setup_client_authentication

    site = federation.site(federation.nodes[1])
    arguments = _parse_args_run_supernode().parse_args(["--auth-supernode-private-key", str(site / "node.key")])
    private, _ = _try_setup_client_authentication(arguments)
    assert private.curve.name == "secp384r1"
    assert try_load_public_key(site / "node.pub") == pki.node_public_key(site / "node.pub")


def test_flower_accepts_the_operators_signature_and_no_other(federation, tmp_path):
    import yaml
    from flwr.supercore.fab import Fab
    from flwr.supernode.start_client_internal import _verify_fab

    trusted = yaml.safe_load((federation.site(federation.nodes[0]) / "trusted.yaml").read_text())
    signature = pki.sign_app(b"an app", federation.operator / "signer")
    public = federation.operator / "signer.pub"
    assert _verify_fab(Fab("", b"an app", signature), trusted) and pki.is_signed(b"an app", signature, public)
    assert not _verify_fab(Fab("", b"another", signature), trusted)
    assert not pki.is_signed(b"another", signature, public) and not pki.is_signed(b"an app", {}, public)
    pki.create_signer(tmp_path / "thief", tmp_path / "thief.pub")
    forged = pki.sign_app(b"an app", tmp_path / "thief")
    assert not _verify_fab(Fab("", b"an app", forged), trusted) and not pki.is_signed(b"an app", forged, public)


def test_renew_add_and_revoke_change_what_they_say(federation):
    before = contents(federation.path)
    federation.renew()
    changed = {str(file.relative_to(federation.path)) for file, content in contents(federation.path).items()
               if before.get(file) != content}  # fmt: skip
    assert changed == {
        "server/server.key", "server/server.crt", "server/operator.crt",
        "operator/operator.key", "operator/operator.crt",
    }  # fmt: skip
    federation.revoke("node-2")
    federation.add_nodes(2)
    found = folder.Deployment.open(federation.path)
    assert [node.name for node in found.nodes] == [f"node-{number}" for number in range(1, 6)]
    assert [node.partition for node in found.nodes] == [0, 1, 2, 1, 3]  # one in place of node-2, one more
    assert [node.revoked is not None for node in found.nodes] == [False, True, False, False, False]
    assert list(json.loads((federation.server / "revoked.json").read_text()).values()) == ["node-2"]
    with pytest.raises(folder.DeployError, match="revoked already"):
        found.revoke("node-2")


def test_a_run_that_goes_on_has_the_keys_that_it_was_given(federation):
    def given(resume=False, **keys):
        found = folder.Deployment.open(federation.path)
        keys = found.run_with(keys, resume)
        found.save()
        return keys

    first = given(method="fedavg", rounds="20")
    assert first == {"method": "fedavg", "rounds": "20", "out": first["out"]}
    assert given(resume=True) == first
    assert given(resume=True, rounds="30") == given(resume=True) == first | {"rounds": "30"}
    assert given().keys() == {"out"}


def test_which_method_other_keys_chose_is_said(capsys, small_app, tmp_path):
    for command in (["init", tmp_path / "a", "classes=a,b"], ["audit", "data=sites", "classes=a,b"]):
        code, _, error = call(capsys, "deploy", *command, "M=0")
        assert code == 0 and "no method is named: fedhpro, since M is a key of it" in error


def test_systemd_accepts_the_units_which_start_what_is_there_and_may_write_nowhere_else(federation, tmp_path):
    sites = [(federation.site(node), "fedhpro-supernode.service", node.name) for node in federation.nodes]
    for path, name, place in [(federation.server, "fedhpro-superlink.service", "server"), *sites]:
        place, unit = f"/opt/fedhpro/{place}", configparser.ConfigParser(interpolation=None, strict=False)
        unit.optionxform = str
        unit.read(path / name)
        service = unit["Service"]
        assert service["ExecStart"] == f"{place}/start.sh" and (path / "start.sh").stat().st_mode & 0o100
        assert service["User"] == "fedhpro" and service["ReadWritePaths"] == place and service["UMask"] == "0077"
        assert service["Restart"] == "always" and unit["Install"]["WantedBy"] == "multi-user.target"
        hardening = {
            "NoNewPrivileges": "yes",
            "ProtectSystem": "strict",
            "ProtectHome": "read-only",
            "PrivateTmp": "yes",
        }
        assert hardening.items() <= dict(service).items()
        if shutil.which("systemd-analyze"):
            here = tmp_path / name
            here.write_text((path / name).read_text().replace(place, str(path)))
            done = subprocess.run(["systemd-analyze", "verify", "--man=no", here], capture_output=True, text=True)
            assert done.returncode == 0 and name not in done.stderr, done.stderr


def test_insecure_is_asked_for_and_warned_about(capsys, tmp_path, small_app):
    code, text, error = call(capsys, "deploy", "init", tmp_path / "open", "--nodes", 2, "--insecure", "classes=a,b")
    assert code == 0 and "WARNING" in error and "run code on every node" in error
    made = folder.Deployment.open(tmp_path / "open")
    assert "NOT PROTECTED" in (made.path / "README.md").read_text()
    assert (
        "--insecure" in (made.server / "start.sh").read_text()
        and "BIND:=127.0.0.1" in (made.server / "server.conf").read_text()
    )
    code, text, error = call(capsys, "deploy", "init", tmp_path / "closed", "--nodes", 2, "classes=a,b")
    assert code == 0 and not error and "certificate of server: ends in 365 days" in text


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["init", "new", "classes=a,b", "--nodes", "0"], ["--nodes 0", "1 to 10,000"]),
        (["init", "new", "classes=a,b", "--port", "70000"], ["--port 70000"]),
        (["init", "new", "classes=a,b", "--host", "https://x.org"], ["https://x.org", "without port"]),
        (["init", "new", "classes=a,b", "--host", "10.0.0.300"], ["10.0.0.300"]),
        (["init", "full", "classes=a,b"], ["full", "not empty"]),
        (["init", "new", "roundz=3"], ["roundz", "rounds"]),
        (["init", "new"], ["classes=benign,malignant"]),
        (["init", "new", "classes=a,b", "clients=3"], ["clients", "--nodes"]),
        (["init", "new", "classes=a,b", "privacy=local", "weights=equal"], ["without noise: evaluation=off"]),
        (["init", "new", "data=digits-lite"], ["20 clients", "2 nodes", "scenario=iid"]),
        (["status", "missing"], ["missing", "deploy init"]),
        (["register", "full"], ["full", "deploy init"]),
        (["register", "fed", "--wait", "0.1"], ["does not answer", "start.sh"]),
        (["revoke", "fed", "node-9"], ["node-9", "node-1 to node-3"]),
        (["renew", "full"], ["full"]),
        (["run", "fed"], ["does not answer", "start.sh"]),
        (["run", "fed", "roundz=3"], ["roundz", "rounds"]),
        (["run", "fed", "method=fedavg"], ["does not answer"]),
        (["run", "fed", "--resume"], ["no run to go on with"]),
        (["run", "fed", "clients=3"], ["clients", "deploy init"]),
        (["run", "fed", "out=runs/mine"], ["out is not a key here"]),
        (["run", "fed", "privacy=local", "noise=4"], ["weights=equal"]),
        (["serve", "full"], ["full", "server.crt"]),
        (["audit", "fed", "rounds=3"], ["not both"]),
    ],
)
def test_wrong_input_is_one_sentence(capsys, federation, monkeypatch, arguments, words):
    monkeypatch.chdir(federation.path.parent)
    (federation.path.parent / "full").mkdir()
    (federation.path.parent / "full" / "x").touch()
    federation.hosts, federation.port = ["127.0.0.1"], free_port()
    federation.save()
    code, _, error = call(capsys, "deploy", *arguments)
    assert code == 2 and error.startswith("fedhpro: ") and error.count("\n") == 1, error
    for word in words:
        assert word in error
    assert not (federation.path.parent / "new").exists()


def test_without_flower_a_sentence_says_what_to_install(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(commands.importlib.util, "find_spec", lambda name: None)
    code, _, error = call(capsys, "deploy", "init", tmp_path / "new")
    assert code == 2 and "fedhpro[flower]" in error


def test_status_without_a_server_still_shows_the_certificates(capsys, federation, monkeypatch):
    federation.hosts, federation.port = ["127.0.0.1"], free_port()
    federation.save()
    code, text, _ = call(capsys, "deploy", "status", federation.path)
    assert code == 1 and "certificate of operator: ends in" in text and "does not answer" in text
    assert status.expiry_lines({"server": -3.0, "operator": 12.0}) == [
        "[red]certificate of server: expired 3 days ago[/]",
        "[yellow]certificate of operator: ends in 12 days[/]",
    ]


def test_status_says_under_the_table_why_a_run_failed():
    run = {
        "id": 2**64 - 1,
        "status": "finished: completed",
        "details": "no client came " * 20,
        "started": "2026-11-19T21:02:44Z",
    }
    found = {"server": "here", "expires_in_days": {}, "nodes": [], "round": None}
    found["runs"] = [run | {"bytes_down": 10_009_962, "bytes_up": 0}]
    console = Console(file=io.StringIO(), width=80)
    console.print(status.view(found), soft_wrap=True)
    row, why = console.file.getvalue().splitlines()[-2:]
    assert row.split() == [str(2**64 - 1), "finished:", "completed", "2026-11-19", "21:02", "10.0", "0.0"]
    assert why == f"run {2**64 - 1}: {run['details']}"


def test_flowers_programs_are_found_without_an_activated_environment(monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin")
    gate.find_programs()
    assert shutil.which("flower-superexec") and shutil.which("flwr-serverapp")


def test_watch_goes_on_until_it_is_told_to_stop(capsys, federation, monkeypatch):
    federation.hosts, federation.port = ["127.0.0.1"], free_port()
    federation.save()
    looks = iter([None, None])

    def sleep(seconds):
        if next(looks, "enough") == "enough":
            raise KeyboardInterrupt

    monkeypatch.setattr(commands.time, "sleep", sleep)
    code, text, _ = call(capsys, "deploy", "status", federation.path, "--watch")
    assert code in (1, 130) and "certificate of CA" in text and next(looks, "over") == "over"


def test_audit_lists_what_leaves_and_what_comes(capsys, federation):
    from fedhpro.federation import Federation

    code, text, _ = call(capsys, "deploy", "audit", federation.path, "--json")
    rows = [row for row in json.loads(text) if not row["tensor"].startswith("evaluation/")]  # see below
    made = Federation(federation.config)
    for direction, expected in (("up", made.upload), ("down", made.sent())):
        found = {row["tensor"]: (row["shape"], row["bytes"]) for row in rows if row["direction"] == direction}
        assert found == {name: (list(value.shape), value.nbytes) for name, value in expected.items()}
    code, text, _ = call(capsys, "deploy", "audit", "data=sites", "classes=a,b,c", "compress=fp16")
    assert code == 0 and "leaves a site" in text and "comes to a site" in text
    assert re.search(r"evaluation/head +3 x 3 +int64 +72", text)  # how many of which class were taken for which
    assert re.search(r"model/classifier.weight +3 x 128 +float16 +768", text)


@pytest.mark.parametrize(
    ("keys", "leaves"), [([], True), (["secure=true"], False), (["privacy=local", "weights=equal"], False)]
)
def test_audit_says_that_the_number_of_samples_leaves_only_where_it_does(capsys, keys, leaves):
    keys = ["data=sites", "classes=a,b,c", "engine=flower", "evaluation=off", "method=fedavg", *keys]
    code, text, error = call(capsys, "deploy", "audit", *keys)
    found = re.search("(a constant in place of )?how many samples it trains on", " ".join(text.split()))
    assert code == 0 and (found[1] is None) == leaves, error


def test_keys_of_a_run_may_have_spaces_in_their_values(tmp_path, monkeypatch):
    """From the operator's command to the ServerApp."""
    asked, served = [], []
    answer = SimpleNamespace(HasField=lambda name: True, run_id=7)
    operator = object.__new__(control.Control)
    operator.deployment = SimpleNamespace(insecure=True)
    operator.client = SimpleNamespace(StartRun=lambda request: asked.append(request) or answer)
    monkeypatch.setattr("flwr.cli.build.build_fab_from_disk", lambda app: b"")
    assert operator.start(tmp_path, {"rounds": 3, "classes": "ill,not ill"}) == 7
    monkeypatch.setattr(flower, "serve", lambda config, grid: served.append(config))
    (tmp_path / "config.toml").write_text(configure(data="sites", classes="a,b").to_toml())
    context = SimpleNamespace(run_config={name: value.string for name, value in asked[0].override_config.items()})
    flower.server_app(tmp_path / "config.toml")(None, context)
    assert [(config.rounds, config.classes) for config in served] == [(3, "ill,not ill")]


# The node, without a server


def test_data_and_port_of_a_site_are_looked_at_before_it_connects(capsys, tmp_path):
    def refusal(*options):
        required = ["--superlink", "127.0.0.1:1", "--partition", 0, "--memory", tmp_path / "memory"]
        code, _, error = call(capsys, "deploy", "node", tmp_path, *required, *options)
        assert code == 2 and error.startswith("fedhpro: ") and error.count("\n") == 1
        return error

    assert "there is no such folder" in refusal("--data", f"folder:{tmp_path / 'missing'}")
    assert "there is no such file" in refusal("--data", f"csv:{tmp_path}")
    assert "write folder:/path" in refusal("--data", str(tmp_path))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert "RUNTIME_PORT" in refusal("--port", other.getsockname()[1])
    assert not (tmp_path / "memory").exists()


def test_a_node_tries_again_what_may_pass_and_nothing_else(monkeypatch):
    import httpx

    def answer(status, **content):
        request = httpx.Request("POST", "https://127.0.0.1")
        response = httpx.Response(status, request=request, json=content)
        return httpx.HTTPStatusError("", request=request, response=response)

    passing = [httpx.ConnectTimeout("_ssl.c:989: The handshake operation timed out"), answer(500), answer(503)]
    passing += [httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate has expired")]
    passing += [answer(412, code=2004, detail="Failed to activate SuperNode.")]
    for error in [*passing, answer(412)]:
        troubles, invoker = [error], supernode.patient_retries()
        invoker.wait_function = lambda seconds: None
        request = lambda troubles=troubles: "done" if not troubles else raises(troubles.pop())  # noqa: E731
        if error in passing:
            assert invoker.invoke(request) == "done"
        else:
            with pytest.raises(httpx.HTTPStatusError):
                invoker.invoke(request)


def raises(error):
    raise error


def test_a_nodes_heartbeat_outlives_an_error():
    beats = iter([RuntimeError("not known"), True])

    def beat():
        found = next(beats)
        return found if found is True else raises(found)

    heart = supernode.Heartbeat(beat)
    assert [heart.heartbeat_fn(), heart.heartbeat_fn()] == [False, True]


def test_a_program_beside_the_server_is_started_again_and_ends_with_it(tmp_path):
    starts = tmp_path / "starts"
    command = ["bash", "-c", f"echo $$ >> {starts}; [ $(wc -l < {starts}) = 1 ] || exec sleep 60"]
    with gate.kept_running(command):
        wait_for(lambda: starts.exists() and starts.read_text().count("\n") == 2, 20)
    for pid in starts.read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


# The gate, without Flower behind it


async def everything_is_fine(scope, receive, send):
    """Behind the gate: an application that answers with the path and the body that reached it."""
    body = b""
    while (event := await receive())["type"] == "http.request":
        body += event.get("body", b"")
        if not event.get("more_body"):
            break
    await gate.answer(send, 200, scope["path"].encode() + b" " + body, b"text/plain")


def ask(application, path, body=b"", peer=None, client="198.51.100.4", headers=()):
    """Status and body of one request."""
    scope = {"type": "http", "path": path, "headers": list(headers), "client": (client, 5), "state": {"peer": peer}}
    sent = []

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(event):
        sent.append(event)

    asyncio.run(application(scope, receive, send))
    length = dict(sent[0]["headers"])[b"content-length"]
    found = b"".join(event["body"] for event in sent[1:])
    assert int(length) == len(found)
    return sent[0]["status"], found


def operators_fingerprint(federation):
    return pki.fingerprint(federation.operator / "operator.crt")


@pytest.mark.parametrize(
    "path", ["list-nodes", "list-runs", "register-node", "start-run", "stop-run", "stream-logs", "x"]
)
def test_control_is_the_operators_alone(federation, path):
    guarded = gate.Gate(everything_is_fine, federation.server)
    for peer in (None, "00" * 32, pki.fingerprint(federation.server / "server.crt")):
        code, body = ask(guarded, f"/v1/control/{path}", peer=peer)
        assert code == 403 and b"operator's certificate" in body
    code, _ = ask(guarded, f"/v1/control/{path}", peer=operators_fingerprint(federation))
    assert code == (403 if path == "start-run" else 200)  # an empty request is not signed


def test_the_old_operator_certificate_is_refused_after_renewal(federation):
    guarded, old = gate.Gate(everything_is_fine, federation.server), operators_fingerprint(federation)
    assert ask(guarded, "/v1/control/list-nodes", peer=old)[0] == 200
    federation.renew()
    assert ask(guarded, "/v1/control/list-nodes", peer=old)[0] == 403
    assert ask(guarded, "/v1/control/list-nodes", peer=operators_fingerprint(federation))[0] == 200


def test_what_is_not_named_does_not_exist(federation):
    guarded = gate.Gate(everything_is_fine, federation.server)
    operator = operators_fingerprint(federation)
    for path in ("/", "/docs", "/openapi.json", "/v1/responses", "//v1/control/list-nodes", "/V1/fleet/x", "/healthy"):
        assert ask(guarded, path, peer=operator)[0] == 404
    assert ask(guarded, "/health")[0] == 200
    assert ask(guarded, "/v1/runtime/acquire-task")[0] == 403
    assert ask(guarded, "/v1/runtime/acquire-task", client="127.0.0.1")[0] == 200


def test_only_signed_apps_are_taken_and_the_signature_goes_with_them(federation):
    from flwr.proto.control_pb2 import StartRunRequest
    from flwr.proto.fab_pb2 import Fab, GetFabResponse

    operator, bundle = operators_fingerprint(federation), b"an app"
    signature = pki.sign_app(bundle, federation.operator / "signer")
    guarded = gate.Gate(everything_is_fine, federation.server)

    def submit(content, verifications):
        body = StartRunRequest(fab=Fab(content=content, verifications=verifications)).SerializeToString()
        code, found = ask(guarded, gate.START_RUN, body, operator)
        assert code != 200 or found.endswith(body)  # what was checked is what goes on
        return code

    assert submit(bundle, {}) == 403 and submit(b"another", signature) == 403
    assert ask(guarded, gate.START_RUN, b"\xff\xff garbage", operator)[0] == 400
    assert ask(guarded, gate.START_RUN, b"x" * (gate.LARGEST_APP + 1), operator)[0] == 413
    assert submit(bundle, signature) == 200

    async def superlink(scope, receive, send):
        fab = Fab(hash_str=hashlib.sha256(bundle).hexdigest(), content=bundle)
        await gate.answer(send, 200, GetFabResponse(fab=fab).SerializeToString(), b"application/protobuf")

    code, body = ask(gate.Gate(superlink, federation.server), gate.GET_FAB)
    assert code == 200 and dict(GetFabResponse.FromString(body).fab.verifications) == signature


def test_a_revoked_key_is_shut_out_of_fleet_and_registration(federation):
    from flwr.proto.control_pb2 import RegisterNodeRequest

    guarded, operator = gate.Gate(everything_is_fine, federation.server), operators_fingerprint(federation)
    keys = [pki.node_public_key(federation.site(node) / "node.pub") for node in federation.nodes]
    headers = [[(gate.NODE_KEY, base64.b64encode(key))] for key in keys]
    federation.revoke("node-1")
    assert [ask(guarded, "/v1/fleet/pull-messages", headers=header)[0] for header in headers] == [401, 200, 200]
    for order in (headers[0] + headers[1], headers[1] + headers[0]):  # hidden behind another key
        assert ask(guarded, "/v1/fleet/pull-messages", headers=order)[0] == 401
    assert ask(guarded, "/v1/fleet/pull-messages", headers=[(gate.NODE_KEY, b"?")])[0] == 401
    bodies = [RegisterNodeRequest(public_key=key).SerializeToString() for key in keys]
    assert [ask(guarded, gate.REGISTER, body, operator)[0] for body in bodies] == [401, 200, 200]


def test_over_real_tls_only_the_operators_certificate_opens_control(federation, tmp_path, small_app):
    import httpx
    import uvicorn
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    other = folder.Deployment.create(tmp_path / "other", configure(), 1)
    settings = uvicorn.Config(
        gate.Gate(everything_is_fine, federation.server), port=free_port(), lifespan="off", log_level="error",
        **gate.tls(federation.server), http=gate.knows_peer(AutoHTTPProtocol), ws="none",
    )  # fmt: skip
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_for(lambda: server.started, 10)

        def status_of(path, certificate=None):
            context = ssl.create_default_context(cafile=str(federation.ca / "ca.crt"))
            if certificate is not None:
                context.load_cert_chain(certificate, certificate.with_suffix(".key"))
            with httpx.Client(verify=context) as client:
                return client.post(f"https://127.0.0.1:{settings.port}{path}").status_code

        mine, theirs = federation.operator / "operator.crt", other.operator / "operator.crt"
        assert status_of("/v1/control/list-nodes", mine) == 200
        assert status_of("/v1/control/list-nodes") == 403
        assert status_of("/v1/fleet/pull-messages") == 200  # Flower checks node keys, behind the gate
        for certificate in (theirs, federation.server / "server.crt"):  # of another CA; not for clients
            with pytest.raises(httpx.TransportError):
                status_of("/v1/control/list-nodes", certificate)
        with pytest.raises(httpx.TransportError), httpx.Client() as client:
            client.post(f"http://127.0.0.1:{settings.port}/v1/control/list-nodes")
    finally:
        server.should_exit = True
        thread.join(10)


# A real federation on loopback


@pytest.fixture
def loopback(tmp_path, small_app, processes):
    config = folder.prepared({"classes": "a,b"}, 2)
    deployment = folder.Deployment.create(tmp_path / "fed", config, 2, port=free_port())
    return Loopback(deployment, processes)


@pytest.mark.slow
def test_two_authenticated_nodes_complete_rounds_over_tls_and_one_is_revoked(loopback, capsys):
    deployment, server = loopback.deployment, loopback.processes.path / "server.log"
    logs = loopback.start_nodes()
    code, text, error = call(capsys, "deploy", "run", deployment.path, "--follow")
    assert code == 0, text + error
    assert "errors 1 []" in text and "sum 1 [3.0]" in text and "sum 2 [9.0]" in text
    assert "finished: completed" in text
    code, text, _ = call(capsys, "deploy", "status", deployment.path)
    assert code == 0 and text.count("online") == 2 and "finished: completed" in text

    code, text, _ = call(capsys, "deploy", "revoke", deployment.path, "node-2")
    assert code == 0 and "node-2 is revoked" in text
    assert loopback.states()["node-2"] == "revoked"
    loopback.processes.ends("node-2")
    loopback.start_node(deployment.nodes[1])
    loopback.processes.ends("node-2")
    assert "refused '/v1/fleet/activate-node' from 127.0.0.1: the key of node-2 is revoked" in server.read_text()
    assert loopback.states() == {"node-1": "online", "node-2": "revoked"}
    assert call(capsys, "deploy", "register", deployment.path)[1] == "every node was registered already\n"
    assert "Traceback" not in logs[0].read_text()


@pytest.mark.slow
def test_a_site_can_neither_submit_nor_register_nor_list(loopback, tmp_path):
    """With everything that a site has: the CA's certificate, its key, and stock Flower."""
    import httpx
    from flwr.proto import control_pb2 as requests
    from flwr.proto.fab_pb2 import Fab
    from flwr.supercore.control import ControlHttpClient

    deployment = loopback.deployment
    site = deployment.site(deployment.nodes[0])
    key = pki.node_public_key(site / "node.pub")
    context = ssl.create_default_context(cafile=str(site / "ca.crt"))
    with ControlHttpClient(f"https://{deployment.address}", verify=context) as client:
        for call_it in (
            lambda: client.StartRun(requests.StartRunRequest(fab=Fab(content=b"code"))),
            lambda: client.RegisterNode(requests.RegisterNodeRequest(public_key=key)),
            lambda: client.UnregisterNode(requests.UnregisterNodeRequest(node_id=1)),
            lambda: client.ListNodes(requests.ListNodesRequest()),
            lambda: client.ListRuns(requests.ListRunsRequest()),
            lambda: list(client.StreamLogs(requests.StreamLogsRequest(run_id=1))),
        ):
            with pytest.raises(httpx.HTTPStatusError) as refused:
                call_it()
            assert refused.value.response.status_code == 403
    home = tmp_path / "site-home"
    home.mkdir()
    address = f'[superlink.there]\naddress = "{deployment.address}"\nroot-certificates = "{site / "ca.crt"}"\n'
    (home / "config.toml").write_text(address)
    for command in (["run", deployment.path / "app"], ["supernode", "register", site / "node.pub"], ["ls"]):
        done = subprocess.run(
            [Path(sys.executable).parent / "flwr", *command, "there"], capture_output=True, text=True, timeout=60,
            env=loopback.processes.environment | {"FLWR_HOME": str(home), "FLWR_DISABLE_UPDATE_CHECK": "1",
                                                  "FLWR_TELEMETRY_ENABLED": "0"},
        )  # fmt: skip
        assert done.returncode != 0 and "certificate" in done.stdout + done.stderr, done
    with control.Control(deployment) as operator:
        assert operator.runs() == [] and len(operator.nodes()) == 2


@pytest.mark.slow
def test_unregistered_keys_and_plaintext_are_refused(loopback):
    deployment = loopback.deployment
    [late] = deployment.add_nodes()  # never registered
    has_said(loopback.start_node(late), "the operator has not registered its key")
    plain = loopback.processes.start(
        "plain", "flower-supernode", "--insecure", "--superlink", deployment.address, "--port", free_port(),
        "--max-retries", 1, FLWR_HOME=deployment.path / "plain", FLWR_TELEMETRY_ENABLED=0, FLWR_DISABLE_UPDATE_CHECK=1,
    )  # fmt: skip
    loopback.processes.ends("plain")
    assert "SuperNode ID" not in plain.read_text()
    assert loopback.states() == {"node-1": "registered", "node-2": "registered", "node-3": "not registered"}


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--insecure"], ["--host", "::1"]], ids=["insecure", "IPv6"])
def test_other_ways_to_connect_lead_to_a_run_too(options, tmp_path, small_app, processes, capsys):
    port, name = free_port(), tmp_path / "fed"
    code, _, error = call(capsys, "deploy", "init", name, "--port", port, "classes=a,b", *options)
    assert code == 0, error
    made = folder.Deployment.open(name)
    assert made.address == f"{'127.0.0.1' if made.insecure else '[::1]'}:{port}"
    Loopback(made, processes).start_nodes()
    code, text, error = call(capsys, "deploy", "run", name, "--follow")
    assert code == 0 and "sum 2 [9.0]" in text, text + error


@pytest.mark.slow
def test_nodes_refuse_code_that_a_broken_server_sends(loopback, tmp_path, capsys):
    """Whoever has the whole server folder, and even the operator's certificate, but not the signing key."""
    deployment = loopback.deployment
    pki.create_signer(tmp_path / "thief", tmp_path / "thief.pub")
    write_atomically(deployment.server / "signer.pub", (tmp_path / "thief.pub").read_bytes())
    os.replace(tmp_path / "thief", deployment.operator / "signer")
    logs = loopback.start_nodes()
    _, text, _ = call(capsys, "deploy", "run", deployment.path, "--follow")
    assert text.count("The FAB could not be verified.") == 4 and "sum 2 [0.0]" in text  # two nodes, two rounds
    for log in logs:
        assert "FAB verification failed" in log.read_text() and "flwr-clientapp" not in log.read_text()


@pytest.mark.slow
def test_a_renewed_certificate_is_taken_up_while_running_also_after_it_expired(loopback, monkeypatch):
    deployment = loopback.deployment

    def shows_the_new_one():
        pem = ssl.get_server_certificate(("127.0.0.1", deployment.port))
        return pem.split() == (deployment.server / "server.crt").read_text().split()

    loopback.start_node(deployment.nodes[0])
    loopback.processes.wait_for(lambda: loopback.states() == {"node-1": "online", "node-2": "registered"})
    with monkeypatch.context() as short:
        short.setattr(pki, "CERTIFICATE_DAYS", 1 / 86400)
        deployment.renew()
    loopback.processes.wait_for(shows_the_new_one)
    log = loopback.start_node(deployment.nodes[1])  # one that is connected may stay so, on its old connection
    has_said(log, "certificate has expired")
    with pytest.raises(folder.DeployError, match="a certificate has expired: `fedhpro deploy renew"):
        loopback.states()
    deployment.renew()
    loopback.processes.wait_for(shows_the_new_one)
    has_said(log, "Connection successful")
    loopback.processes.wait_for(lambda: loopback.states() == {"node-1": "online", "node-2": "online"})
