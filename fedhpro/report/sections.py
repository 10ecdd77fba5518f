"""The sections of a report, each a function of the groups of runs: what it shows, or nothing where it has nothing."""

from __future__ import annotations

import base64
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ..card import command
from ..evaluation import AVG, HELD_OUT_SAMPLES, differs
from .charts import Series, bubbles, figure, line_chart, matrix, stacked_bars, swatch
from .markup import Markup, join, table, tag
from .reading import Group, Holdings, Run

BUBBLES = 60  # clients or classes; where there are more, holdings.png is shown instead
MATRIX = 40  # classes; where there are more, the most frequent confusions
LISTED = 50  # refusals, confusions: enough to see what is wrong
NOTHING = Markup("")


def headline(groups: Sequence[Group]) -> Markup:
    """final, best and last5 of AVG, and the final accuracy of each domain."""
    shown = [group for group in groups if any(run.evaluated for run in group.runs)]
    if not shown:
        return tag("p", "No round of these runs was evaluated.")
    domains = [name for name in _keys(shown, "accuracy") if name != AVG]
    rows = []
    for group in shown:
        found = [run.headline(AVG) for run in group.runs if run.evaluated]
        rounds = sorted({str(one["best_round"]) for one in found}, key=int)
        best = join(
            _spread([one["best"] for one in found]), tag("small", f" round {', '.join(rounds)}", class_="under")
        )
        final = tag("strong", _spread([one["final"] for one in found]))
        each = [_spread([run.headline(name)["final"] for run in group.runs if run.headline(name)]) for name in domains]
        rows.append([_name(group), final, best, _spread([one["last5"] for one in found]), *each])
    several = " Mean ± standard deviation over runs with different seeds." if _several_seeds(shown) else ""
    meaning = (
        f"Accuracy in per cent, {_measured_on(shown)}. final, also of the domains: after the last round. best: of the "
        "best round, chosen by this same accuracy and so optimistic. last5: mean of the last five evaluations."
        f"{several}"
    )
    header = ["run", "AVG final", "AVG best", "AVG last5", *domains]
    single = len(groups) == 1 and len(groups[0].runs) == 1
    return join(
        _tiles(groups[0].first) if single else NOTHING,
        table(header, rows, marks=_marks(shown)),
        tag("p", meaning, class_="note"),
        _other_measures(shown),
    )


def curves(groups: Sequence[Group]) -> Markup:
    """One setting: a chart for each kind. Several: a chart for each domain and each term."""
    parts = []
    for kind, (title, unit, note) in KINDS.items():
        charts = [chart for chart in _charts(groups, kind, title, unit) if chart]
        if charts:
            told = [words for name, words in OF_THE_SERVER.items() if kind == "server" and name in _keys(groups, kind)]
            parts.append((title, charts, " ".join([note, *told]).strip()))
    notes = [tag("p", note, class_="note") for _, _, note in parts if note]
    if len(groups) == 1:
        return join(tag("div", *(chart for _, charts, _ in parts for chart in charts), class_="grid"), *notes)
    shown = [join(tag("h3", title), tag("div", *charts, class_="grid")) for title, charts, _ in parts]
    return join(*shown, *notes)


KINDS = {
    "accuracy": ("accuracy", "%", ""),
    "test_loss": (
        "test loss",
        "",
        "The test loss is the mean cross-entropy of the classifier, on the samples that the accuracy is of.",
    ),
    "loss": (
        "loss terms at the clients",
        "",
        "Loss terms are means over the clients of a round, weighted by their samples.",
    ),
    "server": ("at the server", "", ""),
    "privacy": (
        "privacy spent",
        "",
        "epsilon of client-level differential privacy up to each round; delta, the noise and who adds it are among the "
        "settings below.",
    ),
}


OF_THE_SERVER = {
    "L_GM": "L_GM is the gradient matching loss of Eq. 8 (1 − cosine, mean over the classes) after the steps of the "
    "round, L_GM_start before them.",
    "vote": "vote is the share of samples, of all rounds so far, whose clients are for alignment; from 0.9 on all "
    "align in the next round.",
}


def holdings(groups: Sequence[Group]) -> Markup:
    """Who holds what, once for all groups that share it."""
    shown: dict[str, tuple[Run, list[Group]]] = {}
    for group in groups:
        key = group.first.holdings.model_dump_json() if group.first.holdings else str(_picture_of(group.first))
        shown.setdefault(key, (group.first, []))[1].append(group)
    drawn = [_holdings_of(run, owners if len(shown) > 1 else []) for run, owners in shown.values()]
    return join(*drawn)


def confusion(groups: Sequence[Group]) -> Markup:
    drawn = [part for group in groups if (part := _confusion_of(group, len(groups) > 1))]
    note = "Of the last evaluation. A stronger colour stands for more of its true class."
    note += _first_seed(groups)
    return join(tag("div", *drawn, class_="grid narrow"), tag("p", note, class_="note")) if drawn else NOTHING


def fairness(groups: Sequence[Group]) -> Markup:
    """Over clients where they tested on samples of their own, else over the domains."""
    by_client = [group for group in groups if _client_scores(group.first)]
    by_domain = [group for group in groups if len(_domain_scores(group.first)) > 1]
    parts = []
    if by_client:
        rows = [[_name(g), *_spread_of(_client_scores(g.first), "client")] for g in by_client]
        header = ["run", "mean", "std", "worst", "worst 10 %", "median", "best 10 %"]
        note = (
            "Every client's accuracy on its own held-out samples at the last evaluation: of the global model, or of "
            "its own where models stay with the clients. Each client counts the same."
        )
        lines = []
        for group in by_client:
            scores = sorted(_client_scores(group.first).values())
            steps = [(100 * (i + 0.5) / len(scores), score) for i, score in enumerate(scores)]
            lines.append(Series(group.label, group.number, steps, group=_number(group, groups)))
        curve = line_chart("accuracy of the clients, from worst to best", lines, unit="%", x="% of the clients")
        parts += [
            table(header, rows, marks=_marks(by_client)),
            tag("div", curve, class_="grid"),
            tag("p", note + _first_seed(by_client), class_="note"),
        ]
    if by_domain:
        rows = [[_name(g), *_spread_of(_domain_scores(g.first), "domain")] for g in by_domain]
        note = (
            "Spread of the final accuracy over the domains; std is that of the population, each domain counts the same."
        )
        header = ["run", "mean", "std", "worst domain", "best domain", "gap"]
        note += _first_seed(by_domain)
        parts += [table(header, rows, marks=_marks(by_domain)), tag("p", note, class_="note")]
    return join(*parts)


def troubles(groups: Sequence[Group]) -> Markup:
    """Uploads in quarantine, rounds that changed nothing, workers that ended, tests that failed, files that did not."""
    rows, reasons = list[list[Any]](), dict[tuple[str, int, int], Counter[str]]()
    for group in groups:
        for run in group.runs:
            rows += [[_name(group), run.settings.seed, "–", note] for note in run.ending.notes] if run.ending else []
            for record in run.history:
                for r in record.refused:
                    reasons.setdefault((_name(group), run.settings.seed, r.client), Counter())[r.reason] += 1
                name = [_name(group), run.settings.seed, record.round]
                kept = "" if record.aggregated else "; the model stayed as it was"
                rows += [[*name, f"upload of client {r.client} refused: {r.reason}{kept}"] for r in record.refused]
                if not record.aggregated and not record.refused:
                    rows.append([*name, f"the model stayed as it was: {record.not_aggregated}"])
                rows += [[*name, f"a worker ended and was replaced: {_words(what)}"] for what in record.restarted]
                rows += [[*name, f"a test failed and is left out: {_words(what)}"] for what in record.untested]
    uploads = sum(len(record.clients) for group in groups for run in group.runs for record in run.history)
    if not rows:
        return tag("p", f"None: all {uploads:,} uploads were accepted, no worker process had to be replaced.")
    refused = sum(len(record.refused) for group in groups for run in group.runs for record in run.history)
    idle = sum(not record.aggregated for group in groups for run in group.runs for record in run.history)
    more = f" The first {LISTED} of {len(rows):,} are listed." if len(rows) > LISTED else ""
    worst = sorted(reasons.items(), key=lambda entry: -entry[1].total())[:LISTED]
    by_client = [[*who, f"{found.total():,}", found.most_common(1)[0][0]] for who, found in worst]
    return join(
        tag(
            "p",
            f"{refused:,} of {uploads:,} uploads were refused: they are in quarantine, and nothing of them is in the "
            f"model. {idle:,} rounds changed nothing.{more}",
        ),
        table(["run", "seed", "client", "uploads in quarantine", "most often"], by_client) if by_client else NOTHING,
        table(["run", "seed", "round", "what"], rows[:LISTED]),
    )


def hostile(groups: Sequence[Group]) -> Markup:
    """Clients that an experiment made hostile, and those that a robust rule left out or clipped."""
    rows = []
    for group in groups:
        history = group.first.history
        spoiling = Counter(k for record in history for k in record.hostile)
        out = Counter(k for record in history for k in record.left_out)
        factors: dict[int, list[tuple[float, float]]] = {}
        for record in history:
            for clip in record.clipped:
                factors.setdefault(clip.client, []).append((clip.model, clip.reports))
        taking_part = Counter(k for record in history for k in record.clients)
        for k in sorted({*spoiling, *out, *factors}):
            clipped = [f"{statistics.fmean(column):.2f}" for column in zip(*factors.get(k, []), strict=True)]
            who = "hostile" if spoiling[k] else "–"
            rows.append([_name(group), k, who, taking_part[k], out[k], len(factors.get(k, [])), *(clipped or "––")])
    if not rows:
        return NOTHING
    header = ["run", "client", "in the experiment", "rounds", "left out", "clipped", "model by", "reports by"]
    note = "Clipped: in how many rounds, and by which factor on average. The first seed of each setting."
    return join(table(header, rows), tag("p", note, class_="note"))


def costs(groups: Sequence[Group]) -> Markup:
    rows = []
    for group in groups:
        run = group.first
        taking_part = max(1, sum(len(record.clients) for record in run.history))
        down, up = (sum(getattr(record, name) for record in run.history) for name in ("bytes_down", "bytes_up"))
        flops = run.costs.flops if run.costs else {}
        total = sum(value for name, value in flops.items() if name != "step" and not isinstance(value, str))
        memory = run.costs.peak_mb if run.costs else {}
        seconds = sum(timing.seconds for timing in run.timings)
        rows.append(
            [
                _name(group),
                _megabytes(down / taking_part),
                _megabytes(up / taking_part),
                _megabytes(down + up),
                f"{total:.3g}" if total else "–",
                f"{seconds:,.1f}",
                f"{seconds / len(run.timings):.2f}" if run.timings else "–",
                ", ".join(f"{name.replace('_', ' ')} {value:,.0f}" for name, value in memory.items()) or "–",
            ]
        )
    header = ["run", "down, MB", "up, MB", "all rounds, MB", "FLOPs", "seconds", "s a round", "peak memory, MB"]
    note = (
        "down and up: per client and round. FLOPs: two for each multiply-add in convolutions and matrix products, all "
        "rounds. The first seed of each setting."
    )
    timed = [group for group in groups if group.first.costs and group.first.costs.seconds]
    bars = stacked_bars(
        "seconds by phase", [(g.label, _number(g, groups), g.first.costs.seconds) for g in timed if g.first.costs], "s"
    )
    per_round = [
        Series(g.label, g.number, [(t.round, t.seconds) for t in g.first.timings], group=_number(g, groups))
        for g in groups
    ]
    charts = [bars if timed else NOTHING, line_chart("seconds a round", per_round, unit="s", key=False)]
    return join(
        table(header, rows, marks=_marks(groups)),
        tag("p", note, class_="note"),
        tag("div", *charts, class_="grid"),
        *(_tensors(group) for group in groups),
    )


def settings(groups: Sequence[Group]) -> Markup:
    """The command to run it again, versions and every key."""
    parts = []
    for group in groups:
        for run in group.runs:
            versions = (
                ", ".join(f"{name} {version}" for name, version in run.ending.versions.items()) if run.ending else ""
            )
            keys = table(["key", "value"], [[key, value] for key, value in run.config.items()])
            parts.append(
                tag(
                    "div",
                    tag("h3", _name(group), tag("small", f" seed {run.settings.seed}, {run.status}")),
                    tag(
                        "div",
                        tag("pre", tag("code", command(run.config))),
                        tag("button", "copy", type="button", class_="copy"),
                    ),
                    tag("p", tag("code", str(run.folder)), f" · {versions}" if versions else "", class_="note"),
                    tag("details", tag("summary", "every key of the config"), keys),
                    class_="run",
                    data_group=_number(group, groups),
                )
            )
    return join(*parts)


# --- parts ---


def _tiles(run: Run) -> Markup:
    """What a newcomer wants to know first of a single run."""
    found, last = run.headline(AVG), run.history[-1].round
    seconds = sum(timing.seconds for timing in run.timings)
    when = "final" if last == run.settings.rounds else "so far"
    tiles = [
        (f"{found['final']:.1f} %", f"AVG accuracy, {when}"),
        (f"{found['best']:.1f} %", f"best, round {found['best_round']}"),
        (f"{last}", "rounds" if last == run.settings.rounds else f"of {run.settings.rounds} rounds"),
        (f"{len(run.holdings.clients):,}" if run.holdings else "", "clients"),
        (_duration(seconds) if seconds else "", "in all"),
    ]
    return tag(
        "div", *(tag("div", tag("b", value), tag("span", name)) for value, name in tiles if value), class_="tiles"
    )


def _other_measures(groups: Sequence[Group]) -> Markup:
    """What else was measured, where it says something else."""
    rows = []
    for group in groups:
        for run in group.runs:
            if not run.evaluated:
                continue
            last = run.evaluated[-1]
            found = {f"predicted by {name.replace('_', ' ')}": values.get(AVG) for name, values in last.heads.items()}
            found = found if len(found) > 1 else {}
            balanced = (last.balanced or {}).get(AVG)
            if balanced is not None and differs(balanced, (last.accuracy or {}).get(AVG, balanced)):
                found["mean of the classes"] = balanced
            if last.own_labels is not None:
                found["weighted by the client's own labels"] = last.own_labels
            if last.federated is not None and last.accuracy and len(last.accuracy) > 1:
                found["clients' held-out samples, mean"] = last.federated.mean
            rows += [
                [_name(group), run.settings.seed, name, f"{value:.2f}"]
                for name, value in found.items()
                if value is not None
            ]
    if not rows:
        return NOTHING
    inside = table(["run", "seed", "measure", "AVG final"], rows)
    return tag("details", tag("summary", "The same runs by other measures"), inside)


def _charts(groups: Sequence[Group], kind: str, title: str, unit: str) -> list[Markup]:
    names = sorted(_keys(groups, kind), key=lambda name: name != AVG)
    log = kind != "accuracy"
    if not names:
        return []
    if len(groups) == 1:
        lines = [series(groups[0], kind, name, name, i, None, name == AVG) for i, name in enumerate(names)]
        return [line_chart(title, lines, unit=unit, log=log)]
    charts = []
    for name in names:
        lines = [series(g, kind, name, g.label, g.number, g.number) for g in groups]
        charts.append(line_chart(name, lines, unit=unit, log=log, key=False))
    return charts


def series(
    group: Group, kind: str, name: str, label: str, look: int, number: int | None, strong: bool = False
) -> Series:
    """The mean over the seeds, and where there are several the band between the lowest and the highest."""
    found = [run.values(kind, name) for run in group.runs]
    if kind == "loss":  # of the seeds that had the term; where none had it the line breaks
        rounds = sorted({record.round for run in group.runs for record in run.history if record.loss})
    else:
        rounds = sorted(set.intersection(*(set(values) for values in found)))
    each = {float(r): [values[r] for values in found if r in values] or [math.nan] for r in rounds}
    points = [(r, sum(values) / len(values)) for r, values in each.items()]
    band = [(r, min(values), max(values)) for r, values in each.items()] if len(found) > 1 else []
    return Series(label, look, points, band, number, strong)


def _holdings_of(run: Run, owners: Sequence[Group]) -> Markup:
    whose = f" · {', '.join(group.label for group in owners)}" if owners else ""
    found = run.holdings
    if found is None or max(len(found.clients), len(found.classes)) > BUBBLES:
        picture = _picture_of(run)
        if picture is None:
            return NOTHING
        encoded = base64.b64encode(picture).decode()
        return figure(
            f"clients and classes{whose}", tag("img", src=f"data:image/png;base64,{encoded}", alt="who holds what")
        )
    return _bubbles(run, found, whose)


def _bubbles(run: Run, found: Holdings, whose: str) -> Markup:
    order = sorted(range(len(found.clients)), key=lambda k: found.clients[k].domain)
    domains = list(dict.fromkeys(found.clients[k].domain for k in order))
    looks = {name: look for look, name in enumerate([AVG, *_domain_scores(run)])}  # as in the curves of that run
    for name in domains:
        looks.setdefault(name, len(looks))
    cells = []
    for column, k in enumerate(order):
        domain = found.clients[k].domain
        for c, n in found.clients[k].samples.items():
            words = f"client {k} ({domain}): {n:,} of class {found.classes[c]}"
            cells.append((column, c, n, looks[domain], words))
    total = sum(n for _, _, n, _, _ in cells)
    title = f"{len(order)} clients, {total:,} samples, {len(found.classes)} classes{whose}"
    key = [tag("li", tag("i", class_=f"dot b{looks[name] % 8}"), name) for name in domains]
    note = "A bubble's area is the number of samples of a class (rows) at a client (columns)."
    picture = bubbles(title, [str(k) for k in order], found.classes, cells)
    return join(
        picture, tag("ul", *key, class_="legend") if len(domains) > 1 else NOTHING, tag("p", note, class_="note")
    )


def _picture_of(run: Run) -> bytes | None:
    path = run.folder / "holdings.png"
    return path.read_bytes() if path.is_file() else None


def _confusion_of(group: Group, several: bool) -> Markup:
    """All domains together; beside it each of them where there is room, that is of a single setting."""
    found = group.first.confusion
    if found is None:
        return NOTHING
    names, number = found.classes, group.number if several else None
    together = [[sum(cell) for cell in zip(*rows, strict=True)] for rows in zip(*found.domains.values(), strict=True)]
    title = join(group.label if several else "all together", tag("small", f" round {found.round}"))
    if len(names) > MATRIX:
        wrong = Counter({(i, j): n for i, row in enumerate(together) for j, n in enumerate(row) if i != j and n})
        rows = [[names[i], names[j], n, f"{n / sum(together[i]):.0%}"] for (i, j), n in wrong.most_common(LISTED)]
        return figure(title, table(["true class", "taken for", "samples", "of its class"], rows), data_group=number)
    drawn = matrix(title, names, together, look=group.number, data_group=number)
    if len(found.domains) < 2:
        return drawn
    each = [matrix(name, names, counts, look=group.number) for name, counts in found.domains.items()]
    if not several:
        return join(drawn, *each)
    return tag("div", drawn, tag("details", tag("summary", "per domain"), *each), data_group=number)


def _client_scores(run: Run) -> dict[str, float]:
    return run.evaluated[-1].federated.clients if run.evaluated and run.evaluated[-1].federated else {}


def _domain_scores(run: Run) -> dict[str, float]:
    last = run.evaluated[-1].accuracy if run.evaluated else None
    return {name: value for name, value in (last or {}).items() if name != AVG}


def _spread_of(scores: dict[str, float], what: str) -> list[str]:
    values = sorted(scores.values())
    worst, best = (min(scores, key=lambda k: scores[k]), max(scores, key=lambda k: scores[k]))
    start = [f"{statistics.fmean(values):.2f}", f"{statistics.pstdev(values):.2f}"]
    if what == "domain":
        gap = f"{values[-1] - values[0]:.2f}"
        return [*start, f"{values[0]:.2f} ({worst})", f"{values[-1]:.2f} ({best})", gap]
    tenth = max(1, round(len(values) / 10))
    low, high = statistics.fmean(values[:tenth]), statistics.fmean(values[-tenth:])
    return [
        *start,
        f"{values[0]:.2f} (client {worst})",
        f"{low:.2f}",
        f"{statistics.median(values):.2f}",
        f"{high:.2f}",
    ]


def _tensors(group: Group) -> Markup:
    """Every tensor that travels, the largest first."""
    sent = group.first.costs.tensors if group.first.costs else []
    if not sent:
        return NOTHING
    rows = [
        [t.tensor, t.direction, " × ".join(map(str, t.shape)) or "one number", t.dtype, f"{t.bytes:,}"]
        for t in sorted(sent, key=lambda t: -t.bytes)
    ]
    title = f"{group.label}: every tensor that a client gets and sends in a round"
    return tag("details", tag("summary", title), table(["tensor", "direction", "shape", "type", "bytes"], rows))


def _keys(groups: Sequence[Group], kind: str) -> list[str]:
    records = [record for group in groups for run in group.runs for record in run.history]
    return list(dict.fromkeys(key for record in records for key in getattr(record, kind) or {}))


def _name(group: Group) -> Markup:
    return join(swatch(group.number), group.label)


def _number(group: Group, groups: Sequence[Group]) -> int | None:
    return group.number if len(groups) > 1 else None


def _marks(groups: Sequence[Group]) -> list[dict[str, Any]]:
    return [{"data_group": group.number} for group in groups]


def _several_seeds(groups: Sequence[Group]) -> bool:
    return any(len(group.runs) > 1 for group in groups)


def _first_seed(groups: Sequence[Group]) -> str:
    return " The first seed of each setting." if _several_seeds(groups) else ""


def _measured_on(groups: Sequence[Group]) -> str:
    ways = {(g.first.settings.evaluation == "federated", g.first.settings.split) for g in groups}
    if all(federated for federated, _ in ways):
        return f"on the clients' {HELD_OUT_SAMPLES}; AVG is the unweighted mean of the clients"
    if len(ways) > 1:
        return "on the sets that each run was evaluated on, which are not the same"
    return f"on the server's {ways.pop()[1]} sets; AVG is the unweighted mean of the domains"


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "–"
    mean = f"{statistics.fmean(values):.2f}"
    return f"{mean} ± {statistics.stdev(values):.2f}" if len(values) > 1 else mean


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.3g}" if count < 1e9 else f"{count / 1e6:,.0f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _words(what: dict[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in what.items())


Section = Callable[[Sequence[Group]], Markup]
SECTIONS: dict[str, Section] = {
    "Accuracy": headline,
    "Over the rounds": curves,
    "Who holds what": holdings,
    "Confusions": confusion,
    "Fairness": fairness,
    "Troubles": troubles,
    "Hostile clients": hostile,
    "Costs": costs,
    "Run it again": settings,
}
