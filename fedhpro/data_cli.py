"""The commands `fedhpro data`: list, get, import, verify, show."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from .config import configure, parse
from .data.catalog import CATALOG, Dataset, find
from .errors import ConfigError, DataError

data_app = typer.Typer(help="Data sources: get them, check them, look at them.", no_args_is_help=True)
out, err = Console(), Console(stderr=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The dataset; `fedhpro data list` has them.")]
T = TypeVar("T")
EMBEDDED = (("digits-lite", "image", 10, 3_600, 3_200), ("docs-lite", "text", 4, 4_000, 1_600))


@data_app.command("list")
def data_list() -> None:
    """The data sources, how large they are, and where they are."""
    table = Table(box=None)
    for title in ("name", "kind", "classes", "train", "test", "where"):
        table.add_column(title, justify="right" if title in ("classes", "train", "test") else "left", no_wrap=True)
    rows = [(*row, "embedded") for row in EMBEDDED]
    rows += [(each.name, each.kind, each.num_classes, *_at_hand(each)) for each in CATALOG.values()]
    for name, kind, classes, train, test, where in rows:
        table.add_row(name, kind, str(classes), f"{train:,}", f"{test:,}", where)
    out.print(table)


@data_app.command("get")
def data_get(
    name: Name, again: Annotated[bool, typer.Option("--again", help="Also where it is in the cache already.")] = False
) -> None:
    """Fetch a dataset from the Hugging Face Hub into the cache. An interrupted download goes on where it stopped."""
    from .data import ingest, store

    if any(name == row[0] for row in EMBEDDED):
        out.print(f"{name} is embedded: there is nothing to get")
        return
    dataset = find(name)
    folder = store.folder_of(dataset.name)
    if store.is_there(folder) and not again:
        with contextlib.suppress(DataError):  # damaged, or of another version: it is fetched anew
            store.read(folder).check_sums()
            out.print(f"{dataset.name} is in the cache already, and whole: {folder}", highlight=False, soft_wrap=True)
            return
    _say(dataset, _with_progress(lambda track: ingest.fetch(dataset, track)))


def bring(name: str) -> None:
    """Before a run: a dataset of the hub that is not at hand is fetched, once."""
    from .data import ingest, sources

    dataset = CATALOG.get(name)
    if dataset is None or not dataset.fetched or sources.stored(dataset) is not None:
        return
    err.print(f"{dataset.title} is not in the cache: fetching it, once", highlight=False)
    _with_progress(lambda track: ingest.fetch(dataset, track))


@data_app.command("import")
def data_import(
    name: Name,
    path: Annotated[Path, typer.Argument(metavar="PATH", help="An archive, an .npz file, or a folder.")],
) -> None:
    """Read a dataset from files into the cache: original archives, folders of classes, CSV, .npz."""
    from .data import ingest

    dataset = find(name)
    _say(dataset, _with_progress(lambda track: ingest.import_files(dataset, path, track)))


@data_app.command("verify")
def data_verify(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One dataset; without it, all at hand.")] = None,
) -> None:
    """Check every byte of the datasets in FEDHPRO_DATA and in the cache against its checksum, and their labels."""
    if any(name == row[0] for row in EMBEDDED):
        out.print(f"{name} is embedded: it is built from installed packages, and checked each time it is read")
        return
    chosen = [find(name)] if name else list(CATALOG.values())
    checked, wrong = 0, 0
    for dataset in chosen:
        try:
            found = _verified(dataset)
        except DataError as error:
            err.print(f"fedhpro: {escape(str(error))}", style="red", highlight=False, soft_wrap=True)
            wrong += 1
            continue
        if found:
            checked += 1
            out.print(found, highlight=False, soft_wrap=True)
    if wrong:
        raise typer.Exit(DataError.exit_code)
    if not checked:
        what = f"{chosen[0].name} is not" if name else "no dataset is"
        raise DataError(f"{what} in the cache: bring it there with `fedhpro data get` or `fedhpro data import`")


def _verified(dataset: Dataset) -> str | None:
    from .data import sources

    stored = _with_progress(lambda track: sources.stored(dataset, track))
    if stored is None:
        return None
    stored.check_sums()
    source = sources.load(dataset.name)
    for domain in source.domains:
        for split in (domain.train, domain.test):
            if len(split.x) != len(split.y) or not 0 <= int(split.y.min()) <= int(split.y.max()) < source.num_classes:
                raise DataError(f"{stored.folder}: {domain.name} has labels that do not fit: get or import it again")
    sizes = ", ".join(f"{domain.name} {len(domain.train):,} / {len(domain.test):,}" for domain in source.domains)
    return f"[green]ok[/] [bold]{dataset.name}[/]: {escape(sizes)} ({len(stored.manifest['files'])} files)"


def _at_hand(dataset: Dataset) -> tuple[int, int, str]:
    """Samples to train and to test on, and where they are; looks at names only."""
    from .data import importers, store

    given = os.environ.get("FEDHPRO_DATA")
    local = given is not None and importers.local_copy(Path(given), dataset) is not None
    folder = store.mirror_of(dataset.name) if local else store.folder_of(dataset.name)
    if not store.is_there(folder):
        where = "in FEDHPRO_DATA" if local else "can be fetched" if dataset.fetched else "import only"
        return *dataset.counts, where
    try:
        stored = store.read(folder)
    except DataError:
        return *dataset.counts, "in the cache, not usable: see `fedhpro data verify`"
    train, test = (sum(stored.samples(domain, split) for domain in stored.domains) for split in ("train", "test"))
    return train, test, "in FEDHPRO_DATA" if local else "in the cache"


def _with_progress(work: Callable[[Any], T]) -> T:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        return work(progress.track)


def _say(dataset: Dataset, stored: Any) -> None:
    for domain in stored.domains:
        train, test = (stored.samples(domain, split) for split in ("train", "test"))
        out.print(f"{domain}: {train:,} to train and {test:,} to test on", highlight=False)
        if len(stored.domains) == 1 and (train, test) != dataset.counts:  # of several domains, one may be a substitute
            whole, of_tests = dataset.counts
            err.print(f"the whole {dataset.title} has {whole:,} and {of_tests:,}", style="yellow", highlight=False)
    size = f"{stored.bytes / 2**20:,.0f} MiB"
    out.print(f"in the cache: {escape(str(stored.folder))} ({size})", highlight=False, soft_wrap=True)


@data_app.command("show")
def data_show(
    name: Annotated[str, typer.Argument(help="The source.")] = "digits-lite",
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="How it is split: scenario=nid1 alpha=0.2")
    ] = None,
    folder: Annotated[Path, typer.Option("--out", help="Where to write the pictures.")] = Path(),
) -> None:
    """What is in a source and who gets how much of it, with pictures of its images and of who holds what."""
    from .data import load
    from .federation import build_clients, load_source
    from .report.holdings import draw_holdings, holdings_table
    from .report.sheet import contact_sheet

    only_keys = "=" in name and ":" not in name
    config = configure(**parse([name if only_keys else f"data={name}", *(keys or [])]))
    source = load_source(config, load(config.data))
    clients = build_clients(config, source, config.build_method())
    kind = f"texts of {source.shape[0]} words" if source.vocab else f"images {'x'.join(map(str, source.shape))}"
    table = Table(title=f"{source.name}: {source.num_classes} classes, {kind}")
    for title in ("domain", "real", "train", "validation", "test"):
        table.add_column(title, justify="left" if title in ("domain", "real") else "right", no_wrap=True)
    for domain in source.domains:
        sizes = (f"{len(split):,}" for split in (domain.train, domain.validation, domain.test))
        table.add_row(domain.name, "yes" if domain.real else "no", *sizes)
    out.print(table)
    for domain in source.domains:
        out.print(f"{domain.name}: {domain.about}", highlight=False)
    out.print(holdings_table(clients, source.classes))
    if source.tokenizer is not None:
        split = source.domains[0].train
        for c, label in enumerate(source.classes):
            text = source.tokenizer.decode(split.x[split.y == c][0])
            out.print(f"[bold]{escape(label)}[/]: {escape(text[:200])} ...", highlight=False)
    pictures = {f"{source.name}-holdings.png": lambda path: draw_holdings(clients, source.classes, path)}
    if not source.vocab:
        pictures[f"{source.name}.png"] = lambda path: contact_sheet(source, path)
    for title, draw in pictures.items():
        try:
            draw(folder / title)
        except OSError as error:
            raise ConfigError(f"cannot write {folder / title}: {error.strerror or error}") from None
        out.print(f"wrote {folder / title}", highlight=False, soft_wrap=True)
