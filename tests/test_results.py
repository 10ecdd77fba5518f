"""The numbers of the pages are those of the results that are kept, and the tools that make them work."""

import importlib.util
import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TINY

from fedhpro.config import configure

ROOT = Path(__file__).parent.parent


def tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # matrix.py imports tables.py
    spec.loader.exec_module(module)
    return module


tables, matrix = tool("tables"), tool("matrix")


@pytest.mark.parametrize(
    ("results", "page"),
    [
        ("office-caltech", "RESULTS"),
        ("digits", "RESULTS"),
        ("office-caltech-confirm", "RESULTS"),
        ("digits-confirm", "RESULTS"),
        ("office-caltech-modules", "RESULTS"),
        ("office-caltech-global", "RESULTS"),
        ("office-caltech-prototypes", "RESULTS"),
        ("office-caltech-hp", "RESULTS"),
        ("digits-lite-hp", "RESULTS"),
        ("digits-modules", "RESULTS"),
        ("digits-global", "RESULTS"),
        ("digits-hp", "RESULTS"),
        ("digits-prototypes", "RESULTS"),
        ("cifar10-lt-100", "skews"),
        ("cifar10-lt-50", "skews"),
        ("cifar10-lt-10", "skews"),
        ("cifar10-lt-100-small", "skews"),
        ("cifar10-lt-100-small-equalised", "skews"),
        ("cifar10-labels", "skews"),
        ("office-caltech-nearest", "RESULTS"),
        ("digits-lite", "comparison"),
        ("precision", "gpu"),
    ],
)
def test_tables_show_what_was_measured(results, page):
    written = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    for name, seeds in tables.read(ROOT / "results" / f"{results}.jsonl").items():
        for measure in (tables.final, tables.last5):
            assert tables.spread([measure(run) for run in seeds.values()]) in written, (name, measure)


@pytest.mark.parametrize(
    ("results", "page"),
    [(f"digits-lite-{name}", "plus-elsewhere") for name in ("quarter", "quarter-labels", "rare", "small-clients")],
)
def test_pages_show_final_accuracies(results, page):
    written = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    for name, seeds in tables.read(ROOT / "results" / f"{results}.jsonl").items():
        assert tables.spread([tables.final(run) for run in seeds.values()]) in written, name


OF_THE_DEFAULT = {  # group -> plus as it is by default, and the rivals that it was run beside with the same seeds
    "office-caltech-confirm": ("fedhpro-plus-vote", "fedhpro", "fedhpro-M0", "fedavg"),
    "digits-confirm": ("fedhpro-plus-vote", "fedhpro", "fedhpro-M0"),
    "cifar10-labels-paper.jsonl@30": ("fedhpro-plus", "fedhpro", "fedhpro-M0", "fedavg"),
    "cifar10-labels": ("fedhpro-plus", "fedhpro", "fedhpro-M0", "fedavg"),
    "cifar10-lt-100-small": ("fedhpro-plus", "fedhpro", "fedhpro-M0", "fedavg"),
    "ham10000": ("fedhpro-plus", "fedhpro", "fedavg"),
    "ag-news": ("fedhpro-plus", "fedhpro", "fedhpro-M0", "fedavg"),
    "digits-lite-labels-0.2-confirm": ("fedhpro-plus-vote", "fedhpro-again", "fedhpro-M0-again"),
    "digits-lite-labels-0.5-confirm": ("fedhpro-plus-vote", "fedhpro", "fedhpro-M0", "fedavg"),
    "digits-lite-quarter": ("fedhpro-plus-vote", "fedhpro", "fedhpro-M0", "fedavg"),
    "digits-lite-quarter-labels": ("fedhpro-plus-vote", "fedhpro", "fedhpro-M0", "fedavg"),
    "digits-lite-rare": ("plus", "fedhpro", "fedavg"),
    "digits-lite-small-clients": ("fedhpro-plus", "fedhpro", "fedavg"),
    "digits-lite-pairs": ("plus-paced", "fedhpro", "fedavg"),
}


@pytest.mark.parametrize("group", OF_THE_DEFAULT)
def test_the_default_loses_to_the_papers_method_and_its_control_nowhere(group):
    name, *rivals = OF_THE_DEFAULT[group]
    runs = tables.read(ROOT / "results" / (group if "@" in group else f"{group}.jsonl"))
    for rival in rivals:
        gaps = tables.paired(runs[name], runs[rival])
        mean, error = statistics.fmean(gaps), statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else 0.0
        digits = 1 if group == "digits-lite-pairs" else 2
        shown = f"{mean:+.{digits}f}" + (f" ± {error:.{digits}f}" if error else "")
        assert shown in (ROOT / "docs/plus.md").read_text(encoding="utf-8"), rival
        assert rival.startswith("fedavg") or mean > -2 * error, rival


def test_of_runs_that_were_cut_off_every_evaluation_is_shown():
    path, written = ROOT / "results/cifar10-labels-paper.jsonl", (ROOT / "docs/skews.md").read_text(encoding="utf-8")
    assert not tables.read(path)
    runs = [json.loads(line) for line in path.read_text().splitlines()]
    assert tables.read(Path(f"{path}@30")).keys() == {run["run"].removesuffix("-seed0") for run in runs}
    for run in runs:
        assert " | ".join(f"{each['accuracy']['AVG']:.2f}" for each in run["rounds"][:-1]) in written, run["run"]
        assert f"{run['rounds'][-1]['accuracy']['AVG']:.2f}" in written, run["run"]


OF_MATCHING = ["office-caltech.jsonl+results/office-caltech-confirm", "digits.jsonl+results/digits-confirm"]
OF_MATCHING += ["cifar10-labels-paper.jsonl@30", "cifar10-labels", "ag-news", "docs-lite", "digits-lite"]
OF_MATCHING += [f"cifar10-lt-{rho}" for rho in ("100", "50", "10", "100-small", "100-small-equalised")]
OF_MATCHING += [f"digits-lite-{name}" for name in ("quarter", "quarter-labels", "mixed")]
OF_MATCHING += [f"digits-lite-labels-{alpha}-confirm" for alpha in (0.2, 0.5)]


def test_matched_minus_frozen_shows_what_was_measured(monkeypatch):
    monkeypatch.chdir(ROOT)
    section = (ROOT / "docs/matching.md").read_text(encoding="utf-8").split("\n## ")[1]
    shown = sorted(
        row.split(" | ", 1)[1] for row in section.splitlines() if row.startswith("| ") and "seeds" not in row
    )
    measured = [tables.matched(Path("results") / (f if "@" in f else f"{f}.jsonl")) for f in OF_MATCHING]
    assert shown == sorted(row.split(" | ", 2)[2] for (row,) in measured)


@pytest.mark.parametrize(
    ("matched", "other"),
    [
        ("I1-blocks-adam", "I1-M0-blocks"),
        ("I1-blocks-adam-turned", "I1-M0-blocks"),
        ("I1-blocks-adam", "I1-blocks-adam-turned"),
    ],
)
def test_the_lead_shows_what_was_measured(matched, other):
    written = (ROOT / "docs/matching.md").read_text(encoding="utf-8")
    runs = tables.read(ROOT / "results/digits-lite-awake.jsonl")
    for measure in (tables.final, tables.last5):  # of five evaluations
        gaps = tables.paired(runs[matched], runs[other], measure)
        assert len(gaps) == 5 and tables.with_error(gaps) in written


@pytest.mark.parametrize(("results", "wanted"), [("office-caltech", [30, 40, 50, 60]), ("digits", [75, 85, 90, 94])])
def test_rounds_and_fairness_show_what_was_measured(results, wanted):
    written = (ROOT / "docs/RESULTS.md").read_text(encoding="utf-8")
    path = ROOT / "results" / f"{results}.jsonl"
    rows = [*tables.rounds_to(path, wanted).splitlines()[2:], *tables.fairness_table(path).splitlines()[2:]]
    for row in rows:
        name, cells = row[2:].split(" | ", 1)
        assert name == "fedavg-lr0.1" or f"| {cells.removesuffix(' |')} |" in written, row


def test_heads_show_what_was_measured():
    written = (ROOT / "docs/RESULTS.md").read_text(encoding="utf-8")
    found = {}
    for line in (ROOT / "results/heads.jsonl").read_text().splitlines():
        run = json.loads(line)
        found.setdefault((run["data"], run["run"].rsplit("-seed", 1)[0]), []).append(
            run["heads"]["nearest client mean"]
        )
    row = next(line for line in written.splitlines() if line.startswith("| nearest of the clients' class means"))
    shown = [float(cell) for cell in row.split("|")[2:-1]]
    assert len(shown) == len(found) == 8
    assert sorted(shown) == pytest.approx(sorted(map(statistics.fmean, found.values())), abs=0.051)


def test_jobs_are_valid_and_seed_by_seed(tmp_path):
    jobs = matrix.jobs_of(ROOT / "results/jobs.json")
    others = matrix.jobs_of(ROOT / "results/frames.json")
    for keys in [*jobs.values(), *others.values()]:
        if keys.get("method") != "frames":  # of benchmarks/frames.py
            configure(**keys)
    for name in others:
        group, run = name.split("/")
        assert f'"run": "{run}"' in (ROOT / "results" / f"{group}.jsonl").read_text(), f"{name} is nowhere in results"
    office = [int(name[-1]) for name in jobs if name.startswith("office-caltech/")]
    assert office == sorted(office) and len(office) == 36


def test_a_matrix_of_runs_is_kept_in_a_line_each(tmp_path):
    jobs = [{"into": "tiny", "keys": TINY | {"local_steps": 1}, "seeds": [0, 1], "runs": {"a": {"method": "fedavg"}}}]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    found = matrix.jobs_of(tmp_path / "jobs.json")
    assert list(found) == ["tiny/a-seed0", "tiny/a-seed1"]
    name, keys = next(iter(found.items()))
    matrix.one(name, keys, tmp_path)
    assert matrix.collect(found, tmp_path) == 1  # the other one has not been run
    runs = tables.read(tmp_path / "tiny.jsonl")
    assert [record["round"] for record in runs["a"][0]["rounds"]] == [1, 2]
    assert matrix.measured(found, tmp_path) == {"tiny/a-seed0"}  # is not run again beside these results
    assert "AVG final" in tables.table(tmp_path / "tiny.jsonl")
    matrix.one(name, keys, tmp_path)  # goes on, and has nothing left to do


AWAKE = """
import json, sys
import awake, fedhpro, informed, matrix
from pathlib import Path
from fedhpro.config import configure
for keys in matrix.jobs_of(Path("../results/awake.json")).values():
    configure(**keys)
tiny, out = json.loads(sys.argv[1]), sys.argv[2]
kinds = [
    {},
    {"match_on": "both", "adam": True, "by": "fifths", "spread": 1.0},
    {"match_on": "weights", "by": "size"},
    {"match_on": "weights", "keep": 0.5, "taken_at": "sent"},
    {"I": 1, "match_on": "frame", "until": 1},
    {"I": 1, "hyper_init": "blocks", "adam": True, "match_lr": 0.01, "turned": True},
    {"match_by": "distance", "non_negative": True, "adam": True},
]
for i, keys in enumerate([{"method": "fedhpro"}, *({"method": "awake"} | kind for kind in kinds)]):
    print(json.dumps(fedhpro.run(tiny | keys | {"out": f"{out}/{i}"}).history[-1].get("server", {})))
"""


FRAMES = """
import json, sys
import frames, fedhpro
from fedhpro.methods import fedhpro_plus
from safetensors.torch import load_file
tiny, out = json.loads(sys.argv[1]), sys.argv[2]
anchors = {"method": "frames", "I": 1, "M": 0, "hyper_init": "blocks", "uplink": "off", "hpcl": "off", "relaxed": 1.0}
plus = {"method": "fedhpro-plus", "agreed": False}
pairs = [
    ({"method": "frames"}, {"method": "fedhpro"}),
    (anchors | {"classifier": "anchors"}, plus),
    (anchors | {"classifier": "anchors", "balanced": True}, plus | {"balanced": True}),
    (anchors, plus | {"classifier": "trained"}),
]
margin = {"classifier": "anchors", "balanced": True, "relaxed": 0.0, "hpal_weight": 0.0, "margin": 0.9, "gap": 0.125}
pairs.append((anchors | margin, plus | {"agreed": True}))  # and the vote is against
fedhpro_plus.MAJORITY = 2
for i, pair in enumerate(pairs):
    folders = [fedhpro.run(tiny | keys | {"out": f"{out}/{i}-{j}"}).folder for j, keys in enumerate(pair)]
    ours, theirs = (load_file(folder / "model.safetensors") for folder in folders)
    print("same" if all((ours[name] == theirs[name]).all() for name in theirs) else "other")
"""


def test_what_was_compared_as_frames_is_the_method_of_the_package(tmp_path):
    """The runs that fedhpro-plus was chosen by were those of benchmarks/frames.py: the same bits."""
    command = [sys.executable, "-c", FRAMES, json.dumps(TINY | {"local_steps": 1}), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT / "benchmarks", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line in ("same", "other")] == ["same"] * 5


MADE = """
import json, sys
import pairs, rare
made, sevens = pairs.pairs(), rare.sevens()
part = made.domains[0].train
print(json.dumps([made.num_classes, sorted(made.allocation.values()), list(part.x.shape), int(part.y.max())]))
print(json.dumps([sevens.classes, [round(float(domain.train.y.double().mean()), 3) for domain in sevens.domains]]))
print(json.dumps(rare.one(rare.sevens, "a-seed0", json.loads(sys.argv[1]))))
"""


def test_data_that_benchmarks_make_of_digits_lite():
    keys = TINY | {"local_steps": 1, "rounds": 1, "method": "fedavg"}
    command = [sys.executable, "-c", MADE, json.dumps(keys)]
    done = subprocess.run(command, cwd=ROOT / "benchmarks", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made, sevens, run = [json.loads(line) for line in done.stdout.splitlines() if line[0] in "[{"]
    assert made == [100, [[3, 250], [4, 500], [6, 350], [7, 150]], [750, 3, 32, 32], 99]
    assert sevens == [["other", "seven"], [0.1] * 4]
    assert run["run"] == "a-seed0" and [record["round"] for record in run["rounds"]] == [1]


def test_matching_of_other_gradients_descends_and_without_switches_is_the_papers(tmp_path):
    """In a process of its own: it registers a method."""
    command = [sys.executable, "-c", AWAKE, json.dumps(TINY | {"local_steps": 1}), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT / "benchmarks", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed, same, *others = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert same == pytest.approx(printed, rel=1e-4)
    assert len(others) == 6 and others.pop(3) == {}  # a frame is not a descent
    assert all(each["L_GM"] < each["L_GM_start"] for each in others)


INFORMED = """
import json, sys
import torch
import torch.nn.functional as F
import informed, fedhpro
from fedhpro.methods.fedhpro_plus import frame
from safetensors.torch import load_file
tiny, out = json.loads(sys.argv[1]), sys.argv[2]
step = torch.randn(10, 128, generator=torch.Generator().manual_seed(0))
found = informed.matched(step)
sizes = sorted((found > 0).sum(1).tolist()) == sorted((frame(10, 128) > 0).sum(1).tolist())
print("shared", bool(((found > 0).sum(0) == 1).all()), sizes, bool((found.norm(dim=1) - 128**0.5).abs().max() < 1e-4))
print("cosines", *(float(F.cosine_similarity(a, step).mean()) for a in (found, frame(10, 128))))
print("itself", bool((informed.matched(frame(10, 128)) == frame(10, 128)).all()))
anchors = {}
for by in ("step", "nothing", "turned"):
    folder = fedhpro.run(tiny | {"method": "informed", "by": by, "out": f"{out}/{by}"}).folder
    anchors[by] = load_file(folder / "server.safetensors")["anchors"]
apart = bool((anchors["step"] != anchors["nothing"]).any())
print("anchors", apart, bool((anchors["turned"] == anchors["step"].roll(1, 0)).all()))
"""


def test_features_are_shared_out_to_match_a_step_of_the_classifier(tmp_path):
    command = [sys.executable, "-c", INFORMED, json.dumps(TINY | {"local_steps": 1}), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT / "benchmarks", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line}
    assert told["shared"] == ["True"] * 3 and told["itself"] == ["True"] and told["anchors"] == ["True"] * 2
    ours, before = map(float, told["cosines"])
    assert ours > 0.4 and abs(before) < 0.1
