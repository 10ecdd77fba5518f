"""The commands `fedhpro reproduce` and `fedhpro sweep`: a matrix of runs, then tables and a page."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .config import Config, about_keys, chosen_unnamed, configure, names_and_keys, parse, without_effect
from .errors import ConfigError, DataError

out, err = Console(), Console(stderr=True)

Seeds = Annotated[str | None, typer.Option(help="Comma-separated seeds. \\[default: the experiment's]")]
Parallel = Annotated[
    int | None, typer.Option(min=1, help="Runs at once. \\[default: one per core, 4 on a GPU; 8 there at most]")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would run, how long and with how much memory.")]


def reproduce(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]... [KEY=VALUE]...",
            help="Experiments (table2, figure7, ag-news, FILE.toml); keys win over theirs, as engine=cuda does.",
            show_default=False,
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Minutes, on an embedded stand-in.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only settings or rows of this name, or with it in theirs; can be given again."),
    ] = None,
    dry_run: DryRun = False,
    seeds: Seeds = None,
    parallel: Parallel = None,
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="\\[default: runs/reproduce, or runs/reproduce-quick]")
    ] = None,
) -> None:
    """A table or figure of the paper, measured, beside what is printed. Without a name: what there is.

    Runs are kept in a store and shared between tables; the same command goes on where it was interrupted.
    """
    from . import reproduce as experiments

    given, keys = names_and_keys(arguments or [])
    for name in {"method", "seed", "out", "workers"} & keys.keys():
        raise ConfigError(f"{name} is not a key here: the experiment, --seeds, --out and --parallel say it")
    chosen = [*(experiments.names() if everything else ()), *given]
    if not chosen:
        for name in experiments.names():
            out.print(f"{name:22} {experiments.load(name).title}", markup=False, highlight=False, soft_wrap=True)
        return
    loaded = [experiments.load(name) for name in dict.fromkeys(chosen)]
    loaded = [experiments.quick(experiment) for experiment in loaded] if quick else loaded
    loaded = [experiments.only(experiment, only) for experiment in loaded] if only else loaded
    _go(loaded, seeds, keys, parallel, out_folder or Path("runs", "reproduce-quick" if quick else "reproduce"), dry_run)


def sweep(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=A,B,C... [KEY=VALUE]...", help="Keys to vary, and keys for all.", show_default=False
        ),
    ],
    seeds: Seeds = None,
    control: Annotated[bool, typer.Option(help="Beside FedHPro, its control with frozen hyper-prototypes.")] = True,
    dry_run: DryRun = False,
    parallel: Parallel = None,
    out_folder: Annotated[Path, typer.Option("--out", help="Of the runs and tables.")] = Path("runs/sweep"),
) -> None:
    """The same federation with every combination of some values, as in [cyan]fedhpro sweep lr=0.01,0.03,0.1[/]."""
    from .comparison import check, entries, label_of
    from .data import load
    from .reproduce import Experiment, Row, Setting

    keys = parse(arguments)
    values = {name: _values(name, text) for name, text in keys.items()}
    varied = {name: several for name, several in values.items() if len(several) > 1}
    common = {name: value for name, value in keys.items() if name not in varied}
    if not varied:
        raise ConfigError("nothing is varied: give a key several values, as in lr=0.01,0.03,0.1")
    for name in {"seed", "out", "workers"} & keys.keys():
        raise ConfigError(f"{name} is not a key here: --seeds, --out and --parallel say it")
    combinations = [dict(zip(varied, chosen, strict=True)) for chosen in itertools.product(*varied.values())]
    configs = [configure(**(common | own)) for own in combinations]
    labels = [label_of(config.method, own) for own, config in zip(combinations, configs, strict=True)]
    _check_that_rows_differ(varied, labels, configs)
    if len({config.method for config in configs}) > 1 and not {"method", "preset"} & varied.keys():
        sentences = filter(None, (chosen_unnamed(common | own) for own in combinations))
        raise ConfigError(f"rows would have different methods ({next(sentences)}): name one, as in method=fedhpro")
    check(configs)
    tell_about_keys(common | own for own in combinations)
    rows, pairs = list[Row](), list[tuple[str, str]]()
    for label, own, config in zip(labels, combinations, configs, strict=True):
        for entry in entries([config.method], common | own, control and "M" not in varied):
            frozen = "M" in entry.keys
            pairs += [(label, f"{label} M=0")] if frozen else []
            line = "control, M=0" if frozen else ""
            rows.append(Row(name=label + " M=0" * frozen, keys=own | entry.keys, x=_place(own, varied), line=line))
    central = dict.fromkeys(config.data for config in configs if config.evaluation != "federated")
    sources = [load(data).domains for data in central]
    names = dict.fromkeys(domain.name for domains in sources if len(domains) > 1 for domain in domains)
    uneven = any(len(set(d.test.y.bincount().tolist())) > 1 for domains in sources for d in domains)
    chosen_apart = all(config.split == "validation" for config in configs)
    experiment = Experiment(
        name="sweep",
        title=f"Sweep of {', '.join(varied)}" + ("" if "data" in varied else f" on {configs[0].data}"),
        about="" if chosen_apart else "Choose settings on the validation part: split=validation.",
        seeds=[0],
        keys=common,
        figure="sweep" if len(varied) == 1 and all(map(_is_number, *varied.values())) else "curves",
        pairs=pairs,
        settings=[
            Setting(
                name="data" if "data" in varied else configs[0].data,
                columns=[*names, "AVG", *(["balanced"] if uneven else [])],
            )
        ],
        rows=rows,
    )
    _go([experiment], seeds, {}, parallel, out_folder, dry_run)


def _values(name: str, text: str) -> list[str]:
    """Those with commas between them; data has options behind commas too, as in folder:PATH,size=16."""
    return re.split(r",(?!\w+=)", text) if name == "data" else text.split(",")


def _check_that_rows_differ(varied: Iterable[str], labels: Sequence[str], configs: Sequence[Config]) -> None:
    for name in varied:
        if all(found := [without_effect(config, [name]) for config in configs]):
            raise ConfigError(f"{found[0][0]}: there is nothing to vary")
    for number, config in enumerate(configs):
        if (first := configs.index(config)) < number:
            raise ConfigError(f"two rows have the same settings: {labels[first]} and {labels[number]}")


def tell_about_keys(rows: Iterable[dict[str, Any]]) -> None:
    """Of each row's keys those that its runs do not look at, and those that chose its method where none is named."""
    for sentence in dict.fromkeys(itertools.chain(*(about_keys(keys, configure(**keys)) for keys in rows))):
        err.print(sentence, style="yellow", markup=False, highlight=False, soft_wrap=True)


def _go(
    experiments: Sequence[Any],
    seeds: str | None,
    keys: dict[str, Any],
    parallel: int | None,
    folder: Path,
    dry_run: bool,
) -> None:
    from .matrix import how_many, is_done, run_all
    from .reproduce import plan

    chosen = parse_seeds(seeds) if seeds else ()
    plans = [plan(experiment, folder / "runs", chosen, keys) for experiment in experiments]
    for sentence in dict.fromkeys(text for each in plans for text in each.missing.values()):
        err.print(sentence, style="yellow", markup=False, highlight=False, soft_wrap=True)
    titles: dict[str, str] = {}  # by folder; a run that several tables share has that of the first
    for each in plans:
        for (row, setting, seed), config in each.configs.items():
            titles.setdefault(config.out, f"{each.experiment.name}: {row}, {setting}, seed {seed}")
    wanted = {
        config.out: config for each in plans for config in (each.configs.values() if dry_run else each.runnable())
    }
    if not wanted:
        raise DataError("nothing can run: its data are not there. With --quick it runs on embedded data")
    configs = list(wanted.values())
    at_once = how_many(configs[0].engine, parallel)
    left = [config for config in configs if not is_done(config)]
    if dry_run:
        _forecast(titles, configs, left, at_once)
        return
    out.print(f"{len(configs)} runs, {len(configs) - len(left)} of them done; {at_once} at once", highlight=False)
    number, failed, started = itertools.count(1), list[str](), time.monotonic()

    def say(config: Any, status: str) -> None:
        minutes, seconds = divmod(round(time.monotonic() - started), 60)
        text = f"{next(number):4} of {len(left)}  {minutes:3}:{seconds:02}  {titles[config.out]}: {status}"
        failed.extend([text] if status not in ("finished", "interrupted") else [])
        out.print(text, markup=False, highlight=False, soft_wrap=True, style="" if status == "finished" else "yellow")

    whole = run_all(left, at_once, say)
    _save(plans, folder)
    if not whole:
        err.print("interrupted: the same command goes on with it", style="yellow")
        raise typer.Exit(130)
    if failed:
        err.print(f"{len(failed)} runs failed", style="yellow")
        raise typer.Exit(1)


def _save(plans: Sequence[Any], folder: Path) -> None:
    """Tables in four forms, and a page of all that are of this command."""
    from . import tables
    from .files import write_atomically
    from .report.experiments import experiments_page
    from .reproduce import outcome

    outcomes = [outcome(each) for each in plans]
    for found in outcomes:
        tables.save(found, folder)
    if len(outcomes) == 1:
        out.print(tables.terminal(outcomes[0]))
    page = folder / ("report.html" if len(outcomes) > 1 else f"{outcomes[0].experiment.name}.html")
    write_atomically(page, experiments_page(outcomes, folder))
    names = ", ".join(found.experiment.name for found in outcomes)
    out.print(f"{names}: .md .tex .csv .json in {folder}; all in {page}", markup=False, highlight=False, soft_wrap=True)


def _forecast(titles: dict[str, str], configs: Sequence[Any], left: Sequence[Any], at_once: int) -> None:
    from .estimate import correction, guess

    waiting = {config.out for config in left}
    ratio, most = correction([config for config in configs if config.out not in waiting])
    total, memory = 0.0, 0.0
    for config in configs:
        seconds, megabytes = guess(config)
        total, memory = total + ratio * seconds * (config.out in waiting), max(memory, most or megabytes)
        state = f"about {duration(ratio * seconds)}" if config.out in waiting else "done"
        out.print(f"{titles[config.out]}  {state}", markup=False, highlight=False, soft_wrap=True)
    counts = f"{len(configs)} runs, {len(configs) - len(left)} done, {len(left)} to do"
    how = "of the runs that are done" if most else "from FLOPs alone, so rough"
    need = f"about {duration(total / at_once)}, {at_once} at once, and {at_once * memory / 1000:.1f} GB of memory"
    out.print(f"{counts}: {need} (estimates {how})", highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def parse_seeds(text: str) -> list[int]:
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--seeds {text}: write whole numbers with commas between them, as in 0,1,2") from None
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds {text}: a seed is given twice")
    return seeds


def _is_number(text: str) -> bool:
    try:
        float(text)
        return True
    except ValueError:
        return False


def _place(keys: dict[str, Any], varied: dict[str, list[str]]) -> float | None:
    value = str(keys.get(next(iter(varied)), ""))
    return float(value) if len(varied) == 1 and _is_number(value) else None
