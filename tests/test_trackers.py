"""Trackers: the real libraries where they are installed, stand-ins elsewhere; and a callback of one's own."""

import importlib.util
import json
import os
import struct
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from conftest import TINY, call

import fedhpro
from fedhpro import cli
from fedhpro.trackers import MLflow, TensorBoard, WandB, numbers, trackers

ROOT = Path(__file__).parent.parent
KEYS = TINY | {"method": "fedavg", "local_steps": 1}
HOW = "fedhpro[{0}] is not installed"


@pytest.fixture(autouse=True)
def own_environment(tmp_path, monkeypatch):
    """What trackers and their libraries set is gone afterwards, and what they write is in a folder of the test."""
    before = dict(os.environ)
    monkeypatch.chdir(tmp_path)
    yield
    os.environ.clear()
    os.environ.update(before)


class Note:
    """Stands in for an object of a library: every call on it is written down, and answered with itself."""

    info = SimpleNamespace(run_id="r1")
    experiment_id, id = "e1", "w1"

    def __init__(self, calls):
        self.calls = calls

    def __getattr__(self, name):
        def noted(*arguments, **named):
            self.calls.append((name, arguments, named))
            return self

        return noted


@pytest.fixture
def calls(monkeypatch):
    """{library: what was called in it}"""
    found = {"tensorboard": [], "mlflow": [], "wandb": []}
    writer, store, wandb = (Note(found[name]) for name in found)
    modules = {name: ModuleType(name) for name in found} | {"torch.utils.tensorboard": ModuleType("tensorboard")}

    def summary_writer(folder, purge_step):
        Path(folder).mkdir(exist_ok=True)
        found["tensorboard"].append(("SummaryWriter", (folder, purge_step), {}))
        return writer

    modules["torch.utils.tensorboard"].SummaryWriter = summary_writer
    modules["mlflow"].MlflowClient = lambda: store
    modules["mlflow"].entities = SimpleNamespace(Param=lambda *a: a, Metric=lambda *a: a)
    modules["wandb"].Settings = dict
    modules["wandb"].init = lambda **keys: wandb.init(**keys)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return found


def named(calls, name):
    return [(arguments, keys) for called, arguments, keys in calls if called == name]


def test_every_round_reaches_every_tracker_and_the_run_stays_the_same(calls, tiny_source):
    plain = fedhpro.run(source=tiny_source, out="plain", **KEYS)
    tracked = fedhpro.run(
        source=tiny_source, out="tracked", callbacks=trackers("tensorboard, mlflow,wandb,mlflow"), **KEYS
    )
    same = ("metrics.jsonl", "model.safetensors")
    assert all((plain.folder / name).read_bytes() == (tracked.folder / name).read_bytes() for name in same)
    configs = [(result.folder / "config.toml").read_text().replace("plain", "tracked") for result in (plain, tracked)]
    assert configs[0] == configs[1]
    wanted = {n: [(r["round"], numbers(r)[n]) for r in plain.history] for n in ("accuracy/AVG", "test_loss/dark")}
    for name, points in wanted.items():
        scalars = [arguments for arguments, _ in named(calls["tensorboard"], "add_scalar")]
        assert [(step, value) for tag, value, step in scalars if tag == name] == points
        batches = [keys.get("metrics", ()) for _, keys in named(calls["mlflow"], "log_batch")]
        assert [(step, value) for batch in batches for tag, value, _, step in batch if tag == name] == points
        lines = [arguments[0] for arguments, _ in named(calls["wandb"], "log")]
        assert [(line["round"], line[name]) for line in lines] == points
    assert named(calls["mlflow"], "set_terminated") == [(("r1", "FINISHED"), {})]
    params = [pair for _, keys in named(calls["mlflow"], "log_batch") for pair in keys.get("params", ())]
    assert dict(params)["method"] == "fedavg" and len(params) == len(tracked.config.flat())
    assert named(calls["wandb"], "finish") == [((), {"exit_code": 0})]
    assert named(calls["wandb"], "init")[0][1]["config"] == tracked.config.flat()


def test_a_resumed_run_goes_on_in_the_same_place(calls, tiny_source):
    fedhpro.run(source=tiny_source, out="run", callbacks=trackers("tensorboard,mlflow,wandb"), **KEYS)
    for notes in calls.values():
        notes.clear()
    fedhpro.resume("run", source=tiny_source, callbacks=trackers("tensorboard,mlflow,wandb"), rounds=3)
    assert named(calls["tensorboard"], "SummaryWriter")[0][0][1] == 3  # what came after the checkpoint counts no more
    assert {arguments[2] for arguments, _ in named(calls["tensorboard"], "add_scalar")} == {3}
    assert named(calls["mlflow"], "update_run") == [(("r1", "RUNNING"), {})]
    assert not named(calls["mlflow"], "create_run")
    assert named(calls["wandb"], "init")[0][1]["id"] == "w1"
    assert [arguments[0]["round"] for arguments, _ in named(calls["wandb"], "log")] == [3]


def test_a_tracker_that_comes_later_gets_what_was_before(calls, tiny_source):
    fedhpro.run(source=tiny_source, out="run", **KEYS)
    fedhpro.resume("run", source=tiny_source, callbacks=trackers("wandb"), rounds=3)
    assert [arguments[0]["round"] for arguments, _ in named(calls["wandb"], "log")] == [1, 2, 3]


@pytest.mark.parametrize("hook", ["init", "log", "finish"])
def test_a_tracker_that_fails_is_one_warning(calls, tiny_source, monkeypatch, caplog, hook):
    def fail(*_, **__):
        raise OSError("No space left\non device")

    run = SimpleNamespace(id="w1", log=lambda _: None, finish=lambda exit_code: None, define_metric=lambda *_, **__: 0)
    monkeypatch.setattr(sys.modules["wandb"], "init", fail if hook == "init" else lambda **_: run)
    if hook != "init":
        setattr(run, hook, fail)
    result = fedhpro.run(source=tiny_source, out="run", callbacks=trackers("wandb"), **KEYS)
    assert result.status == "finished" and len(result.history) == 2
    said = "wandb has failed, and the run goes on without: OSError: No space left on device"
    assert [record.getMessage() for record in caplog.records] == [said]


def test_an_interrupted_run_is_marked(calls, tiny_source):
    class Stop(fedhpro.callbacks.Callback):
        def round(self, record):
            raise KeyboardInterrupt

    fedhpro.run(source=tiny_source, out="run", callbacks=[*trackers("mlflow,wandb"), Stop()], **KEYS)
    assert named(calls["mlflow"], "set_terminated") == [(("r1", "KILLED"), {})]
    assert named(calls["wandb"], "finish") == [((), {"exit_code": 1})]


def test_numbers_of_a_record():
    record = {
        "round": 3,
        "clients": [4, 5],
        "aggregated": True,
        "accuracy": {"a b": 50.0, "AVG": 50.0},
        "test_loss": {"AVG": float("inf")},
        "federated": {"clients": {"4": 1.0}, "mean": 1.0},
        "heads": {"head": {"AVG": 50.0}},
    }
    expected = {"clients": 2, "aggregated": 1, "accuracy/a b": 50, "accuracy/AVG": 50, "federated/mean": 1}
    assert numbers(record) == expected


def test_the_command(calls, capsys, monkeypatch):
    for console in (cli.out, cli.err):
        monkeypatch.setattr(console, "_file", None)
    code, _, complained = call(capsys, "run", "--track", "mlflow,tensorbord")
    assert code == 2 and complained.count("\n") == 1 and "'tensorbord': choose from tensorboard" in complained
    monkeypatch.setitem(sys.modules, "mlflow", None)
    for command in (("run",), ("compare", "fedavg"), ("resume", "nothing")):
        code, _, complained = call(capsys, *command, "--track", "mlflow")
        assert code == 2 and complained.count("\n") == 1 and "pip install 'fedhpro[mlflow]'" in complained
    assert not Path("runs").exists()
    keys = [f"{name}={value}" for name, value in (KEYS | {"rounds": 1, "evaluate_every": 9}).items()]
    assert call(capsys, "run", "--track", "wandb", "--quiet", *keys)[0] == 0
    assert len(named(calls["wandb"], "log")) == 1


# --- the libraries themselves, offline ---


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_reads_what_was_written(tiny_source):
    pytest.importorskip("tensorboard", reason=HOW.format("tensorboard"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = fedhpro.run(source=tiny_source, out="run", callbacks=[TensorBoard()], **KEYS)
    result = fedhpro.resume("run", source=tiny_source, callbacks=[TensorBoard()], rounds=3)
    events = EventAccumulator("run/tensorboard").Reload()
    for record in result.history:
        for name, value in numbers(record).items():
            (found,) = [event.value for event in events.Scalars(name) if event.step == record["round"]]
            assert found == pytest.approx(value)
    assert b'method = "fedavg"' in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("where", ["sqlite:///own.db", None])
def test_mlflow_has_the_run(tiny_source, monkeypatch, where):
    mlflow = pytest.importorskip("mlflow", reason=HOW.format("mlflow"))
    if where:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", where)
    result = fedhpro.run(source=tiny_source, out="run", callbacks=[MLflow()], **KEYS)
    result = fedhpro.resume("run", source=tiny_source, callbacks=[MLflow()], rounds=3)
    store = mlflow.MlflowClient(where)
    (found,) = store.search_runs([store.get_experiment_by_name("fedhpro").experiment_id])
    assert (found.info.status, found.info.run_name, found.data.params["method"]) == ("FINISHED", "run", "fedavg")
    for name in ("accuracy/AVG", "test_loss/light", "loss/ce"):
        points = [(point.step, point.value) for point in store.get_metric_history(found.info.run_id, name)]
        assert points == [(record["round"], numbers(record)[name]) for record in result.history]


@pytest.mark.filterwarnings("ignore")
def test_mlflow_without_its_server(tiny_source, monkeypatch, caplog):
    pytest.importorskip("mlflow", reason=HOW.format("mlflow"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    result = fedhpro.run(source=tiny_source, out="run", callbacks=[MLflow()], **KEYS)
    assert result.status == "finished"
    assert [record.name for record in caplog.records].count("fedhpro") == 1


def wandb_lines(path):
    """The logged rows of a .wandb file: protocol buffers in the blocks of a LevelDB log."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""  # after its own header
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no room for a header at the end of a block
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        whole, at = whole + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or the last of its parts
            record, whole = Record.FromString(whole), b""
            if record.HasField("history"):
                items = record.history.item
                yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


@pytest.mark.filterwarnings("ignore")
def test_wandb_offline(tiny_source, monkeypatch):
    pytest.importorskip("wandb", reason=HOW.format("wandb"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    result = fedhpro.run(source=tiny_source, out="run", callbacks=[WandB()], **KEYS)
    (path,) = Path("run/wandb").glob("offline-run-*/*.wandb")
    lines = list(wandb_lines(path))
    assert [line["round"] for line in lines] == [1, 2]
    for line, record in zip(lines, result.history, strict=True):
        assert numbers(record).items() <= line.items()
    fedhpro.resume("run", source=tiny_source, callbacks=[WandB()], rounds=3)
    names = {path.name for path in Path("run/wandb").glob("offline-run-*/*.wandb")}
    assert names == {path.name}  # two parts of one run


@pytest.mark.filterwarnings("ignore")
def test_wandb_without_a_key(tiny_source, monkeypatch, caplog):
    wandb = pytest.importorskip("wandb", reason=HOW.format("wandb"))
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NETRC", "no-such-file")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    wandb.teardown()  # it has read its environment already
    result = fedhpro.run(source=tiny_source, out="run", callbacks=[WandB()], **KEYS)
    assert result.status == "finished" and wandb.run is None
    assert "wandb has failed, and the run goes on without" in caplog.text


# --- a callback of one's own ---


def test_the_example_of_a_callback(tiny_source, tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("own_callback", ROOT / "examples" / "own_callback.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    keys = {"source": tiny_source, "method": "fedavg", "workers": 0, "lr": 1e-9}  # which does not learn
    result = example.main(tmp_path, **keys)
    assert result.status == "interrupted" and result.history[-1]["round"] == result.headline["best_round"] + 3
    assert "interrupted after round" in capsys.readouterr().out
    assert (tmp_path / "run" / "report.html").exists()


def test_a_callback_is_ten_lines():
    page = (ROOT / "docs" / "callbacks.md").read_text(encoding="utf-8")
    shown = page.partition("```python\n")[2].partition("```")[0]
    example = (ROOT / "examples" / "own_callback.py").read_text(encoding="utf-8")
    lines = [line for line in shown.splitlines() if line]
    assert shown.strip() in example and len(lines) <= 10
