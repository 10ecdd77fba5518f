"""The method pages cannot rot: their tables, excerpts, commands and links are compared with the code."""

import re
import shlex
from pathlib import Path

import pytest
import torch

from fedhpro import config
from fedhpro.client import LocalClient
from fedhpro.convergence import Constants, learning_rate_limit, rounds_bound
from fedhpro.data.batches import Transform
from fedhpro.data.sources import Split
from fedhpro.methods import METHODS
from fedhpro.models import build
from fedhpro.randomness import generator
from fedhpro.training import model_tensors

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "methods"
PAGES = [*sorted(FOLDER.glob("*.md")), ROOT / "docs" / "convergence.md"]
REFERENCES = ("centralised", "local")
C, DIM = 10, 512  # what the byte counts hold for


def page_of(method):
    if method.endswith("-hp"):
        return FOLDER / "plug-in.md"
    return FOLDER / ("references.md" if method in REFERENCES else f"{method}.md")


def tables(page, *header):
    """The cells of every row of the tables that have this header."""
    wanted, rows, inside = [*header], [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if cells == wanted:
            inside = True
        elif not cells:
            inside = False
        elif inside and not re.fullmatch(r"[-| ]+", line):
            rows.append(cells)
    return rows


def blocks(page, language):
    """(the line before, the lines inside) of every code block in a language."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(rf"(?:^([^\n]+)\n+)?^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [(before, inside.splitlines()) for before, inside in found]


def shown(value):
    """A default as the pages write it."""
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def anchor(heading):
    """The address that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def ids(page):
    return page.name


# One page per method


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_page_and_a_row_in_the_index(method):
    text = page_of(method).read_text(encoding="utf-8")
    if method.endswith("-hp") or method in REFERENCES:
        assert f"`{method}`" in text
    names = [row[0] for row in tables(FOLDER / "README.md", *INDEX)]
    assert any(re.search(rf"(?<![\w-]){method}(?![\w-]).*\({page_of(method).name}\)", name) for name in names)


INDEX = ("method", "idea in one line", "travels beyond the model", "client memory", "protocols")


@pytest.mark.parametrize("method", METHODS)
def test_the_index_names_the_protocols_in_order(method):
    row = next(
        row for row in tables(FOLDER / "README.md", *INDEX) if re.search(rf"(?<![\w-]){method}(?![\w-])", row[0])
    )
    assert row[-1] == ", ".join(METHODS[method].exchanges)


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent == FOLDER], ids=ids)
def test_every_page_is_about_a_method(page):
    assert page.name == "README.md" or page in {page_of(method) for method in METHODS}


# Defaults


@pytest.mark.parametrize("method", METHODS)
def test_defaults_agree_with_the_code(method):
    pages = [page_of(method)] + ([page_of(method.removesuffix("-hp"))] if method.endswith("-hp") else [])
    rows = [row for page in pages for row in tables(page, "key", "default", "origin")]
    assert len(rows) == len({row[0] for row in rows}), "a key is there twice"
    assert {key: default for key, default, _ in rows} == {k: shown(v) for k, v in config.method_keys(method).items()}


def test_shared_settings_agree_with_the_code():
    rows = tables(FOLDER / "README.md", "shared key", "default", "preset paper")
    plain, paper = config.configure(method="fedavg").flat(), config.configure(preset="paper").flat()
    assert rows and rows == [[key, shown(plain[key]), shown(paper[key])] for key, _, _ in rows]


def test_the_presets_side_by_side_are_complete():
    rows = tables(FOLDER / "fedhpro.md", "key", "paper", "released")
    paper, released = (config.configure(preset=name).flat() for name in ("paper", "released"))
    expected = {key: (shown(paper[key]), shown(released[key])) for key in paper if paper[key] != released[key]}
    assert {key: (left, right) for key, left, right in rows} == expected


def test_every_switch_of_fedhpro_is_explained():
    rows = tables(FOLDER / "fedhpro.md", "switch", "values", "meaning")
    assert {key for row in rows for key in row[0].split(", ")} == set(config.method_keys("fedhpro"))
    for names, values, _ in rows:
        for key in names.split(", "):
            choices = config.describe_type(config.method_types("fedhpro")[key]).split("|")
            assert len(choices) == 1 or choices == values.split(", ")


# What travels

WIRE = ("tensor", "direction", "shape", "bytes")


@pytest.fixture(scope="module")
def net():
    return build("resnet10", C, width=DIM // 8, seed=0)


def traffic(method, net):
    """{(tensor, direction): (shape, bytes)} of a method beside the model."""
    sent = method.broadcast(method.server_state(net, generator(0, "state")))
    images = Split(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, 1]))
    client = LocalClient(net, images, Transform((0.5,) * 3, (0.25,) * 3), sent, {}, generator(0, "client"))
    with torch.no_grad():
        report = method.report(client, method.prepare(client))
    found = [(name, "down", value) for name, value in sent.items()]
    found += [(name, "up", value) for name, value in report.items()]
    return {
        (n, way): (" x ".join(map(str, v.shape)) or "1", f"{v.numel() * v.element_size():,}") for n, way, v in found
    }


def written(rows):
    return {(name, way): (shape, size) for name, way, shape, size, *_ in rows if name != "the model"}


@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("local", "fedgmkd-hp", "fedsa-hp")])
def test_what_travels_agrees_with_the_code(method, net):
    rows = tables(page_of(method), *WIRE)
    values = model_tensors(net)
    statistics = sum(value.numel() for name, value in values.items() if "running_" in name)
    parameters = sum(value.numel() for value in net.parameters())
    size = sum(value.numel() * value.element_size() for value in values.values())
    assert rows[0] == ["the model", "both", f"{parameters:,} + {statistics:,}", f"{size:,}"]
    assert written(rows) == traffic(METHODS[method](), net)


def test_the_other_plug_ins_add_what_the_page_says(net):
    common = written(tables(page_of("fedproto-hp"), *WIRE))
    extra = {name: traffic(METHODS[name](), net).items() - common.items() for name in ("fedgmkd-hp", "fedsa-hp")}
    assert extra["fedgmkd-hp"] == {(("Q", "down"), ("10 x 10", "400")), (("soft", "up"), ("10 x 10", "400"))}
    assert extra["fedsa-hp"] == {(("A", "down"), ("10 x 512", "20,480"))}


def test_what_the_switches_of_fedhpro_add(net):
    page = FOLDER / "fedhpro.md"
    every = METHODS["fedhpro"](hyper_init="prototypes", hpal_warmup=2, retrain_classifier=True, refit="means")
    smaller = METHODS["fedhpro"](uplink="probabilities")
    found = traffic(every, net) | traffic(smaller, net)
    assert written(tables(page, *WIRE)) | written(tables(page, *WIRE, "when")) == found
    assert ("gradients", "up") not in traffic(smaller, net)
    assert traffic(METHODS["fedhpro"](hpcl="off", hpal="off"), net) == {}


# Excerpts, commands, links, lines


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent == FOLDER], ids=ids)
def test_excerpts_are_lines_of_the_code(page):
    """An empty line in an excerpt stands for lines left out."""
    for before, inside in blocks(page, "python"):
        source = re.fullmatch(r"`(fedhpro/[\w/]+\.py)`:", before)
        assert source, f"an excerpt without its file: {inside[0]}"
        code = [line.strip() for line in (ROOT / source[1]).read_text(encoding="utf-8").splitlines()]
        for part in "\n".join(line.strip() for line in inside).split("\n\n"):
            assert f"\n{part}\n" in "\n".join(["", *code, ""]), f"{source[1]} does not have:\n{part}"


@pytest.mark.parametrize("method", METHODS)
def test_every_page_has_an_excerpt_and_a_command(method):
    assert blocks(page_of(method), "python") and blocks(page_of(method), "sh")


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_commands_have_valid_keys(page):
    commands = [line for _, inside in blocks(page, "sh") for line in inside]
    commands += re.findall(r"`(\.venv/bin/fedhpro [^`]+)`", page.read_text(encoding="utf-8"))
    for command in commands:
        program, verb, *keys = shlex.split(command)
        assert (program, verb) == (".venv/bin/fedhpro", "run")
        config.configure(**config.parse(keys))


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_resolve(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        file, _, section = target.partition("#")
        other = (page.parent / file) if file else page
        assert other.is_file(), target
        headings = re.findall(r"^#+ (.+)$", other.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert not section or section in map(anchor, headings), target


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_prose_is_at_most_120_columns_wide(page):
    for line in page.read_text(encoding="utf-8").splitlines():
        assert len(line) <= 120 or line.startswith("|"), line


def test_the_example_of_the_convergence_page():
    page = ROOT / "docs" / "convergence.md"
    names = {"Constants": Constants, "learning_rate_limit": learning_rate_limit, "rounds_bound": rounds_bound}
    for _, inside in blocks(page, "python"):
        exec("\n".join(inside), names)
    assert names["limit"] == pytest.approx(0.08) and names["bound"] == pytest.approx(12.5)
    assert "the limit is 0.08 and the bound 12.5" in page.read_text(encoding="utf-8")
