"""The numbers of the pages are those of the results that are kept, and the tools that make them work."""

import importlib.util
import json
import statistics
from pathlib import Path

import pytest
from conftest import TINY

from fedhpro.config import configure

ROOT = Path(__file__).parent.parent


def tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tables, matrix = tool("tables"), tool("matrix")


@pytest.mark.parametrize(
    ("results", "page"),
    [("office-caltech", "RESULTS"), ("digits", "RESULTS"), ("digits-lite", "comparison"), ("precision", "gpu")],
)
def test_tables_show_what_was_measured(results, page):
    written = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    for name, seeds in tables.read(ROOT / "results" / f"{results}.jsonl").items():
        for measure in (tables.final, tables.last5):
            assert tables.spread([measure(run) for run in seeds.values()]) in written, (name, measure)


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
    for keys in jobs.values():
        configure(**keys)
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
    assert "AVG final" in tables.table(tmp_path / "tiny.jsonl")
    matrix.one(name, keys, tmp_path)  # goes on, and has nothing left to do
