"""The example notebook stays true: its cells run, with few steps, and its outputs name no machine."""

import ast
import json
import re
from pathlib import Path

import pytest
from conftest import TINY

PAGE = Path(__file__).parent.parent / "docs" / "example.ipynb"


@pytest.fixture(scope="module")
def cells():
    return [cell for cell in json.loads(PAGE.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def executed(source, names):
    """What a notebook would show below the cell: the value of its last line, where that is an expression."""
    body = ast.parse(source).body
    last = ast.Expression(body.pop().value) if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), PAGE.name, "exec"), names)
    return eval(compile(last, PAGE.name, "eval"), names) if last else None


def test_its_cells_run(cells):
    pytest.importorskip("pandas")
    names, kinds = {}, set()
    for cell in cells:
        found = executed("".join(cell["source"]), names)
        if "keys" in names:
            names["keys"] |= TINY | {"rounds": 1, "local_steps": 1, "clients_per_domain": 1, "samples_per_client": 20}
            del names["keys"]["method"]  # cells name their own
        picture = getattr(found, "_repr_png_", None)
        kinds |= {"picture"} if picture and picture().startswith(b"\x89PNG") else {type(found).__name__}
    assert {"picture", "DataFrame", "list", "dict"} <= kinds
    assert len(names["results"]) == 4 and "report.html" in found


def test_it_was_executed_as_a_whole(cells):
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not any(output["output_type"] == "error" for output in outputs)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    shown = [value for output in outputs for kind, value in output.get("data", {}).items() if kind.startswith("text")]
    assert not re.search(r"/(tmp|home|root|work|Users)\b", json.dumps(shown))
    assert PAGE.stat().st_size < 400_000
