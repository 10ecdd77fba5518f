"""report.html and `fedhpro watch`: what is on the page, what it does with strange names and broken folders."""

import functools
import http.client
import json
import math
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from conftest import TINY, call, synthetic_split

import fedhpro
from fedhpro import cli
from fedhpro.data.sources import Domain, Source
from fedhpro.errors import RunError
from fedhpro.report import picture
from fedhpro.report.curves import plot_curves
from fedhpro.report.page import build_page, write_report
from fedhpro.report.reading import grouped, read_run, read_runs
from fedhpro.report.sections import SECTIONS, series
from fedhpro.report.serve import Server

HOSTILE = "<script>alert(1)</script>\"'&"


class Outline(HTMLParser):
    """The elements of a page, and its text outside of style and script."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.text, self.open = [], "", []
        self.feed(page)

    def handle_starttag(self, name, attributes):
        self.elements.append((name, dict(attributes)))
        if name not in ("meta", "img", "br"):
            self.open.append(name)

    def handle_startendtag(self, name, attributes):
        self.elements.append((name, dict(attributes)))

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, data):
        self.text += data * (self.open[-1:] not in (["style"], ["script"]))

    def count(self, name):
        return sum(element == name for element, _ in self.elements)


@pytest.fixture(scope="module")
def hostile_source():
    """Names that come from a site, and would be markup if nobody took care."""
    domains = tuple(
        Domain(name, synthetic_split(60, 4, s), synthetic_split(16, 4, s + 1), synthetic_split(40, 4, s + 2), False, "")
        for name, s in ((f"site {HOSTILE}", 1), ("plain", 11))
    )
    allocation = {domains[0].name: (2, 12), "plain": (1, 20)}
    return Source("tiny", domains, (HOSTILE, "b", "<img src=x onerror=alert(2)>", "d"), allocation, crop=1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, hostile_source):
    """Two seeds of FedAvg, FedHPro with held-out samples as well, and FedProto whose models stay at home."""
    folder = tmp_path_factory.mktemp("runs")
    keys = [
        {"method": "fedavg", "seed": 0},
        {"method": "fedavg", "seed": 1},
        {"method": "fedhpro", "evaluation": "both"},
        {"method": "fedproto", "exchange": "prototypes"},
    ]
    return [
        fedhpro.run(source=hostile_source, **(TINY | own | {"out": str(folder / f"run{i}")})).folder
        for i, own in enumerate(keys)
    ]


def test_a_run_ends_with_a_page_of_its_own(runs):
    page = (runs[2] / "report.html").read_text(encoding="utf-8")
    seen = Outline(page)
    assert not seen.open  # every element is closed
    for title in ("Accuracy", "Over the rounds", "Who holds what", "Confusions", "Fairness", "Troubles", "Costs"):
        assert ("section", {"id": re.sub("[^a-z]+", "-", title.lower())}) in seen.elements, title
    for words in (
        "AVG final",
        "L_GM",
        "hpcl",
        "worst 10 %",
        "best domain",
        "seconds by phase",
        "fedhpro run method=fedhpro",
    ):
        assert words in seen.text, words
    assert str(fedhpro.__version__) in seen.text
    final = json.loads((runs[2] / "result.json").read_text())["final"]["final"]
    assert f"{final:.2f}" in seen.text


def test_the_page_needs_nothing_else_and_the_browser_is_told_so(runs):
    page = build_page(read_runs(runs)[0])
    for name, attributes in Outline(page).elements:
        for attribute in ("src", "href", "srcset", "action"):
            assert attributes.get(attribute, "data:").startswith("data:"), (name, attributes)
    assert "url(" not in page and "@import" not in page
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)[1]
    assert policy.startswith("default-src &#x27;none&#x27;;") and "connect-src" not in policy
    assert "unsafe-inline" not in policy.partition("script-src")[2]


def test_names_from_sites_are_text(runs):
    page = build_page(read_runs(runs)[0], [f"a folder called {HOSTILE}"])
    seen = Outline(page)
    assert seen.count("script") == 1 and seen.count("img") == 0
    assert not any(key.startswith("on") for _, attributes in seen.elements for key in attributes)
    assert seen.text.count("<script>alert(1)</script>") > 3


def test_reasons_of_refused_uploads_are_text(runs, tmp_path):
    folder = shutil.copytree(runs[0], tmp_path / "refused")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[0] |= {"refused": [{"client": 1, "reason": HOSTILE}], "restarted": [{"exit_code": -9}]}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ending = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(ending | {"notes": ["the checkpoint of round 7 is not whole"]}))
    seen = Outline(build_page([read_run(folder)]))
    assert seen.count("script") == 1
    assert f"upload of client 1 refused: {HOSTILE}" in seen.text and "exit code -9" in seen.text
    assert "in quarantine" in seen.text and "the checkpoint of round 7 is not whole" in seen.text


def test_seeds_go_together_and_settings_are_told_apart(runs, tmp_path, hostile_source):
    other = fedhpro.run(source=hostile_source, **TINY, evaluation="both", M=0, out=str(tmp_path / "m0"))
    groups = grouped(read_runs([*runs, other.folder])[0])
    assert [len(group.runs) for group in groups] == [2, 1, 1, 1]
    labels = [group.label for group in groups]
    assert labels[0].startswith("fedavg") and "M=30" in labels[1] and "M=0" in labels[3]
    text = Outline(build_page(read_runs(runs[:2])[0])).text
    finals = [json.loads((run / "result.json").read_text())["final"]["final"] for run in runs[:2]]
    assert f"{sum(finals) / 2:.2f} ± {abs(finals[0] - finals[1]) / 2**0.5:.2f}" in text


def test_what_is_of_the_first_seed_only_says_so(runs):
    fairness = SECTIONS["Fairness"]
    assert "The first seed of each setting." in fairness(grouped(read_runs(runs[:2])[0]))
    assert "first seed" not in fairness(grouped(read_runs(runs[:1])[0]))


def test_a_run_that_was_given_more_rounds_is_not_finished(runs, tmp_path):
    folder = shutil.copytree(runs[0], tmp_path / "longer")
    assert read_run(folder).status == "finished"
    config = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(config.replace("rounds = 2\n", "rounds = 5\n"))
    assert read_run(folder).status == "round 2 of 5"


def test_a_copy_of_a_run_is_no_further_seed(runs, tmp_path):
    copy = shutil.copytree(runs[0], tmp_path / "copy")
    groups = grouped(read_runs([*runs[:2], copy, runs[0]])[0])
    assert [[run.folder for run in group.runs] for group in groups] == [runs[:2], [copy]]
    assert [group.label for group in groups] == ["fedavg", f"fedavg in {copy}"]


def test_a_run_from_before_a_key_existed_goes_with_the_later_ones(runs, tmp_path):
    older = shutil.copytree(runs[1], tmp_path / "older")
    lines = (older / "config.toml").read_text().splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith(("nearest =", "rho ="))]
    assert len(kept) == len(lines) - 2
    (older / "config.toml").write_text("".join(kept))
    assert [group.label for group in grouped(read_runs([older, runs[0]])[0])] == ["fedavg"]


@pytest.fixture
def with_a_term_of_some_rounds(runs, tmp_path):
    """Two seeds of four rounds; the term "now" is there in rounds 1, 3 and 4, or in 3 alone, and "never" in none."""
    copies = []
    for run, values in zip(runs[:2], ([1.0, 0, 1.0, 1.0], [0, 0, 3.0, 0]), strict=True):
        copies.append(shutil.copytree(run, tmp_path / "runs" / run.name))
        last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        history = [last | {"round": i + 1, "loss": last["loss"] | {"now": v, "never": 0}} for i, v in enumerate(values)]
        (copies[-1] / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in history))
        config = (copies[-1] / "config.toml").read_text()
        (copies[-1] / "config.toml").write_text(config.replace("rounds = 2\n", "rounds = 4\n"))
    return copies


def test_a_loss_term_that_was_not_there_leaves_a_gap(with_a_term_of_some_rounds):
    both, one = (grouped(read_runs(part)[0]) for part in (with_a_term_of_some_rounds, with_a_term_of_some_rounds[:1]))
    points, band = (getattr(series(both[0], "loss", "now", "", 0, None), name) for name in ("points", "band"))
    assert [y for _, y in points[:1] + points[2:]] == [1, 2, 1] and math.isnan(points[1][1])  # of those that had it
    assert band[2] == (3, 1, 3)
    page = SECTIONS["Over the rounds"](one)
    (chart,) = re.findall("<figure><figcaption>loss terms at the clients.*?</figure>", page, re.DOTALL)
    line, swatch = re.findall('d="([^"]*)" class="line s1', chart)
    assert (line.count("M"), line.count("L")) == (1, 1) and "H" in swatch  # rounds 3 and 4; round 1 is a dot
    assert "never" not in chart and "NaN" not in page
    assert "never" not in SECTIONS["Over the rounds"](both)


def test_pictures_of_terms_that_were_not_there(with_a_term_of_some_rounds, recwarn):
    axes = plot_curves(with_a_term_of_some_rounds[:1]).axes
    (losses,) = (each for each in axes if each.get_title() == "loss terms at the clients")
    drawn = {line.get_label(): list(line.get_ydata()) for line in losses.get_lines()}
    assert sorted(drawn) == ["ce", "now"] and math.isnan(drawn["now"][1]) and drawn["now"][2:] == [1, 1]
    metrics = with_a_term_of_some_rounds[0] / "metrics.jsonl"
    history = [json.loads(line) for line in metrics.read_text().splitlines()]
    none = [record | {"loss": dict.fromkeys(record["loss"], 0)} for record in history]
    metrics.write_text("".join(json.dumps(record) + "\n" for record in none))
    shown = plot_curves(with_a_term_of_some_rounds[:1])
    shown.png()
    assert "loss terms at the clients" not in [each.get_title() for each in shown.axes]
    assert "Loss terms" not in SECTIONS["Over the rounds"](grouped(read_runs(with_a_term_of_some_rounds[:1])[0]))
    assert not recwarn.list


def test_the_folder_of_a_sweep_stands_for_its_runs(with_a_term_of_some_rounds):
    found, problems = read_runs([with_a_term_of_some_rounds[0].parents[1]])
    assert [run.folder for run in found] == with_a_term_of_some_rounds and not problems


BROKEN = {
    "no config": ("config.toml", None, "config.toml"),
    "not TOML": ("config.toml", "rounds = = 3", "config.toml"),
    "config of another version": ("config.toml", 'algorithm = "fedavg"\n', "another version"),
    "no round": ("metrics.jsonl", "", "no finished round"),
    "not JSON": ("metrics.jsonl", 'nonsense\n{"round": 2}\n', "line 1"),
    "rounds of another version": ("metrics.jsonl", '{"round": 1, "accuracy": 3}\n', "another version"),
    "bytes": ("metrics.jsonl", b"\xff\xfe\n\n", "line 1"),
    "deeply nested": ("costs.json", "[" * 100_000, "costs.json"),
    "a matrix that is none": ("confusion.json", '{"round": 1, "classes": ["a"], "domains": {"x": [[1, 2]]}}', "rows"),
    "a class without a name": (
        "holdings.json", '{"classes": [], "clients": [{"domain": "x", "samples": {"3": 1}}]}', "holdings.json",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name, content, words", BROKEN.values(), ids=BROKEN)
def test_a_broken_folder_is_named_and_skipped(runs, tmp_path, name, content, words):
    broken = shutil.copytree(runs[1], tmp_path / "broken")
    if content is None:
        (broken / name).unlink()
    else:
        (broken / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (problem,) = write_report([runs[0], broken], tmp_path / "page.html", tsne=False)
    assert str(broken) in problem and words in problem
    assert str(broken) in Outline((tmp_path / "page.html").read_text()).text
    with pytest.raises(RunError, match="nothing to report"):
        write_report([broken], tmp_path / "none.html")
    assert not (tmp_path / "none.html").exists()


def leaves(value, path=()):
    """The paths of everything in a JSON value."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield from leaves(item, (*path, key))


def replaced(value, path, new):
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(copy[path[0]], path[1:], new)
    return copy


@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json", "costs.json", "confusion.json", "holdings.json"])
def test_any_value_in_any_file_is_shown_or_refused(runs, tmp_path, name):
    folder = shutil.copytree(runs[2], tmp_path / "odd")
    whole = json.loads(
        (folder / name).read_text().splitlines()[-1] if name.endswith("l") else (folder / name).read_text()
    )
    odd = [None, -1, 0, 10**400, 1e308, float("nan"), float("-inf"), "", "\0", [], {}, [[]], {"AVG": 1e308}, True]
    rng, shown, refused = random.Random(0), 0, 0
    for path in rng.sample(found := list(leaves(whole)), min(25, len(found))):
        (folder / name).write_text(json.dumps(replaced(whole, path, rng.choice(odd))) + "\n")
        try:
            page = build_page([read_run(folder)])
            shown += page.endswith("</html>\n")
        except RunError as error:
            refused += name in str(error)
    assert shown and refused and shown + refused == min(25, len(found))


def test_many_classes_and_clients(runs, tmp_path):
    """Too many for a matrix and for bubbles: the most frequent confusions, and the picture of the run folder."""
    folder = shutil.copytree(runs[0], tmp_path / "many")
    names = [f"class {c}" for c in range(50)]
    matrix = [[3 * (i == j) + 2 * (i == 7 and j == 8) for j in range(50)] for i in range(50)]
    (folder / "confusion.json").write_text(json.dumps({"round": 2, "classes": names, "domains": {"x": matrix}}))
    clients = [{"domain": "x", "samples": {"0": 1}}] * 100
    (folder / "holdings.json").write_text(json.dumps({"classes": names, "clients": clients}))
    seen = Outline(build_page([read_run(folder)]))
    assert "class 7class 8240%" in seen.text
    assert seen.count("img") == 1


def test_what_a_run_has_so_far_is_shown(runs, tmp_path):
    """Killed in the middle of a line, before the files of its end were written; or resumed since."""
    folder = shutil.copytree(runs[0], tmp_path / "killed")
    for name in ("result.json", "costs.json", "confusion.json", "timings.jsonl", "holdings.json"):
        (folder / name).unlink()
    first, _ = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text(first + '\n{"round": 2, "cli')
    run = read_run(folder)
    assert run.status == "round 1 of 2" and len(run.history) == 1
    text = Outline(build_page([run])).text
    assert "round 1 of 2" in text and "AVG final" in text
    assert "data:image/png;base64" in build_page([run])  # holdings.png in place of the file that is not there


def test_the_command(runs, tmp_path, capsys, monkeypatch):
    report = functools.partial(call, capsys, "report")
    for console in (cli.out, cli.err):
        monkeypatch.setattr(console, "_file", None)
    monkeypatch.chdir(tmp_path)
    code, said, complained = report(runs[0].parent, "missing", "--no-tsne")
    assert code == 0 and "wrote report.html" in said and "left out: missing" in complained
    assert "4 runs" in Outline(Path("report.html").read_text()).text
    code, said, _ = report(runs[0].parent, "--no-tsne")  # as `compare` leaves them: in their folder
    assert code == 0 and f"wrote {runs[0].parent / 'report.html'}" in said.replace("\n", "")
    code, said, complained = report("missing")
    assert (code, said) == (2, "") and complained.count("\n") == 1
    code, _, complained = report(runs[0], "--out", runs[0] / "config.toml" / "x.html", "--no-tsne")
    assert code == 2 and "cannot be written" in complained


def test_features_in_the_plane(tmp_path):
    """On embedded data, which a report can load again; data handed over in Python it cannot, and says so."""
    keys = TINY | {"rounds": 1, "local_steps": 1, "evaluate_every": 9}
    result = fedhpro.run(**keys, out=str(tmp_path / "run"))
    write_report([result.folder], tmp_path / "page.html")
    seen = Outline((tmp_path / "page.html").read_text())
    assert ("section", {"id": "features"}) in seen.elements
    marks = [attributes["class"] for _, attributes in seen.elements if "sample" in attributes.get("class", "").split()]
    assert len(marks) == 400 and "hyper-prototypes" in seen.text
    assert result.tsne(samples=40)._repr_png_().startswith(b"\x89PNG")


def test_the_samples_of_sites_are_not_here_to_be_looked_at(tmp_path):
    keys = TINY | {"method": "fedavg", "rounds": 1, "local_steps": 1, "evaluate_every": 9}
    folder = fedhpro.run(**keys, out=str(tmp_path)).folder
    config = (folder / "config.toml").read_text().replace('\ndata = "digits-lite"', '\ndata = "sites"')
    (folder / "config.toml").write_text(config.replace('\nclasses = "none"', '\nclasses = "0,1,2,3,4,5,6,7,8,9"'))
    write_report([folder], tmp_path / "page.html")
    assert "has no samples here to look at" in (tmp_path / "page.html").read_text()


def test_letters_that_no_font_has_are_said_once_and_other_fonts_are_asked(caplog, monkeypatch, recwarn):
    monkeypatch.setattr(picture, "SAID", set())
    for _ in range(2):
        drawn = picture.Picture()
        title = drawn.suptitle("\U0010fffd and \U0010fffc")  # private use: no font has them
        assert drawn.png(dpi=20).startswith(b"\x89PNG")
    assert len(caplog.messages) == 1 and "no font of this machine has the letter" in caplog.text
    assert not recwarn.list and title.get_fontfamily() == ["sans-serif", *picture.other_fonts()]
    monkeypatch.setattr(picture, "other_fonts", lambda: ["Some CJK"])
    drawn.png(dpi=20)
    assert title.get_fontfamily()[-1] == "Some CJK"


def test_results_in_a_notebook(runs, hostile_source, tmp_path, monkeypatch):
    result = fedhpro.run(source=hostile_source, **TINY | {"method": "fedavg"}, out=str(tmp_path / "run"))
    assert result.plot()._repr_png_().startswith(b"\x89PNG")
    assert result.tsne(samples=20, source=hostile_source)._repr_png_().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "pandas", None)
    rows = result.table()
    assert [row["round"] for row in rows] == [1, 2] and rows[-1]["AVG"] == result.accuracy["AVG"]


def test_a_table_is_a_data_frame_where_pandas_is(runs, hostile_source, tmp_path):
    pandas = pytest.importorskip("pandas")
    result = fedhpro.run(source=hostile_source, **TINY | {"method": "fedavg"}, out=str(tmp_path / "run"))
    table = result.table()
    assert isinstance(table, pandas.DataFrame) and list(table.index) == [1, 2]
    assert table["AVG"].iloc[-1] == result.accuracy["AVG"]


# --- watch ---


@pytest.fixture
def served(runs, tmp_path):
    folder = shutil.copytree(runs[0], tmp_path / "served")
    with Server(folder) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server, method="GET", path="/", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, answer.headers


def test_watch_serves_the_page_of_now(served):
    assert served.server_address[0] == "127.0.0.1"
    status, page, headers = ask(served)
    assert status == 200 and "AVG final" in page and "connect-src &#x27;self&#x27;" in page
    assert ask(served, "HEAD")[:2] == (200, "")
    assert ask(served, "HEAD")[2]["ETag"] == headers["ETag"]
    lines = (served.folder / "metrics.jsonl").read_text().splitlines()
    (served.folder / "metrics.jsonl").write_text(lines[0] + "\n")
    assert ask(served, "HEAD")[2]["ETag"] != headers["ETag"]
    assert "round 1 of 2" in ask(served)[1]
    (served.folder / "metrics.jsonl").unlink()
    assert "no finished round yet" in ask(served)[1]


def test_watch_refuses_other_names_methods_and_paths(served):
    for host in ("evil.example", f"evil.example:{served.server_port}", "127.0.0.1", ""):
        status, text, _ = ask(served, Host=host)
        assert status == 403 and "AVG" not in text, host
    assert ask(served, Host=f"localhost:{served.server_port}")[0] == 200
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        assert ask(served, method)[0] == 501, method
    for path in ("/config.toml", "/../config.toml", "/%2e%2e/"):
        assert ask(served, path=path)[0] == 404, path


def test_watch_says_what_cannot_be_watched(tmp_path, served):
    with pytest.raises(RunError, match="no such run folder"):
        Server(tmp_path / "nothing")
    with pytest.raises(fedhpro.ConfigError, match="cannot be used"):
        Server(tmp_path, served.server_port)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_watch_ends_without_a_word(runs, stop):
    command = [sys.executable, "-u", "-m", "fedhpro", "watch", str(runs[0])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        address = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())[0]
        assert b"AVG final" in urllib.request.urlopen(address).read()
        process.send_signal(stop)
        assert process.wait(30) == 0 and process.stdout.read() == ""


# --- in a browser ---

SEEN = """[...document.querySelectorAll('figure svg:not(.swatch), figure img, .bar, section table')]
    .filter(e => !e.closest('details')).map(e => e.getBoundingClientRect()).map(box => [box.width, box.height])"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine: apt-get install chromium")
def test_in_a_browser(runs, tmp_path):
    write_report(runs, tmp_path / "page.html", tsne=False)
    browser = Browser(tmp_path / "profile")
    try:
        address = (tmp_path / "page.html").as_uri()
        browser.open(address)
        for width in (1200, 375):
            browser.resize(width, 800)
            sizes = browser.evaluate(SEEN)
            assert len(sizes) > 12 and all(wide > 40 and high > 15 for wide, high in sizes)
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.evaluate("document.querySelectorAll('script').length") == 1

        shown = "[...document.querySelectorAll('[data-group=\"0\"]')].filter(e => e.getClientRects().length).length"
        before = browser.evaluate(shown)
        browser.evaluate("document.querySelector('[data-filter=\"0\"]').click()")
        assert before > 5 and browser.evaluate(shown) == 0
        browser.evaluate("menu = document.getElementById('methods'); menu.selectedIndex = 1")
        browser.evaluate("menu.dispatchEvent(new Event('change', {bubbles: true}))")
        assert browser.evaluate(shown) == before
        assert browser.evaluate(shown.replace('"0"', '"1"')) == 0

        browser.evaluate("chart = document.querySelector('svg[data-hover]'); chart.scrollIntoView({block: 'center'})")
        box = browser.evaluate("chart.getBoundingClientRect().toJSON()")
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        browser.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        assert re.match(r"round \d\nfedavg.*: \d", browser.evaluate("document.getElementById('tip').textContent"))

        paper = "getComputedStyle(document.body).backgroundColor"
        light = browser.evaluate(paper)
        browser.evaluate("document.getElementById('theme').click()")
        assert browser.evaluate(paper) != light
        browser.ask("Emulation.setEmulatedMedia", media="print")  # on paper, 19 cm: white, and nothing beside the page
        browser.resize(718, 800)
        assert browser.evaluate(paper) == light and browser.evaluate("document.documentElement.scrollWidth") <= 718
        assert browser.complaints() == [] and browser.requests() == [address]
    finally:
        browser.close()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine: apt-get install chromium")
def test_a_watched_page_follows_the_run(served, tmp_path):
    whole = (served.folder / "metrics.jsonl").read_text()
    (served.folder / "metrics.jsonl").write_text(whole.splitlines()[0] + "\n")
    browser = Browser(tmp_path / "profile")
    try:
        browser.open(served.address)
        assert "round 1 of 2" in browser.evaluate("document.querySelector('header').textContent")
        browser.evaluate("new Promise(done => setTimeout(done, 2500))")
        (served.folder / "metrics.jsonl").write_text(whole)
        browser.evaluate("new Promise(done => setTimeout(done, 4500))")
        assert "finished" in browser.evaluate("document.querySelector('header').textContent")
        assert browser.complaints() == [] and set(browser.requests()) == {served.address}
    finally:
        browser.close()
