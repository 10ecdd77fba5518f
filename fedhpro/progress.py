"""A run on the terminal: live progress while it goes on, a table at its end. Plain lines where there is no terminal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from .callbacks import Callback
from .evaluation import AVG, differs, headline

if TYPE_CHECKING:
    from .federation import Federation
    from .runs import Result

SHOWN_ROUNDS = 10


class Terminal(Callback):
    def __init__(self, console: Console) -> None:
        self.console = console
        self.live: Live | None = None

    def start(self, federation: Federation, result: Result) -> None:
        config, clients = federation.config, federation.clients
        self.history = list(result.history)
        domains: dict[str, int] = {}
        for client in clients:
            domains[client.domain] = domains.get(client.domain, 0) + 1
        who = ", ".join(f"{count} {name}" for name, count in sorted(domains.items()))
        parameters = sum(p.numel() for p in federation.net.parameters())
        of_epochs = _count(config.local_epochs, "epoch")
        steps = of_epochs if config.local_steps is None else _count(config.local_steps, "step")
        self.console.print(
            f"[bold]{config.method}[/] on {escape(config.data)}: {_count(len(clients), 'client')} "
            f"({escape(who)}), {sum(federation.sizes):,} training samples, "
            f"{config.model} with {parameters:,} parameters, "
            f"{_count(config.rounds, 'round')} of {steps}, seed {config.seed}",
            highlight=False,
            soft_wrap=True,
        )
        self.started = time.perf_counter()
        self.first = federation.round
        if not self.console.is_terminal:
            return
        self.bars = Progress(
            TextColumn("{task.description:>8}"), BarColumn(bar_width=40), MofNCompleteColumn(),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(elapsed_when_finished=True),
            console=self.console, speed_estimate_period=600,
        )  # fmt: skip
        self.rounds = self.bars.add_task("rounds", total=config.rounds, completed=federation.round)
        self.clients = self.bars.add_task("clients", total=len(clients))
        self.live = Live(self._view(), console=self.console, refresh_per_second=4, transient=True)
        self.live.start()

    def client(self, round: int, done: int, total: int) -> None:
        if self.live:
            self.bars.update(self.clients, completed=done, total=total)

    def round(self, record: dict[str, Any]) -> None:
        self.history.append(record)
        for sentence in warnings(record):  # as they are: a client's words must not be taken for markup
            console = self.live.console if self.live else self.console
            console.print(
                f"round {record['round']}: {sentence}", style="yellow", markup=False, highlight=False, soft_wrap=True
            )
        if self.live:
            self.bars.update(self.rounds, completed=record["round"])
            self.live.update(self._view())
        else:
            seconds = (time.perf_counter() - self.started) / (record["round"] - self.first)
            line = f"{_line(record)}  {seconds:.1f} s a round"
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def end(self, result: Result) -> None:
        if self.live:
            self.live.stop()
            self.live = None

    def _view(self) -> Group:
        return Group(rounds_table(self.history[-SHOWN_ROUNDS:]), self.bars)


def rounds_table(history: list[dict[str, Any]]) -> Table:
    """The last rounds: accuracies, loss terms, and what the server says of itself."""
    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column("round", justify="right")
    groups = ("accuracy", "loss", "server", "privacy")
    keys = [(group, key) for group in groups for key in dict.fromkeys(k for r in history for k in r.get(group, {}))]
    keys = [(group, key) for group, key in keys if not key.endswith("_start")]
    for group, key in keys:
        styles = {"accuracy": "cyan", "loss": "magenta", "server": "yellow", "privacy": "red"}
        table.add_column(escape(key), justify="right", style="green" if key == AVG else styles[group])
    for record in history:
        cells = [_number(group, record.get(group, {}).get(key)) for group, key in keys]
        table.add_row(str(record["round"]), *cells)
    return table


def result_table(result: Result) -> Table:
    """final, best and mean of the last five, per domain and on average."""
    table = Table(
        title=f"accuracy in %, {result.config.split} sets" if _central(result) else "accuracy in %, held-out samples"
    )
    table.add_column("")
    keys = list(result.accuracy)
    for key in keys:
        table.add_column(escape(key), justify="right", style="bold green" if key == AVG else "")
    best = result.headline.get("best_round")
    at_best = next((record["accuracy"] for record in result.history if record["round"] == best), result.accuracy)
    table.add_row("final round", *(f"{result.accuracy[key]:.2f}" for key in keys))
    table.add_row(f"best round ({best})", *(f"{at_best[key]:.2f}" for key in keys))
    table.add_row("mean of last five", *(f"{headline(result.history, key)['last5']:.2f}" for key in keys))
    balanced = {key: headline(result.history, key, "balanced").get("final") for key in keys}
    if any(differs(value, result.accuracy[key]) for key, value in balanced.items()):
        cells = ("-" if value is None else f"{value:.2f}" for value in balanced.values())
        table.add_row("final, mean of classes", *cells)  # test sets whose classes differ in size
    return table


def cost_lines(result: Result) -> list[str]:
    """Bytes and FLOPs; then seconds by phase and peak memory. costs.json has the details."""
    costs, history = result.costs, result.history
    taking_part = max(1, sum(len(record["clients"]) for record in history))
    down, up = (sum(record[name] for record in history) / taking_part / 1e6 for name in ("bytes_down", "bytes_up"))
    flops = costs.get("flops", {})
    counted = ", ".join(f"{name} {flops[name]:.3g}" for name in flops if name not in ("step", "error"))
    seconds = ", ".join(f"{name} {value:.1f}" for name, value in costs.get("seconds", {}).items() if value >= 0.05)
    memory = ", ".join(f"{name.replace('_', ' ')} {value:,.0f}" for name, value in costs.get("peak_mb", {}).items())
    return [
        f"per client and round {down:.3g} MB down, {up:.3g} MB up; FLOPs: {counted or 'not counted'}",
        f"seconds: {seconds}; peak MB: {memory}",
    ]


def trouble(result: Result) -> str | None:
    """One sentence where uploads were refused: a diverged run must not pass for a finished one."""
    refused = sum(len(record["refused"]) for record in result.history)
    idle = sum(not record["aggregated"] for record in result.history)
    if not refused and not idle:
        return None
    sent = sum(len(record["clients"]) for record in result.history)
    hint = ""
    reasons = [refusal["reason"] for record in result.history for refusal in record["refused"]]
    if any("has values" in reason for reason in reasons):  # that are not finite, or huge
        hint = f": training diverged; try a smaller lr than {result.config.lr}"
    return f"{refused} of {_count(sent, 'upload')} were refused, and {_count(idle, 'round')} changed nothing{hint}"


def warnings(record: dict[str, Any]) -> list[str]:
    found = []
    if refused := record["refused"]:
        kept = "" if record["aggregated"] else f"; the model stays as it was: {record['not_aggregated']}"
        found.append(f"refused client {refused[0]['client']}: {refused[0]['reason']}{_and_more(refused)}{kept}")
    elif not record["aggregated"]:
        found.append(f"the model stays as it was: {record['not_aggregated']}")
    elif (losses := record.get("loss")) and not any(losses.values()):
        found.append(
            "nothing was learned, every loss is 0: where each client holds a single class, balanced cross-entropy "
            "(with fedhpro-plus, or balanced=true) has nothing to tell apart; method=fedavg balanced=false has"
        )
    if restarted := record.get("restarted"):
        what = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in restarted[0].items())
        found.append(f"a worker process ended and was replaced ({what}){_and_more(restarted)}")
    if untested := record.get("untested"):
        first = f"client {untested[0]['client']} on {untested[0]['test']}"
        found.append(f"testing {first} failed, which the accuracies leave out{_and_more(untested)}")
    return found


def _and_more(things: list[Any]) -> str:
    return f", and {len(things) - 1} more" if len(things) > 1 else ""


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _central(result: Result) -> bool:
    return result.config.evaluation != "federated"


def _line(record: dict[str, Any]) -> str:
    parts = [f"round {record['round']:>3}"]
    parts += [f"{key} {value:.1f}" for key, value in record.get("accuracy", {}).items()]
    parts += [f"{key} {value:.3g}" for key, value in record.get("loss", {}).items() if value]  # 0: not there
    parts += [f"{key} {value:.2g}" for key, value in record["server"].items() if not key.endswith("_start")]
    parts += [f"epsilon {record['privacy']['epsilon']:.2f}"] if "privacy" in record else []
    return "  ".join(parts)


def _number(group: str, value: float | None) -> str:
    if value is None or (group == "loss" and value == 0):
        return "-"
    return f"{value:.1f}" if group == "accuracy" else f"{value:.3g}"
