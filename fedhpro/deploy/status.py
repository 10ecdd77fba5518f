"""The state of a deployment: certificates, nodes, runs, and the last round that the server wrote down."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from .control import Control
from .folder import DeployError, Deployment

SOON = 30  # days before its end that a certificate is shown in yellow
COLOURS = {"online": "green", "offline": "yellow", "revoked": "red", "not registered": "red"}


def state(deployment: Deployment) -> dict[str, Any]:
    """Everything, also where the server does not answer."""
    found: dict[str, Any] = {"server": deployment.address, "expires_in_days": deployment.expiry()}
    try:
        with Control(deployment) as control:
            found["nodes"] = [asdict(node) for node in control.nodes()]
            found["runs"] = [asdict(run) for run in control.runs()]
    except DeployError as error:
        found |= {"problem": str(error), "nodes": [], "runs": []}
    return found | {"round": last_round(deployment)}


def last_round(deployment: Deployment) -> dict[str, Any] | None:
    """What the server wrote down last of the last run, where its folder is on this machine."""
    from ..runs import RunFolder  # which brings torch along

    folder = deployment.server / (deployment.run_folder or "none")
    records = RunFolder(folder).records()
    return {"folder": str(folder), **records[-1]} if records else None


def view(found: dict[str, Any]) -> RenderableType:
    parts: list[RenderableType] = [
        f"server [bold]{escape(found['server'])}[/]",
        *expiry_lines(found["expires_in_days"]),
    ]
    if "problem" in found:
        parts.append(f"[red]{escape(found['problem'])}[/]")
    if found["nodes"]:
        nodes = Table(box=None, pad_edge=False)
        for title in ("node", "state", "since"):
            nodes.add_column(title)
        for node in found["nodes"]:
            nodes.add_row(
                node["name"], f"[{COLOURS.get(node['status'], 'blue')}]{node['status']}[/]", node["since"][:19]
            )
        parts.append(nodes)
    if found["runs"]:
        runs = Table(box=None, pad_edge=False)  # all in 80 columns
        runs.add_column("run", no_wrap=True)  # to be copied
        for title in ("state", "started", "sent, MB", "back, MB"):
            runs.add_column(title, overflow="fold")
        for run in found["runs"]:
            traffic = f"{run['bytes_down'] / 1e6:,.1f}", f"{run['bytes_up'] / 1e6:,.1f}"
            runs.add_row(str(run["id"]), escape(run["status"]), run["started"][:16].replace("T", " "), *traffic)
        parts.append(runs)
        parts += [escape(f"run {run['id']}: {run['details']}") for run in found["runs"] if run["details"]]
    if (last := found["round"]) is not None:
        score = f", AVG {last['accuracy']['AVG']:.2f}" if "accuracy" in last else ""
        refused = "".join(f"\n  refused: client {r['client']}: {r['reason']}" for r in last["refused"])
        parts.append(f"round {last['round']}: {len(last['clients'])} clients{score}{escape(refused)}\n{last['folder']}")
    return Group(*parts)


def expiry_lines(days: dict[str, float]) -> list[str]:
    lines = []
    for name, left in days.items():
        style = "red" if left < 0 else "yellow" if left < SOON else "default"
        when = f"expired {-left:.0f} days ago" if left < 0 else f"ends in {left:,.0f} days"
        lines.append(f"[{style}]certificate of {name}: {when}[/]")
    return lines
