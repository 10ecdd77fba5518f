"""MODEL_CARD.md: what a run's model is, what it was trained on, how good it is, and what it is not for."""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from . import models
from .data.sources import SITES
from .errors import ConfigError, RunError
from .evaluation import AVG
from .files import write_atomically
from .methods import METHODS

Facts = dict[str, Any]
Rows = Iterable[tuple[str, Any]]

SCENARIOS = {
    "domains": "domain skew: each client holds samples of one domain only",
    "iid": "equal random shares",
    "nid1": "label skew: the classes are spread over the clients by a Dirichlet distribution",
    "nid1-equalised": "label skew by a Dirichlet distribution, with equally many samples for each client",
    "nid2": "label skew: all clients but one hold few of the classes",
    "shards": "label skew: each client holds a few shards of single classes",
    "ag-nid": "label skew: some clients hold two of the classes, the others all",
}
TRAINING = ["rounds", "participation", "local_epochs", "local_steps", "batch_size", "weights"]
TRAINING += ["optimizer", "lr", "lr_schedule", "lr_decay", "momentum", "weight_decay", "balanced", "nearest"]
TRAINING += ["precision"]
OF_THE_MACHINE = {"out", "workers", "engine", "checkpoint_every", "keep_checkpoints"}
LISTED_CLASSES = 20
POOLED = "All samples were brought to one place."
KEPT = (
    "Samples did not leave the clients. What they sent instead, models and what the method reports, can still "
    "reveal something about the samples: this card claims no protection beyond that."
)
MEANS = (
    "model.safetensors holds the class means of single clients (`nearest`): whoever has the file has them, and the "
    "mean of few samples tells much about these."
)
VOCABULARY = "The vocabulary does hold words of the clients' texts: it was counted over all of them in one place."


def write_card(run: str | Path) -> Path:
    """Write MODEL_CARD.md from the other files of a run folder; whatever they leave out, the card leaves out."""
    run = Path(run)
    if not run.is_dir():
        raise RunError(f"there is no run folder {run}: give one that `fedhpro run` wrote")
    about, result = (_read(run / name, json.loads) for name in ("model.json", "result.json"))
    config = _read(run / "config.toml", tomllib.loads)
    if not (about or result or config):
        raise RunError(f"{run} is not a run folder: give one that `fedhpro run` wrote")
    facts = config | result
    facts["kind"] = about.get("kind", "text" if config.get("model") == "textcnn" else "image")
    sections = {
        "What it is": _model(about, facts),
        "Data": _data(config, result, facts["kind"]),
        "Accuracy": _accuracy(config, result),
        "Training": _training(config, result),
        "What left the clients": _traffic(config, facts, result),
        "Intended use and limits": _limits(facts, result),
        "How to use it": _usage(run, about),
        "Run it again": _again(config, result),
    }
    written = [f"## {name}\n\n{text}\n" for name, text in sections.items() if text]
    path = run / "MODEL_CARD.md"
    write_atomically(path, "\n".join([f"# Model card: {_title(about, facts)}\n", *written]))
    return path


def _read(path: Path, parse: Callable[[str], Any]) -> Facts:
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read, so there is no model card: {error}") from None
    return content if isinstance(content, dict) else {}


def _title(about: Facts, facts: Facts) -> str:
    network = about.get("model", {}).get("name") or facts.get("model") or "a model"
    parts = [
        network,
        f"trained by {facts['method']}" if "method" in facts else "",
        f"on {facts['data']}" if "data" in facts else "",
    ]
    return _cell(" ".join(part for part in parts if part))


def _model(about: Facts, facts: Facts) -> str:
    if not about:
        return "This run has no global model: its models stay with the clients, and the accuracies are theirs."
    model, classes, shape = about.get("model", {}), about.get("classes", []), about.get("shape")
    more = f" and {len(classes) - LISTED_CLASSES} more" if len(classes) > LISTED_CLASSES else ""
    settings = ", ".join(f"{name} {model[name]}" for name in ("width", "dim", "stem") if model.get(name))
    rows = [
        ("method", facts.get("method")),
        ("network", f"{model['name']}{settings and f' ({settings})'}" if "name" in model else None),
        ("parameters", _parameters(model)),
        ("classes", f"{len(classes)}: {', '.join(map(str, classes[:LISTED_CLASSES]))}{more}" if classes else None),
        ("input", _input(facts["kind"], shape) if shape else None),
        ("vocabulary", f"{model['vocab']:,} token ids, see tokenizer.json" if model.get("vocab") else None),
        ("output", "a probability for each class" if classes else None),
        ("sha256 of model.safetensors", about.get("sha256")),
    ]
    early = facts.get("status", "finished") != "finished"
    note = f"\n\nThe run is {facts['status']}: this is the model of round {facts.get('rounds')}." if early else ""
    return _table(("", ""), rows) + note


def _input(kind: str, shape: list[int]) -> str:
    if kind == "text":
        return f"texts as {' x '.join(map(str, shape))} token ids: longer ones are cut, shorter ones padded with 0"
    return f"images {' x '.join(map(str, shape))} (channels, height, width), 0 to 255"


def _parameters(model: Facts) -> str | None:
    try:
        return f"{sum(p.numel() for p in models.build(**model).parameters()):,}"
    except (TypeError, ValueError):  # a model of another version
        return None


def _data(config: Facts, result: Facts, kind: str) -> str:
    scenario, skewed = config.get("scenario"), str(config.get("scenario")).startswith("nid1")
    rows = [
        ("data", result.get("data", config.get("data"))),
        ("split over the clients", SCENARIOS.get(str(scenario), scenario)),
        ("alpha of the Dirichlet distribution", config.get("alpha") if skewed else None),
        ("long tail, largest class over smallest", None if config.get("rho") == "none" else config.get("rho")),
        ("clients", result.get("clients", None if scenario == "domains" else config.get("clients"))),
        ("training samples of all clients", result.get("samples")),
        ("augmentation", config.get("augment") if kind == "image" else None),
        ("held out by each client", config.get("held_out") if _asks(config, "federated") else None),
    ]
    return _table(("", ""), rows)


def _asks(config: Facts, evaluation: str) -> bool:
    return config.get("evaluation") in (evaluation, "both")


def _accuracy(config: Facts, result: Facts) -> str:
    final, domains, federated = (result.get(name) or {} for name in ("final", "accuracy", "federated"))
    central = any(name != AVG for name in domains)
    split = f"the server's {config.get('split', 'test')} sets"
    what = "federated: the mean of the clients' held-out accuracies"
    if central:
        what = f"central: the unweighted mean of the domains on {split}"
    best = f"best round ({final.get('best_round', '?')}); chosen by this same accuracy, hence optimistic"
    headline = [
        ("final: after the last round", _per_cent(final.get("final"))),
        (f"best: {best}", _per_cent(final.get("best"))),
        ("last5: mean of the last five evaluations", _per_cent(final.get("last5"))),
    ]
    where = f"central, on {split}, after the last evaluated round"
    own = [
        ("mean over the clients", _per_cent(federated.get("mean"))),
        ("weighted by their samples", _per_cent(federated.get("weighted"))),
        ("worst client", _per_cent(federated.get("worst"))),
    ]
    per_domain = [(name, _per_cent(value)) for name, value in domains.items()] if central else []
    tables = [
        _table((f"AVG accuracy, {what}", "per cent"), headline),
        _table((f"per domain: {where}", "per cent"), per_domain),
        _table(("federated: on what each client holds out", "per cent"), own),
    ]
    return "\n\n".join(table for table in tables if table)


def _training(config: Facts, result: Facts) -> str:
    by_steps = config.get("local_steps", "none") != "none"
    unused = {"local_epochs" if by_steps else "local_steps"}
    unused |= {"lr_decay"} if config.get("lr_schedule") != "exponential" else set()
    unused |= {"momentum"} if config.get("optimizer") == "adam" else set()
    keys = [name for name in (*TRAINING, *_method_keys(config)) if name in config.keys() - unused]
    rows = [(f"`{name}`", config[name]) for name in keys]
    rows += [("seconds", result.get("seconds")), ("uploads refused", result.get("refused"))]
    return _table(("setting", "value"), rows)


def _method_keys(config: Facts) -> list[str]:
    from .config import method_keys

    return list(method_keys(config["method"])) if config.get("method") in METHODS else []


def _traffic(config: Facts, facts: Facts, result: Facts) -> str:
    samples = POOLED if _pools_data(facts) else KEPT
    if privacy := result.get("privacy"):
        samples = (
            "Samples did not leave the clients. What left was protected by client-level differential privacy with "
            f"{config.get('privacy')} noise: epsilon = {privacy['epsilon']:g} at delta = {config.get('delta')}."
        )
        if config.get("data") != SITES:
            samples += " This was a simulation, whose noise can be drawn again from its seed: it protects nobody."
    rows = [
        ("sent by the clients, all rounds", _bytes(result.get("bytes_up"))),
        ("received by the clients, all rounds", _bytes(result.get("bytes_down"))),
    ]
    held = [
        MEANS if config.get("nearest") else "",
        VOCABULARY if facts["kind"] == "text" and not _pools_data(facts) else "",
    ]
    return "\n\n".join(part for part in (_table(("", ""), rows), samples, *held) if part)


def _pools_data(facts: Facts) -> bool:
    return bool(getattr(METHODS.get(str(facts.get("method"))), "pools_data", False))


def _limits(facts: Facts, result: Facts) -> str:
    data, kind = _cell(facts.get("data", "the data of this run")), facts["kind"]
    how = "centrally, on the pooled samples" if _pools_data(facts) else "by federated learning"
    domains = {name: value for name, value in (result.get("accuracy") or {}).items() if name != AVG}
    points = [
        f"For research on federated learning, and for {kind}s like those it was trained on.",
        f"Trained {how} on {data} only: on other {kind}s its accuracy is unknown.",
        "Not validated for clinical, financial or any safety-relevant use.",
        f"Its probabilities are not calibrated, and it gives one of its classes to any {kind}, fitting or not.",
    ]
    if domains:
        worst = min(domains, key=lambda name: domains[name])
        points.append(
            f"Accuracies are per domain; the worst is {_cell(worst)}, at {_per_cent(domains[worst])} per cent."
        )
    else:
        points.append("Accuracies per domain were not measured.")
    return "\n".join(f"- {point}" for point in points)


def _usage(run: Path, about: Facts) -> str:
    if not about:
        return ""
    folder, sample = shlex.quote(str(run)), "TEXTS.txt" if about.get("kind") == "text" else "IMAGE"
    return f"""```sh
fedhpro predict {folder} {sample}
fedhpro export {folder} --format onnx --out model.onnx
```

```python
from fedhpro.use import predict

for found in predict({str(run)!r}, ["{sample}"]):
    print(found.name, found.label, found.probability)
```"""


def _again(config: Facts, result: Facts) -> str:
    rows = [("seed", result.get("seed", config.get("seed"))), *(result.get("versions") or {}).items()]
    typed = f"```sh\n{command(config)}\n```" if config else ""
    return "\n\n".join(part for part in (_table(("", ""), rows), typed) if part)


def command(config: Facts) -> str:
    """The method, data and seed, and every other key that is not at its default."""
    usual = defaults(config)
    changed = {name for name in config if name not in usual or usual[name] != config[name]} - OF_THE_MACHINE
    keys = [name for name in config if name in changed | {"method", "data", "seed"}]
    return " ".join(["fedhpro run", *(shlex.quote(f"{name}={config[name]}") for name in keys)])


def defaults(config: Facts) -> Facts:
    """Of a run with that method and data, as config.toml has them; nothing for a method of another version."""
    from .config import configure

    try:
        found = configure(method=config.get("method", "fedhpro"), data=config.get("data", "digits-lite")).flat()
    except ConfigError:
        return {}
    return {name: "none" if value is None else value for name, value in found.items()}


def _table(header: tuple[str, str], rows: Rows) -> str:
    """Markdown, without the rows that have no value; nothing where none is left."""
    lines = [f"| {_cell(name)} | {_cell(value)} |" for name, value in rows if value is not None]
    return "\n".join([f"| {_cell(header[0])} | {_cell(header[1])} |", "| --- | --- |", *lines]) if lines else ""


def _cell(value: Any) -> str:
    return " ".join(str(value).replace("|", "\\|").split())


def _per_cent(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"


def _bytes(count: int | None) -> str | None:
    return None if count is None else f"{count:,} bytes ({count / 1e6:,.1f} MB)"
