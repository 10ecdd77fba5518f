"""What clients keep between their rounds: on disk, a file for each client and round, and no more than is needed."""

import gc
import json
import shutil
import threading
import time

import pytest
import torch
from conftest import TINY

from fedhpro import runs
from fedhpro.callbacks import Callback
from fedhpro.config import configure
from fedhpro.errors import ConfigError, RunError
from fedhpro.federation import Federation
from fedhpro.files import save_tensors
from fedhpro.memories import ClientMemories, check_disk, most_files
from fedhpro.runs import RunFolder

MOON = TINY | {"method": "moon", "rounds": 6, "participation": 0.7}


def names(folder):
    return sorted(path.name.removesuffix(".safetensors") for path in folder.iterdir())


def metrics(result):
    return (result.folder / "metrics.jsonl").read_bytes()


@pytest.fixture(scope="module")
def whole(tiny_source, tmp_path_factory):
    """The metrics of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return metrics(runs.run(configure(**MOON, out=str(folder)), source=tiny_source))


def test_a_mapping_that_is_read_from_disk(tmp_path):
    memories = ClientMemories(tmp_path / "memories")
    assert not memories and memories.get(3, {}) == {} and not (tmp_path / "memories").exists()
    memories.store(3, 1, {"a": torch.arange(4), "b": torch.tensor(0.5, dtype=torch.bfloat16)})
    memories.store(0, 1, {"a": torch.ones(2)})
    assert sorted(memories) == [0, 3] and 3 in memories and 1 not in memories and len(memories) == 2
    assert torch.equal(memories[3]["a"], torch.arange(4)) and memories[3]["b"].dtype == torch.bfloat16
    assert names(tmp_path / "memories") == ["client-0-round-1", "client-3-round-1"]


def test_threads_write_beside_and_all_is_on_disk_on_the_way_out(tmp_path, monkeypatch):
    together, most, turn = 0, 0, threading.Lock()

    def slow(path, tensors):
        nonlocal together, most
        with turn:
            together += 1
            most = max(most, together)
        time.sleep(0.01)
        with turn:
            together -= 1
        return save_tensors(path, tensors)

    monkeypatch.setattr("fedhpro.memories.save_tensors", slow)
    memories = ClientMemories(tmp_path)
    with memories.written_beside(3):
        for k in range(20):
            memories.store(k, 1, {"a": torch.full((2,), k)})
    assert 1 < most <= 3 and all(torch.equal(memories[k]["a"], torch.full((2,), k)) for k in range(20))
    with memories.written_beside(3):
        memories.store(0, 2, {"a": torch.zeros(1)})
    assert "client-0-round-1" not in names(tmp_path) and torch.equal(memories[0]["a"], torch.zeros(1))


def test_a_write_that_fails_beside_is_raised(tmp_path, monkeypatch):
    def full(path, tensors):
        raise OSError(28, "No space left on device")

    memories = ClientMemories(tmp_path)
    monkeypatch.setattr("fedhpro.memories.save_tensors", full)
    with pytest.raises(OSError, match="No space left"), memories.written_beside(2):
        for k in range(20):  # more than may wait: nobody waits for room that never comes
            memories.store(k, 1, {"a": torch.ones(1)})
    monkeypatch.undo()
    memories.store(0, 2, {"a": torch.ones(1)})  # and the next is written as ever
    assert names(tmp_path) == ["client-0-round-2"]


def test_a_run_whose_memories_are_written_beside_is_the_same_run(tiny_source, tmp_path, whole, monkeypatch):
    monkeypatch.setattr("fedhpro.engines.cpu.InProcess.writers", 2, raising=False)
    result = runs.run(configure(**MOON, out=str(tmp_path / "run")), source=tiny_source)
    assert metrics(result) == whole


def test_a_generation_goes_when_nothing_refers_to_it(tmp_path):
    memories = ClientMemories(tmp_path)
    memories.store(0, 1, {"a": torch.ones(1)})
    memories.store(1, 1, {"a": torch.ones(1)})
    memories.store(0, 2, {"a": torch.ones(1)})
    assert names(tmp_path) == ["client-0-round-2", "client-1-round-1"]
    memories.prune(set(memories.generations.items()))  # a checkpoint
    memories.store(0, 3, {"a": torch.ones(1)})
    memories.store(0, 4, {"a": torch.ones(1)})
    assert names(tmp_path) == ["client-0-round-2", "client-0-round-4", "client-1-round-1"]
    (tmp_path / ".client-0-round-5.safetensors.1.tmp").touch()  # cut off while it was written
    memories.prune(set())
    assert names(tmp_path) == ["client-0-round-4", "client-1-round-1"]


@pytest.mark.parametrize(
    "keys", [{}, {"checkpoint_every": 3}, {"keep_checkpoints": 1}, {"participation": 1.0}], ids=str
)
def test_never_more_files_than_the_budget_was_asked_for(tiny_source, tmp_path, keys):
    config = configure(**(MOON | {"rounds": 10} | keys), out=str(tmp_path / "run"))
    seen = []

    class Count(Callback):
        def client(self, round, done, total):
            seen.append(len(names(tmp_path / "run" / "memories")))

    result = runs.run(config, source=tiny_source, callbacks=[Count()])
    per_round = round(3 * config.participation)
    most = most_files(3, per_round, 10, config.checkpoint_every, config.keep_checkpoints)
    assert max(seen) <= most <= 3 * (config.keep_checkpoints + 1)
    if config.participation == 1:
        assert max(seen) == most
    meta = json.loads(sorted((result.folder / "checkpoints").glob("*.json"))[-1].read_text())
    referred = [generations.items() for generations in kept_generations(result.folder)]
    assert names(result.folder / "memories") == sorted({f"client-{k}-round-{r}" for one in referred for k, r in one})
    assert set(meta["memories"]) == {"0", "1", "2"}


def kept_generations(folder):
    return [json.loads(path.read_text())["memories"] for path in (folder / "checkpoints").glob("*.json")]


class Crash(Exception):
    pass


@pytest.mark.parametrize(
    "moment", ["in the round", "before the checkpoint", "in the checkpoint", "after the checkpoint"]
)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_crash_at_any_moment_loses_nothing(tiny_source, tmp_path, monkeypatch, whole, moment, workers):
    """Nothing after the crash may tidy up: it stands for a kill."""

    class Stop(Callback):
        def client(self, round, done, total):
            if moment == "in the round" and (round, done) == (4, 2):
                raise Crash

    def crash_in_round_4(where, original):
        def wrapped(*arguments, **keys):
            if json.loads(metrics_of(tmp_path).splitlines()[-1])["round"] == 4 and moment == where:
                raise Crash
            return original(*arguments, **keys)

        return wrapped

    with monkeypatch.context() as patch:
        patch.setattr(runs, "save_tensors", crash_in_round_4("before the checkpoint", runs.save_tensors))
        patch.setattr(ClientMemories, "prune", crash_in_round_4("after the checkpoint", ClientMemories.prune))
        if moment == "in the checkpoint":
            original = runs.write_atomically

            def write(path, content):
                if path.name == "round-000004.json":
                    raise Crash
                original(path, content)

            patch.setattr(runs, "write_atomically", write)
        with pytest.raises(Crash):
            config = configure(**(MOON | {"workers": workers}), out=str(tmp_path / "run"))
            runs.run(config, source=tiny_source, callbacks=[Stop()])
    resumed = runs.resume(tmp_path / "run", source=tiny_source)
    assert metrics(resumed) == whole and resumed.history[-1]["round"] == 6


def metrics_of(tmp_path):
    return (tmp_path / "run" / "metrics.jsonl").read_text()


def test_a_checkpoint_whose_memories_are_cut_off_or_gone_does_not_count(tiny_source, tmp_path, whole):
    for number, harm in enumerate((lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:-9]))):
        result = runs.run(configure(**MOON, out=str(tmp_path / str(number))), source=tiny_source)
        newest = max((result.folder / "memories").iterdir(), key=lambda path: path.name.partition("round-")[2])
        assert newest.name.endswith("round-6.safetensors")
        harm(newest)
        assert RunFolder.open(result.folder).newest_checkpoint()[1]["round"] == 5
        assert metrics(runs.resume(result.folder, source=tiny_source)) == whole


def test_a_memory_that_is_not_what_was_written_is_never_trained_from(tiny_source, tmp_path):
    keys = MOON | {"rounds": 2, "participation": 1.0}
    result = runs.run(configure(**keys, out=str(tmp_path / "run")), source=tiny_source)
    before = metrics(result)
    path = result.folder / "memories" / "client-1-round-2.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(RunError, match=r"^what client 1 remembers is lost: .* its checksum does not fit$"):
        RunFolder.open(result.folder).memories._load(1, 2)
    assert metrics(runs.resume(result.folder, source=tiny_source)) == before  # from round 1 on


def test_a_checkpoint_of_an_earlier_version_is_refused(tiny_source, tmp_path):
    result = runs.run(configure(**(MOON | {"rounds": 1}), out=str(tmp_path / "run")), source=tiny_source)
    before = metrics(result)
    path = result.folder / "checkpoints" / "round-000001.json"
    path.write_text('{"round": 1, "stalled": 0, "version": "0.0.1"}')
    with pytest.raises(RunError, match=r"nothing was changed: the checkpoint of round 1 [^\n]* of an earlier version"):
        runs.resume(result.folder, source=tiny_source, rounds=3)
    assert metrics(result) == before and path.exists()


def test_without_a_run_folder_they_are_in_a_temporary_one_that_goes(tiny_source):
    with Federation(configure(**MOON), tiny_source) as federation:
        federation.next_round()
    folder = next(iter(federation.memories.path(0, 1).parents))
    assert len(names(folder)) == len(federation.memories) == 2
    del federation
    gc.collect()
    assert not folder.exists()


def test_more_than_the_budget_is_refused_before_anything_is_written(tiny_source, tmp_path):
    """1.2 MB each; one for each of 3 clients, and 2 in each of 2 checkpoints."""
    config = configure(**MOON, out=str(tmp_path / "run"))
    need = runs.Federation(config, tiny_source).memory_need()
    assert need == (sum(v.numel() * 4 for v in Federation(config, tiny_source).model.values()), 7)
    short = config.replace(memory_budget=need[0] * need[1] / 1e9 * 0.99)
    with pytest.raises(
        ConfigError, match=r"^the memories of clients may take 8.7 MB on disk .* 7 of them .*memory_budget"
    ) as e:
        runs.run(short, source=tiny_source)
    assert "\n" not in str(e.value) and not list(tmp_path.iterdir())
    enough = config.replace(memory_budget=need[0] * need[1] / 1e9 * 1.01)
    assert runs.run(enough, source=tiny_source).status == "finished"
    with pytest.raises(ConfigError, match="memory_budget"):  # more rounds do not take more, smaller budgets do
        runs.resume(tmp_path / "run", source=tiny_source, memory_budget=short.memory_budget)
    Federation(configure(**(TINY | {"method": "fedavg", "memory_budget": 1e-9})), tiny_source)  # remembers nothing


def test_more_than_the_disk_has_is_refused_before_anything_is_written(tiny_source, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**6))
    with pytest.raises(ConfigError, match=r"and .* has 1.0 MB free: choose another folder with out, or lower clients"):
        runs.run(configure(**MOON, out=str(tmp_path / "run")), source=tiny_source)
    assert not list(tmp_path.iterdir())
    (tmp_path / "memories").mkdir()
    (tmp_path / "memories" / "client-0-round-1.safetensors").write_bytes(bytes(10**6))
    check_disk(10**5, 19, tmp_path / "memories")  # a resumed run's own files do not count against it
    with pytest.raises(ConfigError):
        check_disk(10**5, 21, tmp_path / "memories")


def test_how_many_files():
    assert most_files(clients=10, per_round=10, rounds=100, checkpoint_every=1, keep_checkpoints=2) == 30
    assert most_files(clients=10_000, per_round=100, rounds=1000, checkpoint_every=1, keep_checkpoints=2) == 10_200
    assert most_files(clients=10_000, per_round=100, rounds=5, checkpoint_every=1, keep_checkpoints=2) == 500
    assert most_files(clients=10_000, per_round=100, rounds=1000, checkpoint_every=500, keep_checkpoints=2) == 30_000
