"""The benchmark of growth: its rows, and what it is there to show: memory grows with workers, not with clients."""

import json
import os
import subprocess
import sys

import pytest

from fedhpro.bench import growth

SMALL = growth.START | {"axis": "clients", "method": "moon", "rounds": 3, "samples": 4}


def test_a_case_measured_in_a_process_of_its_own():
    row = growth.measure(SMALL | {"clients": 3})
    assert row["per_round"] == 3 and row["memories_mb"] == 7  # 3 models of 1.2 MB, and the 3 before
    assert 0 < row["round_seconds"] < 60 and row["client_seconds"] == pytest.approx(row["round_seconds"] / 3, abs=1e-3)
    assert row["setup_seconds"] > 0 and (not sys.platform.startswith("linux") or 200 < row["peak_mb"] < 2000)
    assert row["round_cpu_seconds"] is None or 0 < row["round_cpu_seconds"] < 60
    assert json.loads(json.dumps(row)) == row


def test_a_case_that_fails_is_not_a_number():
    with pytest.raises(RuntimeError, match="exit code"):
        growth.measure(SMALL | {"method": "nonsense"})


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PSS is Linux's")
def test_memory_of_a_process_counts_those_below_it():
    with subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True) as shell:
        sleeping = int(shell.stdout.readline())
        assert growth.memory(shell.pid) > growth.memory(sleeping) > 0
        os.kill(sleeping, 9)
    assert growth.memory(shell.pid) == 0


def test_every_case_once():
    for quick in (True, False):
        found = [tuple(sorted(case.items())) for case in growth.cases(quick)]
        assert len(found) == len(set(found)) and all(dict(case)["rounds"] > 2 for case in found)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PSS is Linux's")
def test_ten_thousand_clients_take_the_memory_of_a_hundred():
    few, many = (growth.measure(SMALL | {"method": "fedhpro", "clients": clients}) for clients in (100, 10_000))
    assert many["per_round"] == few["per_round"] == 100
    assert many["peak_mb"] <= 1.3 * few["peak_mb"] and many["setup_seconds"] < few["setup_seconds"] + 15
