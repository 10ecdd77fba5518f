"""The command line: `fedhpro --help` lists it; data, deploy and reproduce have files of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import __version__
from .config import (
    PRESETS,
    USUAL,
    Config,
    configure,
    describe_type,
    method_keys,
    method_notes,
    method_types,
    names_and_keys,
    parse,
)
from .data_cli import bring, data_app
from .deploy.cli import deploy_app
from .errors import ConfigError, UserError
from .reproduce_cli import parse_seeds, reproduce, sweep, tell_about_keys

app = typer.Typer(
    name="fedhpro",
    help="Federated learning with hyper-prototypes.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.command()(reproduce)
app.command()(sweep)
app.add_typer(data_app, name="data")
app.add_typer(deploy_app, name="deploy")

out, err = Console(), Console(stderr=True)

Keys = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Any key of the config.", show_default=False)
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only the result.", rich_help_panel="Output")]
Json = Annotated[bool, typer.Option("--json", help="Only the result, as JSON.", rich_help_panel="Output")]
Track = Annotated[
    str,
    typer.Option(help="tensorboard, mlflow, wandb, with commas between them.", rich_help_panel="Output"),
]


@app.command()
def run(
    keys: Keys = None,
    method: Annotated[
        str | None,
        typer.Option(help="As `fedhpro methods` lists them. \\[default: fedhpro-plus]", rich_help_panel="What"),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="The data source. \\[default: digits-lite]", rich_help_panel="What")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(help="paper, released or plus: of the paper, of its code, our own.", rich_help_panel="What"),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Communication rounds. \\[default: 15]", rich_help_panel="How")
    ] = None,
    local_epochs: Annotated[
        int | None, typer.Option(help="Epochs of a client in a round. \\[default: 5]", rich_help_panel="How")
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate of the clients. \\[default: 0.03]", rich_help_panel="How")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Same seed, same numbers. \\[default: 0]", rich_help_panel="How")
    ] = None,
    out_folder: Annotated[
        Path | None,
        typer.Option("--out", help="Run folder. \\[default: a new one under runs/]", rich_help_panel="Output"),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
    track: Track = "",
    list_keys: Annotated[
        bool, typer.Option("--keys", help="List every key with its default, and exit.", rich_help_panel="Output")
    ] = False,
) -> None:
    """Train one classifier over the clients of a federation.

    Without any option: fedhpro-plus on the embedded data on this machine's CPU. Everything else is KEY=VALUE:
    [cyan]fedhpro run method=fedhpro M=0 scenario=nid1 alpha=0.2[/].
    """
    options: dict[str, Any] = {"method": method, "data": data, "preset": preset, "rounds": rounds}
    options |= {"local_epochs": local_epochs, "lr": lr, "seed": seed, "out": out_folder}
    given = {
        name: str(value) if isinstance(value, Path) else value for name, value in options.items() if value is not None
    }
    keyed = parse(keys or [])
    if twice := sorted(given.keys() & keyed.keys()):
        raise ConfigError(f"{twice[0]} is given twice")
    settings = given | keyed
    if list_keys:
        _print_keys(configure(**settings))
        return
    config = configure(**settings)
    tell_about_keys([settings])
    _train(config, quiet, as_json, track)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="The run folder.")],
    keys: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="As --set.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="What may change: rounds=200, workers, ...")
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
    track: Track = "",
) -> None:
    """Go on with an interrupted run, to the same numbers as if nothing had happened."""
    from . import runs

    changes, callbacks = parse([*(keys or []), *(settings or [])]), _callbacks(quiet, as_json, track)
    before = 0  # rounds of a finished run
    with contextlib.suppress(OSError, ValueError, UserError):  # what is wrong with the folder is told below
        there = runs.load_result(folder)
        before = len(there.history) if there.status == "finished" else 0
    result = runs.resume(folder, callbacks=callbacks, **changes)
    _finish(result, quiet, as_json)
    if before == len(result.history):
        longer = f": `fedhpro resume {folder} rounds={2 * before}` goes on with it"
        if result.config.lr_schedule == "cosine":
            longer = ", and its cosine schedule of lr has come to its end"
        _warn(f"all of its rounds had been done before{longer}")


@app.command()
def compare(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="METHOD... [KEY=VALUE]...",
            help="Methods, each maybe with settings of its own (fedhpro:M=0,I=1), then keys for all.",
            show_default=False,
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="The nine methods of the paper.")] = False,
    seeds: Annotated[str, typer.Option(help="Comma-separated seeds.")] = "0",
    control: Annotated[
        bool, typer.Option(help="Beside FedHPro, its control with frozen hyper-prototypes (M=0).")
    ] = True,
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="Folder of all runs. \\[default: a new one under runs/]")
    ] = None,
    parallel: Annotated[int, typer.Option(min=1, help="Runs at once, each in a process of its own.")] = 1,
    quiet: Quiet = False,
    as_json: Json = False,
    track: Track = "",
) -> None:
    """Run the same federation with several methods and seeds: one table of means and standard deviations.

    The same command with the same --out goes on where it was interrupted.
    """
    from . import comparison, runs

    names, common = names_and_keys(arguments or [])
    names = [*(comparison.ALL if everything else ()), *names]
    if not names:
        raise ConfigError("name at least one method, or give --all")
    for name in ("method", "seed", "out"):
        if name in common:
            raise ConfigError(f"{name} is not a key here: methods and --seeds and --out say it")
    if out_folder is not None:
        common["out"] = str(out_folder)
    if track and parallel > 1:
        raise ConfigError("--track goes with one run at a time: give it without --parallel")
    rows, chosen = comparison.entries(names, common, control), parse_seeds(seeds)
    configs = [configure(**(common | row.keys | {"seed": seed})) for seed in chosen for row in rows]
    comparison.check(configs)
    tell_about_keys(common | row.keys for row in rows)

    def start(config: Config, title: str) -> runs.Result:
        if not (quiet or as_json):
            out.rule(escape(title), align="left")
        return runs.run_or_resume(config, callbacks=_callbacks(quiet, as_json, track))

    _callbacks(quiet, as_json, track)  # what is wrong with them shows before anything is fetched
    for data in dict.fromkeys(config.data for config in configs):
        bring(data)

    def say(config: Config, status: str) -> None:
        _say(f"{config.out}: {status}", err)

    found = comparison.compare(rows, chosen, common, start, parallel, say)
    found.save()
    if as_json:
        print(json.dumps(found.rows(), indent=2))
    else:
        out.print(comparison.table(found))
        written = ("report.html", "comparison.md", "comparison.json", "curves.png")
        files = ", ".join(name for name in written if (found.folder / name).exists())
        _say(f"saved in {found.folder}: {files}")
    if found.finished < (wanted := len(rows) * len(found.seeds)):
        _say(
            f"{'some runs failed' if found.whole else 'interrupted'}: {found.finished} of {wanted} are finished, "
            f"and the table has only these; the same command with --out {found.folder} goes on",
            err,
        )
        raise typer.Exit(1 if found.whole else 130)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders of run folders.")],
    out_file: Annotated[
        Path | None,
        typer.Option("--out", help="The page. \\[default: report.html, in the folder where one is named]"),
    ] = None,
    tsne: Annotated[bool, typer.Option(help="A t-SNE of the features of each setting: some seconds.")] = True,
    open_it: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """One self-contained HTML page of a run, or of several side by side."""
    from .report.page import write_report

    target = out_file or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    for problem in write_report(folders, target, tsne=tsne):
        _warn(f"left out: {problem}")
    _say(f"wrote {target}")
    if open_it:
        typer.launch(str(target.resolve()))


@app.command()
def watch(
    folder: Annotated[Path, typer.Argument(help="The run folder.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 0,
) -> None:
    """The report of a run while it goes on, in the browser, on this machine only. Ctrl-C ends it."""
    from .report.serve import watch as serve

    serve(folder, port, lambda address: _say(f"{folder} at {address} (Ctrl-C ends this)"))


@app.command()
def costs(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[METHOD]... [KEY=VALUE]...",
            help="Methods, each maybe with settings of its own (fedhpro:uplink=probabilities), then keys for all.",
            show_default=False,
        ),
    ] = None,
    measure: Annotated[int, typer.Option(min=0, help="Also run so many rounds of each, in turns, for seconds.")] = 0,
    as_json: Json = False,
) -> None:
    """What a round costs with each method: values and bytes sent, FLOPs, seconds (the paper's Table 4).

    On Digits with the paper's settings where that data is at hand, else on digits-lite with the main job's.
    """
    from . import costs as table_4
    from .comparison import ALL, entries

    names, keys = names_and_keys(arguments or [])
    if "method" in keys:
        raise ConfigError("method is not a key here: name the methods, as in `fedhpro costs fedavg fedhpro`")
    names, keys = names or [*ALL, USUAL], table_4.usual_keys(keys) | keys
    config = configure(**(keys | entries(names, keys, control=False)[0].keys))
    bring(config.data)
    rows = table_4.costs(keys, names, measure)
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    title = f"a round of all clients on {config.data} with {config.model}, E={config.local_epochs}"
    out.print(table_4.table(rows, f"{title}; ratios are to {names[0]}"))


@app.command()
def heads(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders with a global model.")],
    as_json: Json = False,
) -> None:
    """Other classifiers on a run's features, without training: is it the features that limit it, or the classifier?

    Test sets are those of the domains, or with evaluation=federated what each client holds out.
    """
    from .heads import NAMES
    from .heads import heads as measured

    found = {str(folder): measured(folder) for folder in folders}
    if as_json:
        print(json.dumps(found, indent=2))
        return
    table = Table("accuracy, mean of the test sets, %", box=None)
    for folder in folders:
        table.add_column(escape(folder.name), justify="right")
    for name, words in NAMES.items():
        table.add_row(words, *(f"{each[name]:.2f}" for each in found.values()))
    out.print(table)


@app.command()
def predict(
    folder: Annotated[Path, typer.Argument(help="The run folder.")],
    files: Annotated[
        list[Path], typer.Argument(help="Images, folders of images, or CSV files; for texts .txt or CSV files.")
    ],
    top: Annotated[int, typer.Option(min=1, help="Classes to show for each.")] = 3,
    as_json: Json = False,
) -> None:
    """Classify images or texts with a trained model: classes and probabilities."""
    from . import use

    for found in use.predict(folder, files, top=top):
        if as_json:
            print(json.dumps(dataclasses.asdict(found)))
        else:
            ranking = "  ".join(f"{name} {p:.3f}" for name, p in found.probabilities.items())
            out.print(
                f"{escape(found.name)}  [bold green]{escape(found.label)}[/]  {escape(ranking)}",
                highlight=False,
                soft_wrap=True,
            )


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="The run folder.")],
    format: Annotated[
        str | None,
        typer.Option(help="safetensors, torchscript, torch-export or onnx. \\[default: by the file, or safetensors]"),
    ] = None,
    out_file: Annotated[Path | None, typer.Option("--out", help="The file. \\[default: in the run folder]")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace the file if it exists.")] = False,
) -> None:
    """Write a trained model for other programs, and check the file against the model."""
    from . import use

    _say(f"wrote {use.export(folder, out_file, format, overwrite=overwrite)}")


@app.command()
def methods(name: Annotated[str | None, typer.Argument(help="One method, in detail.")] = None) -> None:
    """List the methods, or show one with its hyper-parameters."""
    from .methods import METHODS

    if name is None:
        table = Table(box=None)
        table.add_column("method", style="bold")
        table.add_column("what it is")
        for key, method in METHODS.items():
            table.add_row(key, _about(method) + " The default." * (key == USUAL))
        out.print(table)
        return
    from .facts import rehearse

    configure(method=name)  # says which name is closest
    out.print(f"[bold]{name}[/]: {escape(_about(METHODS[name]))}", soft_wrap=True)
    out.print(f"exchange: {' or '.join(METHODS[name].exchanges)}", highlight=False)
    table = Table(title="hyper-parameters", box=None, title_justify="left")
    for title in ("key", "default", "allowed", "meaning"):
        table.add_column(title)
    types, notes = method_types(name), method_notes(name)
    for key, default in method_keys(name).items():
        table.add_row(key, str(default), describe_type(types[key]), escape(notes[key]))
    if types:
        out.print(table)
    table = Table(
        title="what travels and what is kept, for C=10 classes, d=512 features", box=None, title_justify="left"
    )
    for title in ("where", "what", "shape", "bytes"):
        table.add_column(title, justify="right" if title == "bytes" else "left")
    for fact in rehearse(name):
        table.add_row(fact.where, fact.name, fact.shape, f"{fact.bytes:,}")
    out.print(table)


@app.command()
def bench(
    what: Annotated[str, typer.Argument(help="cpu, gpu, growth, rounds, batches or all.")] = "cpu",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repetitions.")] = False,
    out_folder: Annotated[Path, typer.Option("--out", help="Where JSON and plots go.")] = Path("benchmarks/results"),
) -> None:
    """Measure speed on this machine; cpu is beside other frameworks, which it installs into the cache."""
    from .bench import run

    run(what, quick, out_folder, out)


def _train(config: Config, quiet: bool, as_json: bool, track: str = "") -> None:
    from . import runs

    callbacks = _callbacks(quiet, as_json, track)
    bring(config.data)
    _finish(runs.run(config, callbacks=callbacks), quiet, as_json)


def _callbacks(quiet: bool, as_json: bool, track: str = "") -> list[Any]:
    from .progress import Terminal
    from .trackers import trackers

    return [*trackers(track), *([] if quiet or as_json else [Terminal(out)])]


def _finish(result: Any, quiet: bool, as_json: bool) -> None:
    from .progress import cost_lines, result_table, trouble

    if not result.history:
        _say(f"interrupted before the first round was done: nothing to show; {result.folder} can be resumed", err)
        raise typer.Exit(130)
    if as_json:
        print((result.folder / "result.json").read_text(encoding="utf-8"), end="")
    elif quiet and not result.accuracy:
        print(f"no round was evaluated  {result.folder}")
    elif quiet:
        found = result.headline
        print(f"AVG {found['final']:.2f}  best {found['best']:.2f}  last5 {found['last5']:.2f}  {result.folder}")
    else:
        out.print(result_table(result) if result.accuracy else "no round was evaluated")
        for line in cost_lines(result):
            _say(line)
        _say(f"run folder: {result.folder}")
        files = [
            name
            for name in ("report.html", "holdings.png", "curves.png", "MODEL_CARD.md", "model.safetensors")
            if (result.folder / name).exists()
        ]
        hint = f"; try: fedhpro predict {result.folder} FILES" if "model.safetensors" in files else ""
        _say(f"  {', '.join(files)}{hint}")
    if (sentence := trouble(result)) is not None:
        _warn(sentence)
    if result.status == "interrupted":
        last = result.history[-1]["round"]
        _say(f"interrupted after round {last}: go on with `fedhpro resume {result.folder}`", err)
        raise typer.Exit(130)


def _say(sentence: str, console: Console = out, style: str | None = None) -> None:
    """As it is: a path is neither markup nor broken into lines."""
    console.print(sentence, style=style, markup=False, highlight=False, soft_wrap=True)


def _warn(sentence: str) -> None:
    _say(sentence, err, "yellow")


def _print_keys(config: Config) -> None:
    table = Table(title=f"keys of a run with method {config.method}", box=None)
    for title in ("key", "value", "allowed", "meaning"):
        table.add_column(title, no_wrap=title == "key", overflow="fold")
    for name, field in Config.model_fields.items():
        if name != "parameters":
            table.add_row(name, str(getattr(config, name)), describe_type(field.annotation), field.description)
    table.add_section()
    types, notes = method_types(config.method), method_notes(config.method)
    for name, value in config.parameters.items():
        table.add_row(name, str(value), describe_type(types[name]), escape(notes[name]))
    table.add_row("preset", "", "|".join(PRESETS), "sets method, training, model and partition keys together")
    out.print(table)


def _about(method: type) -> str:
    """The title line of the method's paper: first line of its class or of its file."""
    own = method.__doc__ if method.__doc__ and not method.__doc__.startswith(f"{method.__name__}(") else None
    module = inspect.getmodule(method)
    return (own or (module.__doc__ if module else None) or "").strip().splitlines()[0]


def version(value: bool) -> None:
    if value:
        print(f"fedhpro {__version__}")
        raise typer.Exit()


@app.callback()
def main_options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="The version.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point: every mistake of a user ends in one sentence and exit code 2, never in a traceback."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a run that is told to stop ends as after Ctrl-C
    try:
        app(args=list(arguments) if arguments is not None else None)
    except UserError as error:
        _say(f"fedhpro: {error}", err, "red")
        sys.exit(error.exit_code)
    except OSError as error:  # a path that this user may not read, or that no file can have
        place = "" if error.filename is None else f"{error.filename}: "
        _say(f"fedhpro: {place}{error.strerror or error}", err, "red")
        sys.exit(UserError.exit_code)
