"""The Flower engine: the same bits as in this process, and no harm from nodes that misbehave."""

import json
import logging
import subprocess
import sys

import pytest
import torch
from conftest import TINY, synthetic_split

pytest.importorskip("flwr", reason="Flower is an extra: pip install 'fedhpro[flower]'")

from flower_grid import LocalGrid
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from safetensors import SafetensorError

from fedhpro import runs, wire
from fedhpro.config import configure
from fedhpro.data import sources
from fedhpro.data.sites import SiteError, site_data
from fedhpro.engines import flower
from fedhpro.engines.flower import from_record, to_record
from fedhpro.errors import ConfigError, FederationStalled, RunError
from fedhpro.federation import Federation
from fedhpro.methods import METHODS

KEYS = TINY | {"data": "tiny", "join_deadline": 0.3, "round_deadline": 0.3}


@pytest.fixture(autouse=True)
def tiny_by_name(tiny_source, monkeypatch):
    """Clients in other processes find their data by its name."""
    monkeypatch.setitem(sources.SOURCES, "tiny", lambda: tiny_source)
    flower.site_of.cache_clear()


def through_flower(rounds=2, grid=None, **keys):
    config = configure(**(KEYS | {"engine": "flower"} | keys))
    clients = len(Federation(config).clients)
    with Federation(config, grid=grid or LocalGrid(clients)) as federation:
        records = [federation.next_round() for _ in range(rounds)]
        return records, federation.snapshot()


def in_this_process(rounds=2, **keys):
    with Federation(configure(**(KEYS | keys))) as federation:
        records = [federation.next_round() for _ in range(rounds)]
        return records, federation.snapshot()


def assert_same(one, other):
    (records, (tensors, meta)), (records_2, (tensors_2, meta_2)) = one, other
    assert json.dumps(records) == json.dumps(records_2)
    assert meta == meta_2
    assert tensors.keys() == tensors_2.keys()
    assert all(torch.equal(tensors[name], tensors_2[name]) for name in tensors)


PROTOCOLS = [(name, exchange) for name in sorted(METHODS) for exchange in METHODS[name].exchanges]


@pytest.mark.parametrize(("method", "exchange"), PROTOCOLS, ids=["-".join(pair) for pair in PROTOCOLS])
def test_every_method_and_protocol_gives_the_bits_of_this_process(method, exchange):
    keys = {"method": method, "exchange": exchange, "evaluation": "both"}
    assert_same(through_flower(**keys), in_this_process(**keys))


def test_sampled_clients_and_mixed_models_give_the_same_bits():
    keys = {"method": "fedproto", "exchange": "prototypes", "model": "htfe2", "width": "none", "participation": 0.67}
    assert_same(through_flower(rounds=3, **keys), in_this_process(rounds=3, **keys))


def test_hostile_clients_and_a_robust_fold_give_the_same_bits():
    keys = {"attack": "gaussian", "attack_share": 0.4, "robust": "median"}
    assert_same(through_flower(**keys), in_this_process(**keys))


def test_the_nearest_of_the_clients_means_gives_the_same_bits():
    keys = {"nearest": True, "evaluation": "both", "participation": 0.67}
    assert_same(through_flower(rounds=3, **keys), in_this_process(rounds=3, **keys))


def test_tensors_keep_their_types_shapes_and_bits():
    tensors = {
        "mask": torch.tensor([True, False]),
        "count": torch.tensor(2**40),
        "half": torch.randn(2, 3).to(torch.bfloat16),
        "turned": torch.arange(6.0).view(2, 3).t(),
        "none": torch.empty(0, 4),
        "odd": torch.tensor([float("nan"), -0.0]),
    }
    back = from_record(to_record(tensors))
    assert wire.schema_of(back) == wire.schema_of(tensors)
    for name, value in tensors.items():
        assert torch.equal(*(v.reshape(-1).view(torch.uint8) for v in (back[name], value))), name


def test_a_header_that_promises_more_than_there_is_costs_nothing():
    honest = to_record({"x": torch.zeros(4)})["safetensors"].data
    hostile = honest.replace(b"[4]", b"[4000000000]").replace(b"[0,16]", b"[0,16000000000]")
    length = int.from_bytes(honest[:8], "little") + len(hostile) - len(honest)
    hostile = length.to_bytes(8, "little") + hostile[8:]
    with pytest.raises(SafetensorError):
        from_record(ArrayRecord({"safetensors": Array("uint8", (len(hostile),), "safetensors", hostile)}))


# --- replies that cannot be used -----------------------------------------------------------------------------------


def with_about(reply, **about):
    content = RecordDict(dict(reply.content))
    content["about"] = ConfigRecord(dict(reply.content["about"]) | about)
    return answering(reply, content)


def with_tensors(reply, **tensors):
    content = RecordDict(dict(reply.content))
    content["tensors"] = to_record(from_record(reply.content["tensors"]) | tensors)
    return answering(reply, content)


def answering(reply, content):
    return Message(content, reply_to=reply)


def bad_bytes(reply):
    content = RecordDict(dict(reply.content))
    content["tensors"] = ArrayRecord({"safetensors": Array("uint8", (8,), "safetensors", b"nonsense")})
    return answering(reply, content)


BAD = {
    "no answer within 0.3 seconds": lambda reply: None,
    "Flower has no reply of it: Node Unavailable (code 5)": lambda reply: Message(
        Error(5, "Node Unavailable"), reply_to=reply
    ),
    "its reply is not one of fedhpro's": lambda reply: answering(reply, RecordDict({"x": ConfigRecord({"a": 1})})),
    "it has fedhpro 0.0.0, and this run": lambda reply: with_about(reply, version="0.0.0"),
    "it has another model or config than this run": lambda reply: with_about(reply, digest="0"),
    "it answers another request: train 1 old": lambda reply: with_about(reply, request="train 1 old"),
    "it answers as client 7": lambda reply: with_about(reply, client=7),
    "its tensors cannot be decoded: Error while": bad_bytes,
    "its tensors cannot be decoded: they are": lambda reply: with_tensors(reply, big=torch.zeros(2**20)),
    "it says that it has 99 samples, and is known to have": lambda reply: with_tensors(reply, samples=torch.tensor(99)),
    "its reply cannot be unpacked: ": lambda reply: ValueError("children missing"),
    "'model/virus' is not expected": lambda reply: with_tensors(reply, **{"model/virus": torch.zeros(1)}),
    "loss/ce has values that are not finite": lambda reply: with_tensors(
        reply, **{"loss/ce": torch.tensor(float("nan"))}
    ),
}


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_reply_is_refused_and_the_others_count(reason):
    grid = LocalGrid(3)
    grid.meddle = lambda message, reply, context: (
        BAD[reason](reply)
        if message.metadata.message_type == "train" and context.node_config["partition-id"] == 1
        else reply
    )
    records, (tensors, _) = through_flower(grid=grid)
    for record in records:
        assert record["aggregated"] and record["clients"] == [0, 1, 2]
        (refused,) = record["refused"]
        assert refused["client"] == 1 and refused["reason"].startswith(reason)
    assert all(value.isfinite().all() for value in tensors.values())


def test_with_too_few_valid_uploads_nothing_is_aggregated():
    grid = LocalGrid(3)
    grid.meddle = lambda message, reply, context: None if message.metadata.message_type == "train" else reply
    records, _ = through_flower(grid=grid, rounds=1)
    assert not records[0]["aggregated"] and len(records[0]["refused"]) == 3


def test_a_client_that_fails_says_why(monkeypatch):
    def fail(self, round, k, received, memory):
        if k == 2:
            raise RuntimeError("no space left")
        return update(self, round, k, received, memory)

    from fedhpro.training import LocalTrainer

    update = LocalTrainer.update
    monkeypatch.setattr(LocalTrainer, "update", fail)
    records, _ = through_flower(rounds=1)
    assert records[0]["refused"] == [{"client": 2, "reason": "RuntimeError: no space left"}]


# --- nodes that come and go ----------------------------------------------------------------------------------------


def test_a_node_of_another_version_is_turned_away_and_the_reason_is_in_the_record():
    grid = LocalGrid(3)
    grid.meddle = lambda message, reply, context: (
        with_about(reply, version="0.0.0") if context.node_config["partition-id"] == 0 else reply
    )
    records, _ = through_flower(grid=grid, rounds=1)
    (refused,) = records[0]["refused"]
    assert refused["client"] == 0 and refused["reason"].startswith("it has fedhpro 0.0.0, and this run")
    kinds = [m.metadata.message_type for m in grid.seen if m.metadata.dst_node_id == grid.node_of(0)]
    assert set(kinds) == {"query"}  # it was never sent the model


def test_a_node_may_leave_and_come_back():
    grid = LocalGrid(3)
    with Federation(configure(**(KEYS | {"engine": "flower", "rounds": 3})), grid=grid) as federation:
        grid.online.remove(grid.node_of(1))
        (refused,) = federation.next_round()["refused"]
        assert refused == {"client": 1, "reason": "no node of this client is connected"}
        grid.online.append(grid.node_of(1))
        assert federation.next_round()["refused"] == []


def test_who_does_not_answer_is_waited_for_once_and_says_hello_again():
    grid = LocalGrid(2, data=own("squares"))
    grid.meddle = lambda message, reply, context: (
        None if message.metadata.message_type == "train" and context.node_config["partition-id"] == 1 else reply
    )
    with Federation(configure(**(SITES | {"rounds": 3})), grid=grid) as federation:
        del grid.seen[:]
        federation.next_round()
        grid.meddle = lambda message, reply, context: reply
        assert federation.next_round()["refused"] == []
    kinds = [m.metadata.message_type for m in grid.seen if m.metadata.dst_node_id == grid.node_of(1)]
    assert kinds == ["train", "query", "train", "evaluate"]


def test_waiting_for_clients_has_an_end():
    with pytest.raises(FederationStalled, match="0 of 3 clients joined within join_deadline"):
        through_flower(grid=LocalGrid(0))


def test_uploads_that_come_early_wait_with_the_superlink(monkeypatch):
    monkeypatch.setattr(flower, "AHEAD", 1)
    grid = LocalGrid(3)
    grid.meddle = lambda message, reply, context: (
        None if message.metadata.message_type == "train" and context.node_config["partition-id"] == 0 else reply
    )
    with Federation(configure(**(KEYS | {"engine": "flower"})), grid=grid) as federation:
        ask, held = federation.engine.ask, []

        def watched(*arguments):
            for answer in ask(*arguments):
                held.append(len(grid.replies))
                yield answer

        monkeypatch.setattr(federation.engine, "ask", watched)
        record = federation.next_round()
    assert record["refused"] == [{"client": 0, "reason": "no answer within 0.3 seconds"}]
    assert held == [1, 0, 0]  # while the first was waited for, one of the two others was taken


def test_a_node_cannot_be_a_client_that_its_key_was_not_registered_as():
    grid = LocalGrid(3)
    registered = flower.Registered(grid, {grid.node_of(k): k for k in range(3)})
    grid.contexts[grid.node_of(2)].node_config["partition-id"] = 0  # and it is the first to say hello
    with Federation(configure(**(KEYS | {"engine": "flower"})), grid=registered) as federation:
        assert federation.engine.nodes == {0: grid.node_of(0), 1: grid.node_of(1)}
        (refused,) = federation.next_round()["refused"]
        assert refused["client"] == 2 and "it says that it is client 0, but its key" in refused["reason"]


def test_two_nodes_cannot_be_one_client():
    grid = LocalGrid(4)
    grid.contexts[grid.node_of(3)].node_config["partition-id"] = 0
    with Federation(configure(**(KEYS | {"engine": "flower"})), grid=grid) as federation:
        assert sorted(federation.engine.nodes) == [0, 1, 2]
        assert federation.next_round()["refused"] == []


# --- memory and resume ---------------------------------------------------------------------------------------------

SITES = KEYS | {"data": "sites", "classes": "a,b,c,d", "image_size": 16, "clients": 2, "method": "moon"}


def squares():
    split = synthetic_split(40, 4, 1)
    return split.x, split.y


def one_class():
    split = synthetic_split(40, 4, 1)
    return split.x[split.y == 2], split.y[split.y == 2]


def wide():
    return synthetic_split(40, 4, 1, size=24).x, squares()[1]


def own(name):
    return f"python:{__name__}:{name}"


def recalled(grid):
    """Which generation the nodes went on from, in the order of the replies."""
    found = []

    def watch(message, reply, context):
        if message.metadata.message_type == "train":
            found.append(reply.content["about"]["recalled"])
        return reply

    grid.meddle = watch
    return found


@pytest.mark.parametrize("folder", [False, True], ids=["context", "folder"])
def test_a_site_remembers_and_with_a_folder_also_after_a_restart(tmp_path, folder):
    more = {"memory-dir": str(tmp_path / "node")} if folder else {}
    grid = LocalGrid(2, data=own("squares"), **more)
    found = recalled(grid)
    with Federation(configure(**(SITES | {"rounds": 9})), grid=grid) as federation:
        federation.next_round()
        federation.next_round()
        assert found == [0, 0, 1, 1]
        for context in grid.contexts.values():  # what a restart of the node leaves of Flower's own memory
            context.state = RecordDict()
        federation.next_round()
        assert found[4:] == ([2, 2] if folder else [0, 0])
    if folder:
        (run,) = (tmp_path / "node").iterdir()
        assert sorted(path.name for path in run.glob("client-0/*.safetensors")) == [
            "client-0-round-2.safetensors",  # what it went on from, in case that the new one does not count
            "client-0-round-3.safetensors",
        ]


def test_a_round_that_did_not_count_is_forgotten():
    grid = LocalGrid(2, data=own("squares"))
    with Federation(configure(**(SITES | {"rounds": 9})), grid=grid) as federation:
        federation.next_round()
        grid.meddle = lambda message, reply, context: None if message.metadata.message_type == "train" else reply
        federation.next_round()
        found = recalled(grid)
        federation.next_round()
        assert found == [1, 1]


@pytest.mark.parametrize("method", ["moon", "fedproto"])
def test_a_run_goes_on_to_the_same_bits(tmp_path, method):
    keys = KEYS | {"engine": "flower", "method": method, "exchange": METHODS[method].exchanges[-1]}
    whole = runs.run(**keys | {"rounds": 4}, out=str(tmp_path / "whole"), grid=LocalGrid(3))
    runs.run(**keys | {"rounds": 2}, out=str(tmp_path / "part"), grid=LocalGrid(3))
    resumed = runs.resume(tmp_path / "part", rounds=4, grid=LocalGrid(3))
    assert resumed.history == whole.history
    cpu = runs.run(**KEYS | {"method": method, "exchange": keys["exchange"], "rounds": 4}, out=str(tmp_path / "cpu"))
    assert (tmp_path / "cpu/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()
    assert cpu.history == resumed.history


def test_a_deployment_goes_on_where_its_server_was_killed(tmp_path):
    config = configure(**(SITES | {"rounds": 4, "out": str(tmp_path / "run"), "method": "moon"}))
    grid = LocalGrid(2, data=own("squares"), **{"memory-dir": str(tmp_path / "node")})

    def killed(message, reply, context):
        if message.metadata.message_type == "train" and message.content["about"]["round"] == 3:
            raise SystemExit("kill -9 would not even say so")
        return reply

    grid.meddle = killed
    with pytest.raises(SystemExit):
        flower.serve(config, grid)
    found = recalled(grid)
    flower.serve(config, grid)
    assert found == [2, 2, 3, 3]
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [record["round"] for record in records] == [1, 2, 3, 4]
    with pytest.raises(ConfigError, match="seed cannot change"):
        flower.serve(config.replace(seed=1), grid)
    with pytest.raises(ConfigError, match="run of a deployment"):
        runs.resume(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    flower.serve(config.replace(out=str(tmp_path / "moved"), rounds=5), grid)
    assert len((tmp_path / "moved/metrics.jsonl").read_text().splitlines()) == 5


# --- sites ---------------------------------------------------------------------------------------------------------


def test_sites_train_and_test_on_their_own_data():
    grid = LocalGrid(2, data=own("squares"))
    records, _ = through_flower(grid=grid, **(SITES | {"method": "fedhpro"}))
    assert records[-1]["refused"] == [] and records[-1]["federated"]["clients"]
    for message in grid.seen:
        assert "squares" not in message.content["about"]["config"]


def test_a_site_may_lack_classes_but_not_invent_them():
    config = configure(**SITES)
    assert site_data({"data": own("one_class")}, config).train.y.unique().tolist() == [2]
    with pytest.raises(SiteError, match="'d' that this federation has not: a, b, c"):
        from fedhpro.data.own import from_tensors

        sys.modules[__name__].strange = lambda: from_tensors(*squares(), classes=["a", "b", "c", "d"])
        site_data({"data": own("strange")}, config.replace(classes="a,b,c"))
    with pytest.raises(SiteError, match=r"\[3, 24, 24\]"):
        site_data({"data": own("wide")}, config)
    with pytest.raises(SiteError, match="names no data"):
        site_data({}, config)


def test_folders_of_sites_are_read_by_the_names_of_the_classes(tmp_path):
    from PIL import Image

    for label, n in (("c", 6), ("a", 4)):
        for i in range(n):
            (tmp_path / label).mkdir(exist_ok=True)
            Image.new("RGB", (20, 20), (i, i, i)).save(tmp_path / label / f"{i}.png")
    data = site_data({"data": f"folder:{tmp_path}"}, configure(**SITES))
    assert data.train.x.shape[1:] == (3, 16, 16)
    assert sorted({*data.train.y.tolist(), *data.held_out.y.tolist()}) == [0, 2]
    assert len(data.train) + len(data.held_out) == 10 and len(data.held_out) > 0


def test_trouble_at_a_site_says_only_what_kind_it_is_and_more_in_the_sites_log(caplog):
    grid = LocalGrid(2, data="csv:/secret/patients.csv")
    with pytest.raises(FederationStalled, match="DataError at the site, whose log says more") as caught:
        through_flower(grid=grid, **SITES)
    assert "secret" not in str(caught.value)
    told = [record for record in caplog.records if "could not be served" in record.message]
    assert told and all("patients.csv" in record.message and not record.exc_info for record in told)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"data": "python:mine"}, "handed over in Python"),
        ({"data": "sites", "classes": "a"}, "name all classes"),
        ({"data": "sites", "classes": "a,b", "evaluation": "central"}, "only the sites have samples to test on"),
        ({"data": "sites", "classes": "a,b", "method": "centralised"}, "all samples in one place"),
        ({"data": "sites", "classes": "a,b", "pixel_std": "1,2"}, "2 numbers for 3 channels"),
        ({"data": "sites", "classes": "a,b", "engine": "cpu"}, "machines of the sites"),
        ({"engine": "cpu", "compress": "fp16"}, "only with flower"),
    ],
)
def test_what_does_not_go_together_is_said(keys, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Federation(configure(**(KEYS | {"engine": "flower"} | keys)))


# --- cost ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_a_compressed_upload_has_half_the_bytes_and_nearly_the_values(kind):
    plain, (exact, _) = through_flower(rounds=1, method="fedhpro")
    small, (near, _) = through_flower(rounds=1, method="fedhpro", compress=kind)
    model = sum(v.numel() for name, v in exact.items() if name.startswith("model/"))
    assert plain[0]["bytes_up"] - small[0]["bytes_up"] == 3 * 2 * model
    for name in (name for name in exact if name.startswith("model/")):
        assert torch.allclose(near[name], exact[name], rtol=2**-7, atol=1e-3), name


def test_the_bytes_of_a_compressed_run_are_in_its_costs(tmp_path):
    result = runs.run(**KEYS | {"engine": "flower", "compress": "bf16"}, out=str(tmp_path / "run"), grid=LocalGrid(3))
    table = json.loads((tmp_path / "run/costs.json").read_text())["tensors"]
    up = sum(row["bytes"] for row in table if row["direction"] == "up")
    assert result.history[-1]["bytes_up"] == 3 * up
    assert {row["dtype"] for row in table if row["direction"] == "up"} >= {"bfloat16"}


def test_a_client_imports_nothing_heavy():
    heavy = {"matplotlib", "sklearn", "mlxtend", "typer", "rich", "pandas", "ray", "scipy", "PIL"}
    code = f"""if True:
        import sys
        import flwr.app, flwr.clientapp, flwr.serverapp
        before = set(sys.modules)  # what Flower itself needs
        import fedhpro.engines.flower, fedhpro.federation
        print(sorted({heavy} & (set(sys.modules) - before)))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's own
def test_the_app_folder_is_one_that_flower_accepts(tmp_path):
    import runpy

    from flwr.cli.build import build_fab_from_disk
    from flwr.common.config import get_project_config
    from typer.testing import CliRunner

    from fedhpro.cli import app

    folder = tmp_path / "app"
    done = CliRunner().invoke(app, ["deploy", "app", str(folder), "method=fedavg", "rounds=2", f"out={tmp_path}/run"])
    assert done.exit_code == 0, done.output
    assert get_project_config(folder)["project"]["dependencies"] == []
    assert len(build_fab_from_disk(folder)) > 0
    assert runpy.run_path(str(folder / "client_app.py"))["app"] is flower.client_app
    server = runpy.run_path(str(folder / "server_app.py"))["app"]
    assert type(server).__name__ == "ServerApp"
    again = CliRunner().invoke(app, ["deploy", "app", str(folder)])
    assert again.exit_code != 0


def test_a_mistake_of_a_user_is_one_sentence_in_the_log(caplog):
    flowers = logging.getLogger("flwr.test")
    flowers.addFilter(flower.one_sentence)
    for error in (RunError("the run goes on elsewhere"), KeyError("a bug")):
        flowers.error("%s raised an exception", "ServerApp", exc_info=error)
    mistake, bug = caplog.records
    assert mistake.getMessage() == "the run goes on elsewhere" and not mistake.exc_info
    assert bug.getMessage() == "ServerApp raised an exception" and bug.exc_info


# --- the real simulation runtime -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedhpro"])
def test_the_simulation_runtime_gives_the_same_run(tmp_path, method):
    keys = ["data=digits-lite", "rounds=2", "local_epochs=1", "clients_per_domain=1", f"method={method}"]
    for engine in ("cpu", "flower"):
        command = [sys.executable, "-m", "fedhpro", "run", "-q", *keys, f"engine={engine}", f"out={tmp_path / engine}"]
        subprocess.run(command, check=True, timeout=600)
    assert (tmp_path / "cpu/metrics.jsonl").read_bytes() == (tmp_path / "flower/metrics.jsonl").read_bytes()


def test_the_log_says_where_a_round_changed_or_taught_nothing(caplog):
    record = {"round": 3, "clients": [0, 1], "refused": [{"client": 1, "reason": "no"}], "aggregated": False}
    with caplog.at_level("INFO"):
        flower.RoundLog().round(record | {"not_aggregated": "too few"})
        flower.RoundLog().round({"round": 4, "clients": [0], "refused": [], "aggregated": True, "loss": {"ce": 0.0}})
        flower.RoundLog().round({"round": 5, "clients": [0], "refused": [], "aggregated": True, "loss": {"ce": 0.1}})
    idle, useless, sound = caplog.messages
    assert idle.splitlines() == [
        "round 3: 2 clients, 1 refused", "  client 1: no", "  the model stays as it was: too few"
    ]  # fmt: skip
    assert "nothing was learned" in useless and sound == "round 5: 1 clients, 0 refused"
