"""`fedhpro reproduce` and `sweep`: the paper's tables as files, the matrix of runs, and what is written about them."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from browser import CHROMIUM, Browser
from conftest import call

from fedhpro import cli, estimate, matrix, measures, probe, reproduce, reproduce_cli, tables
from fedhpro.config import configure
from fedhpro.data.catalog import CATALOG
from fedhpro.errors import ConfigError
from fedhpro.evaluation import fairness, rounds_to_accuracy, speed_up
from fedhpro.report.experiments import experiments_page
from fedhpro.report.reading import read_run

NAMES = reproduce.names()
PAPER = [*(f"table{n}" for n in range(1, 7)), *(f"figure{n}" for n in (1, 2, 3, 4, 6, 7, 8))]
PAPER += ["label-skew", "quantity-skew", "domain-skew", "convergence", "clients", "epochs", "feature-width"]
PAPER += ["prototype-only", "fairness", "heterogeneous-models", "ag-news", "sun397"]
TINY = "rounds = 1, local_steps = 1, batch_size = 8, stem = '7x7', clients_per_domain = 1, samples_per_client = 16"
TINY_EXPERIMENT = f"""
title = "Tiny & small_table"
about = "100 % of it"
seeds = [0]
keys = {{ {TINY} }}
figure = "curves"
[[settings]]
name = "digits|lite"
columns = ["mnist", "AVG", "fair.global.mean", "fair.local.worst10", "distance.own", "R1", "speedup1", "mb_up"]
[[rows]]
name = "FedAvg"
keys = {{ method = "fedavg" }}
paper = [90.0, 80.5, "", "", "", 1, "", ""]
[[rows]]
name = "FedHPro"
keys = {{ method = "fedhpro" }}
[[rows]]
name = "<b>M=0</b>"
keys = {{ method = "fedhpro", M = 0 }}
"""


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for console in (cli.out, cli.err, reproduce_cli.out, reproduce_cli.err):
        monkeypatch.setattr(console, "_file", None)
        monkeypatch.setattr(console, "_width", 300)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The tiny experiment, run by the real program with two processes."""
    folder = tmp_path_factory.mktemp("reproduce")
    (folder / "tiny.toml").write_text(TINY_EXPERIMENT)
    command = [sys.executable, "-m", "fedhpro", "reproduce", "tiny.toml", "--parallel", "2", "--out", "out"]
    ran = subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder)
    return folder, ran.stdout


def matrix_of(experiment, seed=0):
    return [experiment.config(row, setting, seed) for row in experiment.rows for setting in experiment.settings]


# The files


def test_every_table_and_figure_has_a_file():
    assert set(PAPER) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_run_of_an_experiment_is_valid_in_full_and_quick(name):
    full = reproduce.load(name)
    quick = reproduce.quick(full)
    assert full.title and full.seeds and not full.stand_in
    large, small = matrix_of(full), matrix_of(quick)
    if name in PAPER:
        assert full.seeds == [0, 1, 2] and all(config.rounds == 100 and config.data in CATALOG for config in large)
        kinds = {"docs-lite" if CATALOG[config.data].kind == "text" else "digits-lite" for config in large}
        assert {config.data for config in small} == kinds and "in place of" in quick.stand_in
    assert all(config.data in ("digits-lite", "docs-lite") and config.rounds <= 6 for config in small)
    assert all(config.local_steps <= 6 for config in small) and "stand-in" in quick.stand_in


@pytest.mark.parametrize("name", NAMES)
def test_fedhpro_never_stands_without_its_control(name):
    for experiment in (reproduce.load(name), reproduce.quick(reproduce.load(name))):
        rows = [row.keys for row in experiment.rows]
        subjects = [keys for keys in rows if keys["method"] == "fedhpro" or keys["method"].endswith("-hp")]
        assert not subjects or any(keys.get("M") == 0 for keys in subjects)
        assert all(a.name != b.name for a, b in experiment.compared())
        assert experiment.compared() or not subjects or experiment.pairs == []


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_numbers_are_there_and_hang_together(name):
    experiment = reproduce.load(name)
    printed = [row for row in experiment.rows if row.paper]
    methods = {row.keys["method"] for row in printed}
    assert printed and all(any(n is not None for n in row.paper) for row in printed)
    assert "fedhpro" in methods or methods >= {"fedproto-hp", "fedsa-hp"}
    for row in printed:
        numbers = dict(zip(((s.name, c) for s, c in experiment.columns()), row.paper, strict=True))
        for setting in experiment.settings:
            own = [numbers[setting.name, c] for c in setting.columns if c in (*reproduce.DOMAINS, "mnist", "syn")]
            if any(number is not None for number in own):  # AVG is the mean of the domains, up to the paper's rounding
                assert numbers[setting.name, "AVG"] == pytest.approx(sum(own) / 4, abs=0.011), (row.name, setting.name)


def test_one_number_of_each_table_as_the_paper_prints_it():
    def printed(name, row, setting, column="AVG"):
        experiment = reproduce.load(name)
        numbers = next(r.paper for r in experiment.rows if r.name == row)
        return numbers[[(s.name, c) for s, c in experiment.columns()].index((setting, column))]

    assert printed("table1", "FedSA†", "HAM10000 NID2") == 44.85
    assert printed("table1", "FedHPro", "CIFAR-10-LT rho=100") == 64.75
    assert printed("table2", "MOON", "Office-Caltech", "dslr") == 34.50
    assert printed("table3", "FedGMKD using HP", "Digits", "syn") == 58.04
    assert printed("table4", "FedTGP†", "Digits", "seconds") == 45.49
    assert printed("table5", "HPAL", "Office-Caltech", "webcam") == 55.35
    assert printed("table6", "P in both", "CIFAR-10-LT rho=50") == 72.56
    assert printed("label-skew", "FedRCL", "CIFAR-100 NID2") == 53.29
    assert printed("quantity-skew", "FedProto†", "TinyImageNet-LT rho=100") == 21.19
    assert printed("convergence", "MOON", "Digits", "speedup75") == -70.3
    assert printed("clients", "FedAvg", "K=100") == 33.79
    assert printed("epochs", "FedSA†", "E=10") == 45.63
    assert printed("feature-width", "FedHPro", "Office-Caltech d=1024") == 63.10
    assert printed("prototype-only", "FedTGP", "Digits") == 74.65
    assert printed("fairness", "FedAvg", "Digits", "fair.local.std") == 12.81
    assert printed("heterogeneous-models", "FedHPro", "HtFE8") == 42.63
    assert printed("ag-news", "FedSA", "AG-NID K50") == 47.53
    assert printed("sun397", "FedHPro", "NID1 0.5") == 75.22


def test_tables_share_runs_by_the_hash_of_their_config(tmp_path):
    def folders(experiment):
        return {matrix.placed(config, tmp_path).out for config in matrix_of(experiment)}

    assert folders(reproduce.load("table2")) < folders(reproduce.load("domain-skew"))
    assert folders(reproduce.quick(reproduce.load("table2"))) == folders(reproduce.quick(reproduce.load("domain-skew")))
    config = configure(method="fedavg", seed=3)
    same = configure(method="fedavg", seed=3, workers=2, keep_checkpoints=5, out="elsewhere")
    assert matrix.fingerprint(config) == matrix.fingerprint(same)
    for other in (configure(method="fedavg", seed=4), configure(method="fedprox", seed=3), config.replace(rounds=2)):
        assert matrix.fingerprint(config) != matrix.fingerprint(other)


# Running it


def test_a_tiny_experiment_from_the_command_to_its_files(done):
    folder, printed = done
    assert "3 runs, 0 of them done; 2 at once" in printed and printed.count(": finished") == 3
    assert len(list((folder / "out/runs").iterdir())) == 3
    found = json.loads((folder / "out/tiny.json").read_text())
    assert found["problems"] == [] and len(found["runs"]) == 3 and len(found["cells"]) == 24
    first = {cell["column"]: cell for cell in found["cells"] if cell["row"] == "FedAvg"}
    result = json.loads(next((folder / "out/runs").glob("fedavg*/result.json")).read_text())
    assert first["AVG"]["mean"] == result["accuracy"]["AVG"] == first["AVG"]["best"] == first["AVG"]["last5"]
    assert first["AVG"]["difference"] == pytest.approx(result["accuracy"]["AVG"] - 80.5)
    assert first["fair.global.mean"]["mean"] == pytest.approx(result["accuracy"]["AVG"])  # one client in each domain
    assert first["fair.local.worst10"]["mean"] > 0 and first["distance.own"]["mean"] == 0
    assert first["R1"]["mean"] == 1 and first["speedup1"]["mean"] is None
    assert first["mb_up"]["mean"] == pytest.approx(result["bytes_up"] / 1e6)
    assert len(found["words"]) == 2 and all("with one seed" in words for words in found["words"])
    rows = list(csv.DictReader((folder / "out/tiny.csv").read_text().splitlines()))
    assert len(rows) == 24 and rows[1]["paper"] == "80.5"
    text = (folder / "out/tiny.md").read_text()
    assert "digits\\|lite: FedHPro" in text and "| FedAvg |" in text and "&lt;b>M=0" in text
    assert "| paper | 90.00 (" in text


def test_the_page_has_a_chart_links_and_no_markup_of_others(done):
    page = (done[0] / "out/tiny.html").read_text()
    assert page.count("<svg") >= 2 and "<b>M=0</b>" not in page and "&lt;b&gt;M=0&lt;/b&gt;" in page
    links = re.findall(r'href="(runs/[^"]+)"', page)
    assert len(links) == 3 and all((done[0] / "out" / link).is_file() for link in links)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine: apt-get install chromium")
def test_the_page_in_a_browser(done, tmp_path):
    page = done[0] / "out/tiny.html"
    browser = Browser(tmp_path / "profile")
    try:
        browser.open(page.as_uri())
        for width in (1200, 375):
            browser.resize(width, 800)
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.evaluate("document.querySelector('figure svg').getBoundingClientRect().width") > 200
        assert browser.complaints() == [] and set(browser.requests()) == {page.as_uri()}
    finally:
        browser.close()


def test_latex_is_escaped(done):
    text = (done[0] / "out/tiny.tex").read_text()
    shown = [line for line in text.splitlines() if not line.startswith("%")]
    assert r"\caption{Tiny \& small\_table}" in shown and any(r"best" not in line for line in shown)
    assert not any(re.search(r"(?<!\\)[%_#]", line) for line in shown)
    assert any(r"\textless{}b\textgreater{}M=0" in line for line in shown)


def names_left(name, *wanted):
    left = reproduce.only(reproduce.load(name), wanted)
    return [setting.name for setting in left.settings], [row.name for row in left.rows]


def test_a_part_of_a_table_is_chosen_by_name():
    whole = reproduce.load("quantity-skew")
    assert names_left("quantity-skew", "rho=10")[0] == [
        f"{data}-LT rho=10" for data in ("CIFAR-10", "CIFAR-100", "TinyImageNet")
    ]
    assert names_left("quantity-skew", "cifar-10-lt rho=100", "FedProto", "fedavg") == (
        ["CIFAR-10-LT rho=100"],
        ["FedAvg", "FedProto†"],  # in the order of the table, and not "FedAvg, balanced"
    )
    assert names_left("quantity-skew", "alance")[0] == [setting.name for setting in whole.settings]
    left = reproduce.only(whole, ["rho=100", "FedRCL"])
    assert left.rows[0].paper == [62.41, 36.27, 22.91]
    domains = reproduce.only(reproduce.load("table5"), ["Office-Caltech"])
    assert [row.paper[-1] for row in domains.rows if row.name == "HPAL"] == [61.34]
    assert len(domains.rows[0].paper) == len(domains.columns()) == 5
    with pytest.raises(ConfigError, match=r"no setting and no row 'rho=7'. It has: CIFAR-10-LT rho=10; .*FedHPro"):
        reproduce.only(whole, ["FedAvg", "rho=7"])
    with pytest.raises(ConfigError, match=r"no setting and no row ''"):
        reproduce.only(whole, [""])


def test_only_a_part_runs(capsys):
    code, text, _ = call(
        capsys, "reproduce", "table5", "--only", "Digits", "--only", "HPAL", "--dry-run", "--seeds", "0"
    )
    assert code == 0 and "table5: HPAL, Digits, seed 0" in text and "Office" not in text
    assert "1 runs, 0 done" in text


def test_what_is_done_is_skipped_and_a_dry_run_runs_nothing(done, capsys, tmp_path):
    shutil.copytree(done[0], tmp_path / "copy")
    code, text, _ = call(capsys, "reproduce", "copy/tiny.toml", "--dry-run", "--seeds", "0,1", "--out", "copy/out")
    assert code == 0 and text.count("  done") == 3 and text.count("about ") >= 4
    assert "6 runs, 3 done, 3 to do" in text and "GB of memory" in text
    assert len(list((tmp_path / "copy/out/runs").iterdir())) == 3
    started = time.monotonic()
    code, text, _ = call(capsys, "reproduce", "copy/tiny.toml", "--out", "copy/out")
    assert code == 0 and "3 runs, 3 of them done" in text and "finished" not in text and "FedHPro" in text
    assert time.monotonic() - started < 60


def test_a_broken_run_folder_is_named_and_left_out(done, capsys, tmp_path):
    shutil.copytree(done[0], tmp_path / "copy")
    first, second = sorted((tmp_path / "copy/out/runs").glob("fedhpro*"))
    (first / "config.toml").write_text("not = [toml")
    (second / "metrics.jsonl").write_text('{"round": "one"}\n{"round": 2}\n')
    code, text, _ = call(capsys, "reproduce", "copy/tiny.toml", "--out", "copy/out", "--parallel", "1")
    assert code == 1 and "not valid TOML" in text
    found = json.loads((tmp_path / "copy/out/tiny.json").read_text())
    assert len(found["problems"]) == 2 and len(found["runs"]) == 1
    assert any(str(first.name) in problem for problem in found["problems"])
    assert any("metrics.jsonl" in problem for problem in found["problems"])
    assert "Left out" in (tmp_path / "copy/out/tiny.html").read_text()


@pytest.mark.slow
def test_ctrl_c_leaves_whole_rounds_and_the_same_command_goes_on(tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY_EXPERIMENT.replace("rounds = 1,", "rounds = 300, evaluate_every = 300,"))
    command = [sys.executable, "-m", "fedhpro", "reproduce", "tiny.toml", "--parallel", "2", "--out", "out"]
    victim = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)

    def rounds():
        return [len(path.read_text().splitlines()) for path in tmp_path.glob("out/runs/*/metrics.jsonl")]

    while len(rounds()) < 2 or min(rounds()) < 2:
        assert victim.poll() is None, victim.stderr.read()
        time.sleep(0.05)
    victim.send_signal(signal.SIGINT)
    text, error = victim.communicate(timeout=120)
    assert victim.returncode == 130 and "Traceback" not in error and text.count(": interrupted") == 2
    plan = reproduce.plan(reproduce.load(str(tmp_path / "tiny.toml")), tmp_path / "out/runs")
    begun = [config for config in plan.configs.values() if Path(config.out).exists()]
    assert len(begun) == 2 and not any(map(matrix.is_done, begun))
    for config in begun:
        assert json.loads((Path(config.out) / "result.json").read_text())["status"] == "interrupted"
        shorter = config.model_copy(update={"workers": 0})
        assert matrix.fingerprint(configure(**tomllib.loads((Path(config.out) / "config.toml").read_text()))) == (
            matrix.fingerprint(shorter)
        )


def test_a_run_that_fails_does_not_stop_the_others(tmp_path):
    keys = {"rounds": 1, "local_steps": 1, "clients_per_domain": 1, "samples_per_client": 16, "evaluate_every": 1}
    good = configure(method="fedavg", stem="7x7", batch_size=8, **keys)
    bad = good.replace(clients_per_domain=10_000)
    heard = {}
    configs = [matrix.placed(config, tmp_path) for config in (bad, good)]
    assert matrix.run_all(configs, 2, lambda config, status: heard.update({config.out: status}))
    assert heard[configs[1].out] == "finished" and "need" in heard[configs[0].out]
    assert matrix.is_done(configs[1]) and not matrix.is_done(configs[0])


def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_run_that_is_killed_does_not_stop_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(matrix, "_in_process", killed)
    heard = []
    configs = [configure(out=str(tmp_path / name)) for name in "ab"]
    assert matrix.run_all(configs, 1, lambda config, status: heard.append((config.out, status)))
    assert heard == [(config.out, "its process ended with exit code -9") for config in configs]


def test_runs_on_a_gpu_take_parts_of_it_where_mps_lets_them(tmp_path, monkeypatch):
    monkeypatch.delenv(matrix.MPS_PERCENT, raising=False)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert matrix.gpu_share(8) is None  # no MPS here: runs take turns, each with all of the GPU
    (tmp_path / "control").touch()
    assert matrix.gpu_share(8) == (18, 2) and matrix.gpu_share(4) == (36, 4) and matrix.gpu_share(3) is None
    monkeypatch.setenv(matrix.MPS_PERCENT, "50")
    assert matrix.gpu_share(8) is None  # whoever starts it has said it


def test_a_run_is_told_its_part_of_the_gpu_before_it_starts(monkeypatch):
    seen = []
    monkeypatch.setattr(matrix, "_outcome", lambda config: os.environ[matrix.MPS_PERCENT])
    monkeypatch.setenv(matrix.MPS_PERCENT, "100")  # so that it is put back
    monkeypatch.setattr(matrix.signal, "signal", lambda *_: None)
    matrix._in_process(configure(), SimpleNamespace(send=seen.append), (18, 2))
    assert seen == ["18"]


def test_missing_data_is_one_sentence_and_the_rest_goes_on(capsys, monkeypatch):
    monkeypatch.setattr(reproduce, "stored", lambda dataset: None)
    code, _, error = call(capsys, "reproduce", "table2", "table6")
    assert code == 2 and "Traceback" not in error
    assert error.count("is not in the cache") == 3 and "`fedhpro data import office-caltech PATH`" in error
    assert "`fedhpro data get cifar10`" in error and "--quick" in error
    monkeypatch.setattr(reproduce, "stored", lambda dataset: object() if dataset.name == "cifar10" else None)
    plan = reproduce.plan(reproduce.load("table6"), Path("runs"))
    assert set(plan.missing) == {"digits", "office-caltech"}
    assert {config.data for config in plan.runnable()} == {"cifar10"} and len(plan.runnable()) == 15
    found = reproduce.outcome(plan)  # nothing has run yet: 15 folders that are not there, 2 sentences
    assert len(found.problems) == 17 and not found.runs and tables.markdown(found).count("| – | – | – |") == 5


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["reproduce", "tabel2"], ["table2"]),
        (["reproduce", "none.toml"], ["none.toml"]),
        (["reproduce", "table2", "--seeds", "0,x"], ["0,x"]),
        (["reproduce", "table2", "--quick", "seed=3"], ["seed", "--seeds"]),
        (["reproduce", "table2", "--quick", "ruonds=3"], ["ruonds", "rounds"]),
        (["reproduce", "table2", "--quick", "--parallel", "9", "engine=cuda"], ["at most 8"]),
        (["sweep", "tau=0.1"], ["several values"]),
        (["sweep", "tua=0.1,0.2"], ["tua", "tau"]),
        (["sweep", "tau=0.1,0.2", "seed=1"], ["--seeds"]),
    ],
)
def test_wrong_input_gets_one_sentence_and_exit_code_2(capsys, arguments, words):
    code, _, error = call(capsys, *arguments)
    assert code == 2 and "Traceback" not in error and all(word in error for word in words), error


@pytest.mark.parametrize(
    "name,quick,keys,rows",
    [
        ("figure8", False, {"M": 5}, r"\[I=5, Digits\] and \[M=0 \(control\), Digits\]"),
        ("epochs", True, {"local_steps": 3}, r"\[FedAvg, 1 step \(for E=1\)\] and \[FedAvg, 6 steps"),
        ("epochs", False, {"local_steps": 3}, r"\[FedAvg, E=1\] and \[FedAvg, E=5\]"),  # which makes epochs idle
        ("clients", False, {"clients": 20}, r"\[FedAvg, K=10\] and \[FedAvg, K=20\]"),
    ],
)
def test_keys_that_would_make_one_run_of_two_rows_are_refused(name, quick, keys, rows, tmp_path):
    experiment = reproduce.load(name)
    with pytest.raises(ConfigError, match=f"{name}: .* would make one run of {rows}"):
        reproduce.plan(reproduce.quick(experiment) if quick else experiment, tmp_path, (0,), keys)


def test_a_preset_for_a_table_changes_its_training_and_none_of_its_labels(tmp_path):
    quick = reproduce.quick(reproduce.load("table2"))
    plain, with_preset = (reproduce.plan(quick, tmp_path, (0,), keys) for keys in ({}, {"preset": "paper"}))
    for place, config in with_preset.configs.items():
        assert config.rounds == 100 and config.method == plain.configs[place].method
        assert config.parameters == plain.configs[place].parameters
    full = reproduce.plan(reproduce.load("epochs"), tmp_path, (0,), {"preset": "released", "lr": 0.2})
    config = full.configs["FedAvg", "E=1", 0]
    assert (config.local_epochs, config.width, config.lr, config.momentum) == (1, 32, 0.2, 0)
    released = reproduce.load("quantity-skew")
    own = reproduce.plan(released, tmp_path, (0,), {"preset": "paper"}).configs
    row = next(row for row in released.rows if row.keys.get("preset") == "released")
    assert own[row.name, released.settings[0].name, 0].lr == 0.1
    with pytest.raises(ConfigError, match="there is no preset 'papr'"):
        reproduce.plan(quick, tmp_path, (0,), {"preset": "papr"})


def test_keys_given_to_a_table_are_in_its_title(tmp_path):
    quick = reproduce.quick(reproduce.load("heterogeneous-models"))  # some of its settings have other rounds
    found = reproduce.plan(quick, tmp_path, (0,), {"rounds": 1, "local_steps": 1})
    assert found.experiment.title == f"{quick.title} (rounds=1, local_steps=1)"
    assert reproduce.plan(quick, tmp_path, (0,)).experiment.title == quick.title


def test_a_wrong_file_says_where(tmp_path):
    for text, words in (
        ("title = 3", "title"),
        (TINY_EXPERIMENT.replace("[90.0, 80.5,", "[90.0,"), "7 numbers for 8 columns"),
        (TINY_EXPERIMENT + "colour = 'red'", "colour"),
        ("[[", "not valid TOML"),
        (TINY_EXPERIMENT.replace('"FedHPro"', '"FedAvg"'), "the same name"),
        (TINY_EXPERIMENT + "paper = 55.4", r"rows\.2\.paper: Input should be a valid list"),
        (TINY_EXPERIMENT + "quick = { keys = 'x' }", r"rows\.2\.quick\.Changes\.keys: .*dictionary"),
        (f"pairs = [['FedAvg', 'FedHPr']]{TINY_EXPERIMENT}", "pairs: there is no row 'FedHPr': did you mean 'FedHPro'"),
    ):
        (tmp_path / "wrong.toml").write_text(text)
        with pytest.raises(ConfigError, match=words):
            reproduce.load(str(tmp_path / "wrong.toml"))


def test_without_a_name_it_lists_what_there_is(capsys):
    code, text, _ = call(capsys, "reproduce")
    assert code == 0 and all(re.search(rf"^{name} ", text, flags=re.MULTILINE) for name in NAMES)


def test_a_sweep_is_a_matrix_too(capsys):
    keys = ["rounds=1", "local_steps=1", "batch_size=8", "stem=7x7", "clients_per_domain=1", "samples_per_client=16"]
    code, text, _ = call(capsys, "sweep", "tau=0.05,0.1", "M=0,2", *keys, "--dry-run")
    assert code == 0 and "4 runs, 0 done" in text and "fedhpro tau=0.1 M=2" in text
    code, text, _ = call(capsys, "sweep", "method=fedhpro", "tau=0.05,0.1", *keys, "--dry-run")
    assert "4 runs" in text and "fedhpro tau=0.1 M=0" in text  # the controls
    code, text, _ = call(capsys, "sweep", "method=fedavg,fedprox", *keys, "--out", "s")
    assert code == 0 and text.count(": finished") == 2 and "split=validation" in Path("s/sweep.md").read_text()
    assert Path("s/sweep.html").is_file() and "fedprox" in text


def test_a_sweep_with_a_preset_sweeps_its_method(capsys):
    code, text, _ = call(capsys, "sweep", "preset=plus", "lr=0.01,0.03", "--dry-run")
    assert code == 0 and "fedhpro-plus lr=0.01," in text and "2 runs" in text
    code, text, _ = call(capsys, "sweep", "preset=plus,released", "--dry-run")
    assert code == 0 and "fedhpro-plus preset=plus," in text and "fedhpro preset=released," in text
    code, text, _ = call(capsys, "sweep", "preset=plus", "method=fedavg", "lr=0.01,0.03", "--dry-run")
    assert code == 0 and "fedavg lr=0.01," in text


def test_a_sweep_does_not_change_its_method_unasked(capsys):
    code, _, error = call(capsys, "sweep", "exchange=model,classifier", "--dry-run")
    assert code == 2 and "rows would have different methods" in error and "exchange=classifier" in error
    code, text, _ = call(capsys, "sweep", "exchange=model,classifier", "method=fedavg", "--dry-run")
    assert code == 0 and text.count("fedavg") == 2
    code, _, error = call(capsys, "sweep", "M=5,10", "--no-control", "--dry-run")
    assert code == 0 and "no method is named: fedhpro, since M is a key of it" in error


def test_a_sweep_refuses_values_that_make_no_difference(capsys):
    code, _, error = call(capsys, "sweep", "alpha=0.1,0.5", "--dry-run")
    assert code == 2 and "alpha has no effect with scenario=domains" in error
    code, _, error = call(capsys, "sweep", "lr=0.03,0.030", "--dry-run")
    assert code == 2 and "fedhpro-plus lr=0.03 and fedhpro-plus lr=0.030" in error
    code, _, error = call(capsys, "sweep", "scenario=iid,nid1", "alpha=0.1,0.5", "--dry-run")
    assert code == 0 and "alpha has no effect with scenario=iid" in error


def test_compare_runs_several_at_once(capsys):
    keys = ["rounds=1", "local_steps=1", "batch_size=8", "stem=7x7", "clients_per_domain=1", "samples_per_client=16"]
    code, text, error = call(capsys, "compare", "fedavg", "fedprox", *keys, "--parallel", "2", "--out", "c")
    assert code == 0 and error.count(": finished") == 2 and "fedprox" in text and Path("c/comparison.md").is_file()
    code, text, error = call(capsys, "compare", "fedavg", "fedprox", *keys, "--out", "c")
    assert code == 0 and "1 of 2" not in text  # what is done is not begun again
    code, _, error = call(capsys, "compare", "fedavg", *keys, "lr=0.5", "--out", "c")
    assert code == 2 and "another config" in error


# What is measured, and how it is said


def cell(row, values, paper=None):
    return reproduce.Cell(row, "Digits", "AVG", dict(enumerate(values)), {}, {}, paper, len(values))


def test_significance_in_words():
    base = cell("FedAvg", [50.0, 60.0, 70.0], 55.42)
    words = reproduce.in_words(cell("FedHPro", [51.0, 62.0, 73.0], 64.52), base)
    assert words == (
        "FedHPro beats FedAvg by 2.00 ± 1.00 over 3 seeds (the paper: by +9.10): no difference can be seen "
        "(paired t-test, p = 0.074)."
    )
    words = reproduce.in_words(cell("FedHPro", [52.0, 62.1, 71.9]), base)
    assert "beats FedAvg by 2.00 ± 0.10 over 3 seeds: more than chance would do (paired t-test, p = 0.00083)" in words
    assert "is behind FedAvg by 1.00" in reproduce.in_words(cell("A", [49.0, 58.0, 70.0]), base)
    assert "with one seed" in reproduce.in_words(cell("A", [49.0]), base)
    assert "the same gap with each seed" in reproduce.in_words(cell("A", [51.0, 61.0, 71.0]), base)


def test_rounds_to_accuracy_and_the_papers_speed_up():
    history = [{"round": r, "accuracy": {"AVG": a}} for r, a in ((2, 30.0), (4, 50.0), (6, 45.0), (8, 80.0))]
    history.insert(1, {"round": 3})
    assert rounds_to_accuracy(history, 50) == 4 and rounds_to_accuracy(history, 50.1) == 8
    assert rounds_to_accuracy(history, 81) is None and rounds_to_accuracy([], 1) is None
    assert round(speed_up(14, 27), 1) == 48.1 and round(speed_up(46, 27), 1) == -70.4  # the paper has -70.3
    half = reproduce.Cell("A", "Digits", "R75", {0: 10.0}, {}, {}, None, 3)
    assert half.mean is None and tables.spread(half) == "1 of 3 seeds"


def test_fairness_over_clients():
    found = fairness([float(value) for value in range(1, 21)])
    assert found == pytest.approx({"mean": 10.5, "std": 5.766281, "worst10": 1.5, "best10": 19.5})
    assert fairness([7.0]) == {"mean": 7.0, "std": 0.0, "worst10": 7.0, "best10": 7.0}


def test_a_clients_own_model_is_the_global_one_after_its_round(done):
    folder = next((done[0] / "out/runs").glob("fedavg*"))
    kept = json.loads((folder / measures.LOCAL).read_text())["accuracies"]
    assert probe.local_accuracies(folder) == kept and len(kept) == 4 and len(set(kept)) > 1
    run = read_run(folder)
    assert run.headline("AVG")["final"] not in kept


def test_the_geometry_of_prototypes_does_not_care_for_rotation_and_scale():
    rng = torch.Generator().manual_seed(0)
    P, Q = torch.randn(5, 8, generator=rng), torch.randn(5, 8, generator=rng)
    turn, _ = torch.linalg.qr(torch.randn(8, 8, generator=rng))
    assert measures.geometry(P, 3 * P @ turn + 1) == pytest.approx(0, abs=1e-5)
    assert (
        measures.geometry(P, Q) == pytest.approx(measures.geometry(P, Q @ turn), abs=1e-5)
        and measures.geometry(P, Q) > 0.1
    )


def test_estimates_grow_with_what_is_asked():
    small = configure(method="fedavg", rounds=2)
    seconds, memory = estimate.guess(small)
    assert estimate.guess(small.replace(rounds=20))[0] > 2 * seconds > 0 and 300 < memory < 3000
    full = reproduce.load("table1").config(
        *[getattr(reproduce.load("table1"), name)[0] for name in ("rows", "settings")], 0
    )
    assert estimate.guess(full)[0] > 1000 * seconds
    assert estimate.guess(full.model_copy(update={"engine": "cuda"}))[0] < estimate.guess(full)[0] / 100


def test_a_column_that_no_run_will_have_is_refused_before_any_of_them(tmp_path):
    named = {"mnsit": "mnist", "fair.global.wrst10": "fair.global.worst10", "secnds": "seconds", "R": "AVG"}
    for column, meant in named.items():
        (tmp_path / "tiny.toml").write_text(TINY_EXPERIMENT.replace('"mb_up"', f'"{column}"'))
        with pytest.raises(ConfigError, match=f"tiny, digits.lite: there is no column '{column}'.*{meant}"):
            reproduce.plan(reproduce.load(str(tmp_path / "tiny.toml")), tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY_EXPERIMENT.replace("seeds = [0]", "seeds = []"))
    with pytest.raises(ConfigError, match=r"tiny\.toml: seeds: List should have at least 1 item"):
        reproduce.load(str(tmp_path / "tiny.toml"))
    measures.check("ward 3", [])  # may be a site of one's own data
    with pytest.raises(ConfigError, match=r"no column 'head\.nearest'"):
        measures.check("head.nearest", [])


def test_all_columns_have_a_name():
    for name in NAMES:
        for _, column in reproduce.load(name).columns():
            assert "." not in measures.title(column) and "_e" not in measures.title(column)


def test_figures_of_every_kind_are_drawn_from_the_same_runs(done):
    """Whatever the figure, the page comes out, with a picture for what the runs have."""
    experiment = reproduce.load(str(done[0] / "tiny.toml"))
    rows = [row.model_copy(update={"x": float(i)}) for i, row in enumerate(experiment.rows)]
    for figure in ("curves", "L_GM", "sweep", "bars", "tsne"):
        changed = experiment.model_copy(update={"figure": figure, "rows": rows[: 1 if figure == "tsne" else 3]})
        found = reproduce.outcome(reproduce.plan(changed, done[0] / "out/runs"))
        page = experiments_page([found, found], done[0] / "out")
        assert page.count("<figure") >= 2, figure
    alone = experiments_page([found], done[0] / "out")
    assert "<h1>" in alone and "<h2>" not in alone and page.count("<h2>") == 2  # one experiment is its page
