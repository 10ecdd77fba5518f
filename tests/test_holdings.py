"""Who holds what: counts, pictures of all sizes, and the table for the terminal."""

import io
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

from fedhpro.config import Config
from fedhpro.data.clients import ClientData
from fedhpro.data.sources import Split
from fedhpro.report import holdings
from fedhpro.report.curves import COLOURS
from fedhpro.report.holdings import draw_holdings, holdings_table

DOCS = Path(__file__).parent.parent / "docs"


def split(counts):
    y = torch.repeat_interleave(torch.arange(len(counts)), torch.as_tensor(counts, dtype=torch.int64))
    return Split(torch.zeros(len(y), 1), y)


def client(counts, domain="all", held_out=()):
    return ClientData(domain, split(counts), split(held_out))


def names(n):
    return [f"class {i}" for i in range(n)]


def random_clients(clients, classes, domains=("all",)):
    rng = np.random.default_rng(0)
    return [client(rng.integers(0, 4, classes), domains[k % len(domains)]) for k in range(clients)]


def printed(table, width=80):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def pixels(path):
    """The colours of a picture, and how many pixels have them."""
    image = Image.open(path).convert("RGB")
    return {"#{:02X}{:02X}{:02X}".format(*colour): n for n, colour in image.getcolors(image.width * image.height)}


def test_counts_are_of_all_that_a_client_has():
    clients = [client([2, 0, 1], held_out=[1, 1]), client([0, 4, 0])]
    assert holdings.holdings(clients, 4).tolist() == [[3, 1, 1, 0], [0, 4, 0, 0]]


# pictures


@pytest.mark.parametrize(
    ("clients", "classes"), [(1, 2), (7, 2), (20, 10), (50, 50), (51, 10), (7, 100), (100, 397)], ids=str
)
def test_pictures_of_all_sizes(clients, classes, tmp_path):
    path = tmp_path / "new" / "holdings.png"
    draw_holdings(random_clients(clients, classes), names(classes), path)
    image = Image.open(path)
    image.verify()
    assert 300 <= image.width <= 1600 and 250 <= image.height <= 1600
    assert [file.name for file in path.parent.iterdir()] == ["holdings.png"]
    assert max(pixels(path), key=pixels(path).get) == "#FFFFFF"


@pytest.mark.parametrize("clients", [8, 60], ids=["bubbles", "shades"])
def test_each_domain_has_its_colour(clients, tmp_path):
    path = tmp_path / "holdings.png"
    draw_holdings(random_clients(clients, 10, ("a", "b", "c")), names(10), path)
    found = [colour.upper() in pixels(path) for colour in COLOURS[:6]]  # the others are grey and black
    assert found == [True] * 3 + [False] * 3


def test_the_area_of_a_bubble_is_the_number_of_samples(monkeypatch):
    areas = []

    class Axes:
        def scatter(self, x, y, s, **_):
            areas.append(s)

        def set_axisbelow(self, _):
            pass

        def grid(self, **_):
            pass

        legend = grid

    holdings._bubbles(Axes(), Axes(), np.array([[400, 0], [100, 1]]), ["blue", "red"], cell=20)
    largest, quarter, single = areas[0]
    assert largest == pytest.approx(19**2) and quarter == pytest.approx(largest / 4)
    assert single >= 1  # and is seen
    assert areas[1:] == [pytest.approx(n / 400 * 19**2) for n in (25, 100, 400)]


def test_bubbles_of_few_clients_and_classes_do_not_touch(monkeypatch, tmp_path):
    rooms = []
    monkeypatch.setattr(holdings, "_bubbles", lambda *given: rooms.append(given[-1]))
    for clients, classes in ((2, 2), (20, 10)):
        draw_holdings(random_clients(clients, classes), names(classes), tmp_path / "holdings.png")
    assert rooms == [72 * holdings.CELL] * 2


def test_names_are_not_formulas(tmp_path):
    """More domains than colours, one client each; names that mathtext and markup would choke on."""
    odd = [r"$\frac$", "[bold]", "a" * 60]
    clients = [client([1, 2, 3], f"$\\hospital$ [{k}]") for k in range(12)]
    draw_holdings(clients, odd, tmp_path / "holdings.png")
    assert "$\\hospital$ [0]" in printed(holdings_table(clients, odd))


def test_an_old_picture_stays_where_a_new_one_fails(tmp_path, monkeypatch):
    path = tmp_path / "holdings.png"
    path.write_text("old")
    monkeypatch.setattr("fedhpro.files.os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        draw_holdings(random_clients(2, 2), names(2), path)
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_importing_it_is_light():
    code = "import sys, fedhpro.report.holdings; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# the table


def test_the_table():
    text = printed(holdings_table([client([8, 4, 1, 0], "b"), client([0, 1000, 0, 250], "a")], names(4)))
    assert "2 clients, 1,263 samples, 4 classes" in text
    assert "a mark per class, █ the client's largest" in text
    rows = [re.split(r" *│ *", line.strip("│ \n")) for line in text.splitlines() if line.startswith("│")]
    assert rows == [["1", "1,250", "2", "a", "·█·▂"], ["0", "13", "3", "b", "█▄▁·"]]


def test_a_table_of_many_clients_and_classes_fits_a_terminal():
    text = printed(holdings_table(random_clients(100, 397), names(397)))
    assert "80 more" in text and "a mark per 13 classes" in text
    assert max(map(len, text.splitlines())) <= 80
    rows = [line for line in text.splitlines() if line.startswith("│")]
    assert len(rows) == 21 and all(len(re.findall("[▁-█]", line)) == 31 for line in rows[:-1])


def test_twenty_clients_are_all_there():
    assert "more" not in printed(holdings_table(random_clients(20, 3), names(3)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=20))
def test_marks_are_ordered_as_the_counts(counts):
    marks = holdings._marks(np.array(counts))
    assert len(marks) == len(counts)
    heights = [holdings.BLOCKS.find(mark) for mark in marks]  # -1: absent
    assert [height >= 0 for height in heights] == [count > 0 for count in counts]
    ranked = [height for _, height in sorted(zip(counts, heights, strict=True))]
    assert ranked == sorted(ranked)
    assert max(counts) == 0 or heights[int(np.argmax(counts))] == 7


# the page


def test_the_page_names_every_scenario_and_its_pictures_are_small():
    text = (DOCS / "scenarios.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", text, flags=re.MULTILINE)
    scenarios = Config.model_fields["scenario"].annotation.__args__
    assert {f"`{scenario}`" for scenario in scenarios} <= {heading.split(":")[0] for heading in headings}
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert len(pictures) >= 6
    for picture in pictures:
        assert (DOCS / picture).stat().st_size < 100_000
    for target in re.findall(r"(?<!!)\[[^]]+\]\(([^)#]+)\)", text):
        assert (DOCS / target).is_file()
