"""report.html: one file that needs nothing else, of one run or of several side by side."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from .. import __version__
from ..errors import RunError
from ..files import write_atomically
from .charts import swatch
from .markup import Markup, join, tag
from .reading import Group, Run, grouped, read_runs
from .sections import SECTIONS

HERE = Path(__file__).parent
AFTER = "Confusions"  # comes the t-SNE, which is not drawn for every page


def write_report(folders: Sequence[Path], out: Path, *, tsne: bool = True) -> list[str]:
    """The page of these runs; returns a sentence for each that had to be left out. RunError where none is left."""
    runs, problems = read_runs(folders)
    if not runs:
        raise RunError(f"there is nothing to report: {'; '.join(problems) or 'no run was named'}")
    try:
        write_atomically(out, build_page(runs, problems, tsne=tsne).encode(errors="replace"))
    except OSError as error:
        raise RunError(f"{out} cannot be written: {error.strerror or error}") from None
    return problems


def build_page(runs: Sequence[Run], problems: Sequence[str] = (), *, tsne: bool = False, live: bool = False) -> str:
    groups = grouped(runs)
    parts: list[Markup] = []
    for title, section in SECTIONS.items():
        parts.append(_section(title, section(groups)))
        if tsne and title == AFTER:
            parts.append(_section("Features", _features(groups)))
    skipped = [tag("p", problem) for problem in problems]
    notice = tag("aside", tag("strong", "Left out"), *skipped, class_="skipped") if skipped else ""
    body = [_header(groups), _filter(groups) if len(groups) > 1 else "", notice, *parts]
    return document(_title(groups), tag("main", *body), live)


def waiting_page(sentence: str) -> str:
    """What `fedhpro watch` shows before there is anything to show."""
    header = tag("header", tag("h1", "Waiting"), tag("p", sentence))
    return document("fedhpro: waiting", tag("main", header), live=True)


def document(title: str, main: Markup, live: bool = False) -> str:
    """The browser itself forbids the page every connection, and every script but ours."""
    style, script = ((HERE / name).read_text(encoding="utf-8") for name in ("style.css", "script.js"))
    ours = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{ours}'"
    policy += "; connect-src 'self'" if live else ""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Markup(style)),
    )
    footer = tag("footer", f"fedhpro {__version__}. This file needs no network and no other file.")
    toggle = tag("button", "◐", type="button", id="theme", title="light or dark", aria_label="light or dark")
    tip = tag("div", id="tip", role="status", hidden=True)
    body = tag("body", toggle, main, footer, tip, tag("script", Markup(script)), data_live="yes" if live else None)
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _header(groups: Sequence[Group]) -> Markup:
    first, runs = groups[0].first, [run for group in groups for run in group.runs]
    if len(runs) > 1:
        return tag("header", tag("h1", _title(groups)), tag("p", _federation(runs)))
    config = first.config
    about = [first.folder.resolve().name, first.status, f"scenario {config.get('scenario', '–')}"]
    about += [str(config.get("model", "–")), f"seed {first.settings.seed}"]
    return tag("header", tag("h1", _title(groups)), tag("p", " · ".join(about)))


def _title(groups: Sequence[Group]) -> str:
    runs = sum(len(group.runs) for group in groups)
    if runs == 1:
        return f"{groups[0].first.settings.method} on {groups[0].first.settings.data}"
    return f"{len(groups)} settings, {runs} runs" if len(groups) < runs else f"{runs} runs side by side"


def _federation(runs: Sequence[Run]) -> str:
    """What they have in common."""
    names = ("data", "scenario", "model", "rounds")
    shared = {name: {str(run.config.get(name, "–")) for run in runs} for name in names}
    return " · ".join(f"{name} {values.pop()}" for name, values in shared.items() if len(values) == 1)


def _filter(groups: Sequence[Group]) -> Markup:
    """A button for each method; the settings of one method go together, and each has its own too."""
    buttons = [
        tag("button", swatch(group.number), group.label, type="button", data_filter=group.number, aria_pressed="true")
        for group in groups
    ]
    methods = list(dict.fromkeys(group.first.settings.method for group in groups))
    choices = [tag("option", "all methods", value="")]
    choices += [
        tag("option", method, value=" ".join(str(g.number) for g in groups if g.first.settings.method == method))
        for method in methods
    ]
    choose = tag("select", *choices, id="methods", aria_label="method")
    return tag("nav", choose if len(methods) > 1 else "", *buttons, class_="filter", aria_label="runs shown")


def _section(title: str, inside: Markup) -> Markup:
    if not inside:
        return Markup("")
    name = re.sub(r"[^a-z]+", "-", title.lower())
    return tag("section", tag("h2", title), inside, id=name)


def _features(groups: Sequence[Group]) -> Markup:
    from .embedding import draw_embedding

    drawn = [draw_embedding(group, len(groups) > 1) for group in groups]
    return join(tag("div", *drawn, class_="grid"))
