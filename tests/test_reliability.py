"""Nothing is lost, and no half-written file is taken for whole: damage, changed configs, locks, full disks, clocks."""

import contextlib
import errno
import json
import os
import random
import shutil
import subprocess
import sys
import time

import pytest
from conftest import TINY, call, tiny

from fedhpro import files, methods, runs
from fedhpro.config import configure
from fedhpro.data import sources
from fedhpro.errors import ConfigError, RunError
from fedhpro.files import DamagedFile, locked, sealed, unsealed

KEYS = TINY | {"model": "cnn", "width": "none"}
PAPER = ("fedavg", "fedprox", "moon", "fedrcl", "fedproto", "fedtgp", "fedgmkd", "fedsa", "fedhpro")
PROTOCOLS = [(name, exchange) for name in PAPER for exchange in methods.METHODS[name].exchanges]


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """They take most of the time of so small a run."""
    monkeypatch.setattr("fedhpro.report.curves.draw_curves", lambda *_: None)
    monkeypatch.setattr("fedhpro.report.page.write_report", lambda *_, **__: [])
    monkeypatch.setattr(runs.RunFolder, "draw_data", lambda *_: None)


def start(folder, **keys):
    return runs.run(configure(**(KEYS | keys), out=str(folder)), source=tiny())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Three rounds with memories, and the bytes of their metrics and model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedhpro.report.page.write_report", lambda *_, **__: [])
        return start(tmp_path_factory.mktemp("finished") / "run", method="moon", rounds=3).folder


def copy_of(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def outcome(folder):
    return [(folder / name).read_bytes() for name in ("metrics.jsonl", "model.safetensors")]


# --- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "exchange"), PROTOCOLS, ids=["-".join(pair) for pair in PROTOCOLS])
def test_every_method_and_protocol_goes_on_to_the_same_bytes(tmp_path, method, exchange):
    keys = {"method": method, "exchange": exchange, "participation": 0.7}
    whole = start(tmp_path / "whole", **keys, rounds=3).folder
    part = start(tmp_path / "part", **keys, rounds=2).folder
    runs.resume(part, source=tiny(), rounds=3)
    kept = [
        {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.safetensors")}
        for folder in (whole, part)
    ]
    assert kept[0] == kept[1] and len(kept[0]) > 2  # checkpoints, memories, the model and what the server keeps
    assert (whole / "metrics.jsonl").read_bytes() == (part / "metrics.jsonl").read_bytes()


def flip(path):
    content = bytearray(path.read_bytes())
    content[random.Random(path.name).randrange(len(content))] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def wrong_checksum(path):
    path.write_bytes(path.read_bytes().replace(b'"sha256":"', b'"sha256":"0').replace(b'"sha256": "', b'"sha256": "0'))


@pytest.mark.parametrize("kind", ["safetensors", "json"])
@pytest.mark.parametrize("harm", [flip, cut, wrong_checksum, lambda path: path.unlink()])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_it_used(finished, tmp_path, caplog, harm, kind):
    folder = copy_of(finished, tmp_path)
    harm(folder / "checkpoints" / f"round-000003.{kind}")
    resumed = runs.resume(folder, source=tiny())
    assert outcome(folder) == outcome(finished)
    (note,) = resumed.notes
    assert note.startswith("the checkpoint of round 3 ") and note in caplog.text
    assert json.loads((folder / "result.json").read_text())["notes"] == [note]


def test_checkpoints_that_were_mixed_up_do_not_count(finished, tmp_path):
    folder = copy_of(finished, tmp_path)
    shutil.copy(folder / "checkpoints/round-000002.safetensors", folder / "checkpoints/round-000003.safetensors")
    assert "do not belong together" in runs.resume(folder, source=tiny()).notes[0]
    assert outcome(folder) == outcome(finished)


def test_without_any_sound_checkpoint_nothing_is_touched(finished, tmp_path):
    folder = copy_of(finished, tmp_path)
    for path in (folder / "checkpoints").glob("*.json"):
        cut(path)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(RunError, match=r"has no checkpoint to go on from, and nothing was changed: .* round 3 [^\n]*$"):
        runs.resume(folder, source=tiny())
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("line", ["[1, 2]", '{"round": "x"}', '{"round": null}', "{}", "3"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "timings.jsonl"])
def test_a_line_that_is_no_record_counts_as_one_that_was_cut_off(finished, tmp_path, name, line):
    folder = copy_of(finished, tmp_path)
    lines = (folder / name).read_text().splitlines()
    (folder / name).write_text("\n".join([*lines[:2], line]) + "\n")
    resumed = runs.resume(folder, source=tiny())
    assert outcome(folder) == outcome(finished) and len(resumed.history) == 3


def test_a_file_that_is_no_checkpoint_is_left_alone(finished, tmp_path):
    folder = copy_of(finished, tmp_path)
    strays = [folder / "checkpoints" / name for name in ("round-abc.json", "round-.safetensors", "round-9.json.bak")]
    for stray in strays:
        stray.write_text("{}")
    assert runs.resume(folder, source=tiny(), rounds=4).notes == []
    assert all(stray.exists() for stray in strays)
    assert len(list((folder / "checkpoints").glob("round-0*.json"))) == 2  # as many as ever


@pytest.mark.parametrize("gone", ["*", "*.json"])
def test_a_run_whose_checkpoints_are_gone_is_not_thrown_away(finished, tmp_path, gone):
    folder = copy_of(finished, tmp_path)
    for path in (folder / "checkpoints").glob(gone):
        path.unlink()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    sentence = r"has no checkpoint to go on from, and nothing was changed: metrics.jsonl has 3 rounds, and [^\n]*$"
    with pytest.raises(RunError, match=sentence):
        runs.resume(folder, source=tiny())
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("every", [1, 2])
def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again_and_says_so(finished, tmp_path, every):
    """A round is on record before its checkpoint is saved: so many records there can be."""
    folder = copy_of(finished, tmp_path)
    shutil.rmtree(folder / "checkpoints")
    records = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(records[:every]))
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace("checkpoint_every = 1", f"checkpoint_every = {every}"))
    assert runs.resume(folder, source=tiny()).notes == ["no checkpoint yet: from round 1"]
    assert outcome(folder) == outcome(finished)


def test_no_changed_byte_of_a_seal_goes_unnoticed(tmp_path):
    path, content = tmp_path / "x.json", {"round": 3, "memories": {1: 2, 10: 3}, "lr": 0.1}
    path.write_text(sealed(content))
    assert unsealed(path) == {"round": 3, "memories": {"1": 2, "10": 3}, "lr": 0.1}
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1 << position % 8]) + whole[position + 1 :])
        with contextlib.suppress(DamagedFile):
            assert unsealed(path) == {"round": 3, "memories": {"1": 2, "10": 3}, "lr": 0.1}  # another kind of blank


def test_a_config_that_was_edited_is_refused_and_rounds_may_change(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sources.SOURCES, "tiny", tiny)
    keys = KEYS | {"data": "tiny", "method": "fedavg"}
    folder = runs.run(keys, out=str(tmp_path / "run")).folder
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace("lr = 0.03", "lr = 0.5"))
    sentence = "lr cannot change in the middle of a run: it was 0.03, and is 0.5 now; what can change is"
    with pytest.raises(ConfigError, match=sentence):
        runs.resume(folder)
    (folder / "config.toml").write_text(text)
    assert call(capsys, "resume", folder, "--set", "lr=0.5")[0] == 2
    assert call(capsys, "resume", folder, "--set", "rounds=4", "--set", "workers=1", "--quiet")[::2] == (0, "")
    assert call(capsys, "resume", folder, "rounds=5", "--quiet")[::2] == (0, "")
    whole = runs.run(keys | {"rounds": 5}, out=str(tmp_path / "whole")).folder
    assert outcome(folder) == outcome(whole)


def test_another_version_is_said(finished, tmp_path, monkeypatch):
    folder = copy_of(finished, tmp_path)
    monkeypatch.setattr(runs, "VERSIONS", runs.VERSIONS | {"torch": "1.0"})
    (note,) = runs.resume(folder, source=tiny()).notes
    assert note.endswith("and this is 1.0: from here on the numbers may differ from those of an uninterrupted run")


# --- two at once ----------------------------------------------------------------------------------------------------


def test_a_second_process_is_told_who_writes_to_the_folder(finished, tmp_path):
    folder = copy_of(finished, tmp_path)
    code = "import sys, pathlib, fedhpro.files as f\nwith f.locked(pathlib.Path(sys.argv[1])): print(1); input()"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    holder.stdout.readline()
    with pytest.raises(RunError, match=rf"is being written by process {holder.pid} on .* since 20[^\n]*$"):
        runs.resume(folder, source=tiny())
    holder.kill()
    holder.communicate()
    runs.resume(folder, source=tiny())  # the lock went with its process


def test_a_worker_that_outlives_its_parent_does_not_hold_the_lock(tmp_path):
    ours, theirs = os.pipe()
    with locked(tmp_path):
        child = os.fork()
        if child == 0:  # it would hold the lock if it had kept the file open
            os.write(theirs, b"1")
            time.sleep(60)
            os._exit(0)
        os.read(ours, 1)
    try:
        with locked(tmp_path):
            pass
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_a_folder_that_a_killed_start_left_behind_can_be_used(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").touch()
    (tmp_path / "run" / ".config.toml.123.tmp").write_text("lr = 0.")
    folder = start(tmp_path / "run", method="fedavg", rounds=1).folder
    assert runs.resume(folder, source=tiny(), rounds=2).status == "finished"
    assert not list(folder.glob(".*.tmp"))


# --- the machine ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [0.1, 0.4, 0.7, 0.95])
def test_a_full_disk_ends_in_a_sentence_and_loses_no_finished_round(finished, tmp_path, monkeypatch, room):
    """The disk takes so much of what a whole run writes."""
    left = [room * sum(map(os.path.getsize, finished.rglob("*.safetensors")))]

    class Small:
        def __init__(self, file):
            self.file = file

        def write(self, content):
            left[0] -= len(content)
            if left[0] < 0:
                self.file.write(content[: len(content) // 2])
                raise OSError(errno.ENOSPC, "No space left on device")
            return self.file.write(content)

        def __getattr__(self, name):
            return getattr(self.file, name)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

    with monkeypatch.context() as patch:
        patch.setattr(files, "open", lambda *arguments: Small(open(*arguments)), raising=False)  # noqa: SIM115
        with pytest.raises(RunError, match=r"had to stop: No space left on device; its finished rounds are saved"):
            start(tmp_path / "run", method="moon", rounds=3)
    done = runs.RunFolder(tmp_path / "run").records()
    runs.resume(tmp_path / "run", source=tiny())
    assert outcome(tmp_path / "run") == outcome(finished)
    assert runs.RunFolder(tmp_path / "run").records()[: len(done)] == done


def test_a_read_only_folder_ends_in_a_sentence(finished, tmp_path, monkeypatch):
    folder = copy_of(finished, tmp_path)
    before = outcome(folder)

    def read_only(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "open", read_only)
        with pytest.raises(RunError, match="had to stop: Read-only file system"):
            runs.resume(folder, source=tiny(), rounds=4)
        with pytest.raises(ConfigError, match=r"cannot write to .*: Read-only file system"):
            start(tmp_path / "other")
    assert outcome(folder) == before


def test_a_clock_that_jumps_changes_nothing(finished, tmp_path, monkeypatch):
    rng = random.Random(0)
    monkeypatch.setattr(time, "time", lambda: rng.uniform(0, 2e9))
    start(tmp_path / "run", method="moon", rounds=2)
    for path in (tmp_path / "run").rglob("*"):
        os.utime(path, (rng.uniform(0, 2e9),) * 2)
    runs.resume(tmp_path / "run", source=tiny(), rounds=3)
    assert outcome(tmp_path / "run") == outcome(finished)
