"""The command line as a newcomer uses it: what it prints, what it leaves behind, and how it takes wrong input."""

import json
import os
import re
import subprocess
import sys
import tomllib

import pytest
from conftest import call

from fedhpro import cli

QUICK = ["rounds=1", "local_epochs=1", "workers=0", "evaluate_every=9"]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for console in (cli.out, cli.err):  # rich keeps the stream that it first saw
        monkeypatch.setattr(console, "_file", None)
        monkeypatch.setattr(console, "_width", 200)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of the main command, used by several tests."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    done = subprocess.run(
        [sys.executable, "-m", "fedhpro", "run", *QUICK, f"out={folder}"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return folder, done.stdout


def test_run_prints_progress_a_table_and_where_things_are(finished):
    folder, text = finished
    assert "20 clients" in text and "1,180 training samples" in text
    assert re.search(r"round +1 .*AVG .*ce .*margin", text)
    for word in ("final round", "best round", "mean of last five", "mnist-m", str(folder)):
        assert word in text.replace("\n", "")
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "config.toml", "metrics.jsonl", "timings.jsonl", "checkpoints", "model.safetensors", "model.json",
        "server.safetensors", "result.json", "costs.json", "curves.png", "MODEL_CARD.md",
    }  # fmt: skip
    assert tomllib.loads((folder / "config.toml").read_text())["agreed"] is True
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [json.loads(line)["round"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [1]


def test_predict_and_export(finished, capsys, tmp_path):
    from PIL import Image

    from fedhpro.data import load

    folder, _ = finished
    image = load("digits-lite").domains[0].test.x[0].permute(1, 2, 0).numpy()
    Image.fromarray(image).save("[seven].png")
    code, text, _ = call(capsys, "predict", folder, "[seven].png")
    assert code == 0 and text.startswith("[seven].png")
    code, text, _ = call(capsys, "predict", folder, "[seven].png", "--json", "--top", "2")
    assert len(json.loads(text)["probabilities"]) == 2
    code, text, _ = call(capsys, "export", folder, "--out", "model.safetensors")
    assert code == 0 and (tmp_path / "model.safetensors").exists()
    code, _, error = call(capsys, "predict", folder, "missing.png")
    assert code == 2 and "missing.png" in error


def test_a_folder_of_any_name_is_printed_as_it_is(capsys, tmp_path):
    for name in ("run[lr]2", "run[", "[/x]"):
        code, text, error = call(capsys, "run", "method=fedavg", *QUICK, f"out={tmp_path / name}")
        assert code == 0 and f"run folder: {tmp_path / name}\n" in text, error
    code, text, _ = call(capsys, "export", tmp_path / "[/x]", "--out", "[/x]/a.pt2")
    assert code == 0 and text == "wrote [/x]/a.pt2\n"
    code, text, error = call(capsys, "compare", "fedavg", *QUICK, "-q", "--out", "[/y]")
    assert code == 0 and "saved in [/y]: " in text, error


def test_quiet_and_json(capsys):
    code, text, _ = call(capsys, "run", "--quiet", *QUICK)
    assert code == 0 and re.fullmatch(r"AVG \d+\.\d\d  best .*  last5 .*  runs/.*\n", text)
    code, text, _ = call(capsys, "run", "--json", "method=fedavg", *QUICK)
    assert json.loads(text)["method"] == "fedavg" and json.loads(text)["status"] == "finished"


def test_resume_goes_on(finished, capsys, tmp_path):
    code, _, _ = call(capsys, "run", "-q", *QUICK, "out=a")
    assert code == 0
    code, text, _ = call(capsys, "resume", "a", "rounds=2")
    assert code == 0 and "final round" in text
    assert len((tmp_path / "a" / "metrics.jsonl").read_text().splitlines()) == 2


def test_compare_prints_means_deviations_and_the_control(capsys, tmp_path):
    code, text, _ = call(capsys, "compare", "fedavg", "fedhpro", "--seeds", "0,1", "-q", "--out", "both", *QUICK)
    assert code == 0
    for label in ("fedavg", "fedhpro", "fedhpro M=0"):
        assert re.search(rf"{label} +│ +\d+\.\d\d ± \d+\.\d\d", text), label
    rows = json.loads((tmp_path / "both" / "comparison.json").read_text())
    assert [row["method"] for row in rows] == ["fedavg", "fedhpro", "fedhpro M=0"]
    assert rows[0]["seeds"] == [0, 1] and len(rows[0]["AVG"]) == 2
    table = (tmp_path / "both" / "comparison.md").read_text().splitlines()
    assert len(table) == 5 and table[0].startswith("| method | mnist | uci | mnist-m | syn | AVG final |")
    assert (tmp_path / "both" / "curves.png").exists() and (tmp_path / "both" / "fedhpro-M-0-seed1").is_dir()


def test_compare_with_settings_of_one_method(capsys, tmp_path):
    code, text, _ = call(capsys, "compare", "fedhpro:M=0,I=1", "fedavg:lr=0.5", "-q", "--out", "c", *QUICK)
    assert code == 0 and "fedhpro M=0 I=1" in text and "fedavg lr=0.5" in text
    config = tomllib.loads((tmp_path / "c" / "fedhpro-M-0-I-1-seed0" / "config.toml").read_text())
    assert (config["M"], config["I"], config["lr"]) == (0, 1, 0.03)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["run", "roundz=3"], ["roundz", "rounds"]),
        (["run", "method=fedhpr"], ["fedhpr", "fedhpro"]),
        (["run", "--method", "fedavgg"], ["fedavgg", "fedavg"]),
        (["run", "method=fedavg", "M=3"], ["M", "fedhpro", "fedavg"]),
        (["run", "lr=-1"], ["lr=-1", "greater than 0"]),
        (["run", "lr=fast"], ["lr=fast", "number"]),
        (["run", "rounds=0"], ["rounds=0"]),
        (["run", "participation=2"], ["participation=2"]),
        (["run", "rounds"], ["'rounds'", "key=value"]),
        (["run", "--rounds", "3", "rounds=4"], ["rounds is given twice"]),
        (["run", "data=cifar11"], ["cifar11", "cifar10"]),
        (["run", "model=resnet11"], ["resnet11", "resnet10"]),
        (["run", "width=8"], ["width", "16"]),
        (["run", "scenario=iid", "clients=100000"], ["100000", "samples"]),
        (["run", "scenario=nid1", "clients=500"], ["500 clients", "5000"]),
        (["run", "min_clients=21"], ["21", "20 clients"]),
        (["run", "preset=papers"], ["papers", "paper"]),
        (["run", "out=/proc/nowhere"], ["/proc/nowhere"]),
        (["resume", "nowhere"], ["nowhere"]),
        (["compare", "fedavg", "fedavg"], ["twice"]),
        (["compare", "fedavg", "--seeds", "a,b"], ["a,b"]),
        (["compare", "fedavg", "--seeds", "1,1"], ["twice"]),
        (["compare", "fedavg", "seed=3"], ["seed"]),
        (["compare", "rounds=3"], ["method"]),
        (["compare", "fedavg", "local", "nearest=true"], ["nearest=true", "exchange=nothing"]),
        (["compare", "fedavg", "fedavg:precision=tf32"], ["tf32"]),
        (["compare", "fedavg", "evaluation=off"], ["evaluation=off"]),
        (["sweep", "lr=0.1,0.2", "evaluation=off"], ["evaluation=off"]),
        (["sweep", "nearest=true,false", "method=local"], ["nearest"]),
        (["compare", "fedavg", "--parallel", "2", "--track", "tensorboard"], ["--track", "--parallel"]),
        (["predict", "nowhere", "x.png"], ["nowhere"]),
        (["export", "nowhere"], ["nowhere"]),
        (["methods", "fedhpto"], ["fedhpto", "fedhpro"]),
        (["data", "show", "nothing"], ["nothing", "digits-lite"]),
        (["data", "show", "data=nothing"], ["nothing", "digits-lite"]),
        (["data", "show", "digits-lite", "data=docs-lite"], ["data is given twice"]),
        (["data", "show", "sites", "classes=a,b"], ["at the sites"]),
        (["costs", "fedavg", "data=sites", "classes=a,b"], ["at the sites"]),
    ],
)
def test_wrong_input_gets_one_sentence_and_exit_code_2(capsys, arguments, words):
    code, text, error = call(capsys, *arguments)
    assert code == 2 and text == ""
    assert error.startswith("fedhpro: ") and error.count("\n") == 1 and "Traceback" not in error
    for word in words:
        assert word in error
    assert os.listdir() == []  # nothing was written


def test_a_folder_that_holds_something_is_refused(finished, capsys, tmp_path):
    folder, _ = finished
    code, _, error = call(capsys, "run", *QUICK, f"out={folder}")
    assert code == 2 and "already holds a run" in error
    (tmp_path / "notes.txt").write_text("mine")
    code, _, error = call(capsys, "run", *QUICK, f"out={tmp_path}")
    assert code == 2 and "not empty" in error


def test_the_smaller_commands(capsys, tmp_path):
    code, text, _ = call(capsys, "methods")
    assert code == 0 and "fedavg" in text and "Algorithm" not in text
    code, text, _ = call(capsys, "methods", "fedhpro")
    assert re.search(r"M +30 +int +steps of gradient matching", text)
    code, text, _ = call(capsys, "run", "--keys", "preset=released")
    assert re.search(r"retrain_classifier +True", text) and re.search(r"lr +0\.1 ", text)
    code, text, _ = call(capsys, "data", "show")
    assert code == 0 and "mnist-m" in text and "20 clients, 1,180 samples" in text
    assert (tmp_path / "digits-lite.png").exists() and (tmp_path / "digits-lite-holdings.png").exists()
    code, text, _ = call(capsys, "data", "show", "scenario=shards", "clients=7", "--out", "pictures")
    assert code == 0 and "7 clients, 3,600 samples" in text and (tmp_path / "pictures" / "digits-lite.png").exists()
    code, text, _ = call(capsys, "data", "list")
    assert "digits-lite" in text
    code, text, _ = call(capsys, "--version")
    assert text.startswith("fedhpro 0.")


def test_help_fits_a_person(capsys):
    code, text, _ = call(capsys, "run", "--help")
    options = set(re.findall(r"--[a-z-]+", text))
    assert code == 0 and len(options) <= 13 and len(text.splitlines()) < 45


@pytest.mark.parametrize("seeds", ["0,x", "0,-1"])
def test_seeds_that_are_none_are_said_before_anything_is_fetched(capsys, monkeypatch, seeds):
    monkeypatch.setattr(cli, "bring", pytest.fail)
    code, _, error = call(capsys, "compare", "fedavg", "--seeds", seeds)
    assert code == 2 and error.count("\n") == 1 and seeds.split(",")[1] in error and os.listdir() == []


@pytest.mark.parametrize("command", ["resume", "heads", "watch", "run"])
def test_a_path_that_cannot_be_looked_at_is_a_sentence(capsys, command):
    path = "a" * 300  # as a folder of another user, which root could read here
    code, text, error = call(capsys, command, f"data=folder:{path}" if command == "run" else path)
    assert (code, text) == (2, "") and error == f"fedhpro: {path}: File name too long\n"


def test_ctrl_c_leaves_a_run_that_can_be_resumed(tmp_path):
    """The real program, the real signal, in the middle of a round."""
    import signal
    import time

    command = [sys.executable, "-m", "fedhpro", "run", "local_epochs=1", "rounds=50", "evaluate_every=50", "out=run"]
    victim = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
        assert victim.poll() is None, victim.stderr.read()
        time.sleep(0.05)
    victim.send_signal(signal.SIGINT)
    _, error = victim.communicate(timeout=60)
    assert victim.returncode == 130 and "fedhpro resume" in error and "Traceback" not in error
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "interrupted"
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_a_run_that_diverges_says_so(capsys):
    code, text, error = call(capsys, "run", "method=fedavg", "lr=1000", "local_epochs=1", "rounds=2", "workers=0")
    assert code == 0 and "the model stays as it was" in text
    assert "uploads were refused" in error and "training diverged; try a smaller lr than 1000" in error


def test_the_best_round_is_one_round(capsys, tmp_path):
    code, text, _ = call(capsys, "run", "local_epochs=1", "rounds=3", "workers=0", "out=r")
    assert code == 0
    history = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    best = max(history, key=lambda record: record["accuracy"]["AVG"])
    row = next(line for line in text.splitlines() if f"best round ({best['round']})" in line)
    assert re.findall(r"\d+\.\d\d", row) == [f"{value:.2f}" for value in best["accuracy"].values()]
