"""One validated config per run: flat keys, the same in Python, on the command line and in config.toml."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import json
import math
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from .data.catalog import canonical
from .data.sources import DEFAULTS, SITES, SOURCES
from .errors import ConfigError
from .methods import METHODS, Method
from .models import GROUPS, MODELS, STEMS

PRINTED, USUAL = "fedhpro", "fedhpro-plus"  # the paper's method, and what is run where none is asked for
OF_PRIVACY = ("epsilon", "noise", "clip", "clip_report", "delta")
Share = Annotated[float, Field(gt=0, le=1)]


class Config(BaseModel):
    """Every setting of a run. Build it with `configure`, which knows presets and the method's own keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # what is run
    method: str = Field(
        USUAL, description="the method (`fedhpro methods`); with a key that only fedhpro has, as M: fedhpro"
    )
    rounds: int = Field(15, ge=1, description="communication rounds R")
    seed: int = Field(0, ge=0, description="every random number of the run derives from it")
    out: str = Field("auto", description="the run folder; auto: a new one under runs/")
    # data and its split over clients
    data: str = Field("digits-lite", description="the data source (`fedhpro data list`), or folder:PATH, or csv:PATH")
    scenario: Literal["domains", "iid", "nid1", "nid1-equalised", "nid2", "shards", "ag-nid"] = Field(
        "domains", description="how samples are split over the clients; docs/scenarios.md has a picture of each"
    )
    clients: int = Field(10, ge=1, description="number of clients K (domains and nid2 have their own)")
    alpha: float = Field(0.5, gt=0, description="concentration of the Dirichlet; smaller is more skewed (nid1)")
    min_samples: int = Field(10, ge=1, description="fewest samples of a client (nid1)")
    rho: float | None = Field(None, ge=1, description="long tail: largest over smallest class, before the split")
    shards_per_client: int = Field(2, ge=1, description="shards of one class that a client gets (shards)")
    nid2_clients: int = Field(6, ge=1, description="clients with few classes, beside the one with all (nid2)")
    nid2_classes: int | None = Field(None, ge=1, description="classes of each of them; none: a tenth of all (nid2)")
    nid2_share: float = Field(0.5, gt=0, lt=1, description="share of their classes' samples that they hold (nid2)")
    nid2_equal_size: bool = Field(False, description="all clients of one size (nid2)")
    clients_per_domain: int | None = Field(None, ge=1, description="instead of the source's own numbers (domains)")
    samples_per_client: int | None = Field(None, ge=1, description="instead of the source's own numbers (domains)")
    augment: Literal["sample", "batch", "auto", "off"] = Field(
        "sample", description="random crop and flip of each sample; one for a whole batch; with AutoAugment; none"
    )
    classes: str | None = Field(None, description="names of all classes, with commas between them (data=sites)")
    image_size: int = Field(32, ge=8, description="pixels of a side (data=sites)")
    channels: int = Field(3, ge=1, description="channels of an image (data=sites)")
    pixel_mean: str | None = Field(None, description="of each channel, with commas; none: ImageNet's (data=sites)")
    pixel_std: str | None = Field(None, description="the same for the standard deviation (data=sites)")
    # model
    model: str = Field("resnet10", description="the network; htfe2, 3, 5, 8: client k has network k mod 2, 3, 5, 8")
    width: int | None = Field(16, ge=1, description="base filters of a ResNet; none: 64")
    dim: int | None = Field(None, ge=1, description="feature width d, by a projection; none: the network's own")
    stem: str = Field("3x3/2", description="first layer: 3x3 and 3x3/2 for small images, 7x7 for 224")
    # local training
    local_epochs: int = Field(5, ge=1, description="epochs E of a client in a round")
    local_steps: int | None = Field(None, ge=1, description="where given, so many steps in a round instead of epochs")
    batch_size: int = Field(16, ge=2, description="samples in a batch B")
    lr: float = Field(0.03, gt=0, description="learning rate of the clients")
    lr_schedule: Literal["constant", "cosine", "exponential"] = Field(
        "constant", description="learning rate over the rounds"
    )
    lr_decay: float = Field(0.998, gt=0, le=1, description="factor per round of the exponential schedule")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of SGD")
    weight_decay: float = Field(1e-5, ge=0, description="weight decay")
    optimizer: Literal["sgd", "adam"] = Field("sgd", description="optimiser of the clients, new in each round")
    balanced: bool = Field(
        False, description="for label skew: cross-entropy knows how frequent each class is at the client"
    )
    # federation
    participation: Share = Field(1.0, description="share of the clients that take part in a round")
    min_clients: int = Field(1, ge=1, description="fewer valid uploads than this: nothing is aggregated in that round")
    patience: int = Field(3, ge=1, description="the run stops after so many rounds in a row without aggregation")
    weights: Literal["samples", "equal"] = Field("samples", description="weight of a client's model in the mean")
    exchange: Literal["auto", "model", "classifier", "prototypes", "nothing"] = Field(
        "auto", description="what of the model travels; auto: what the method asks for"
    )
    nearest: bool = Field(
        False, description="predict by the nearest of the clients' class means, which they send, not by the classifier"
    )
    # hostile clients
    robust: Literal["off", "clip", "median", "trimmed", "krum", "multikrum"] = Field(
        "off", description="how models and reports are folded where clients may be hostile; off: their mean"
    )
    robust_share: float = Field(
        0.2, ge=0, lt=0.5, description="share of the clients that may be hostile (trimmed, krum, multikrum)"
    )
    robust_clip: float | None = Field(
        None, gt=0, description="longest step of a model from the one sent; none: the median of the round (clip)"
    )
    attack: Literal["off", "label-flip", "sign-flip", "scale", "gaussian", "poison"] = Field(
        "off", description="for experiments: what hostile clients do, to labels, models or reports (poison)"
    )
    attack_share: float = Field(0.2, ge=0, le=1, description="share of the clients that are hostile (attack)")
    attack_scale: float = Field(10, gt=0, description="size of what they send beside an honest upload (attack)")
    # privacy
    privacy: Literal["off", "central", "local"] = Field(
        "off", description="who clips and adds noise: a server that is trusted, or every client"
    )
    clip: float = Field(1.0, gt=0, description="largest norm of a client's change of the model (privacy)")
    clip_report: float = Field(1.0, gt=0, description="largest norm of what it reports besides (privacy)")
    noise: float = Field(1.0, gt=0, description="noise multiplier z: standard deviation over sensitivity (privacy)")
    delta: float = Field(1e-5, gt=0, lt=1, description="delta of the guarantee; below 1 / clients (privacy)")
    epsilon: float | None = Field(None, gt=0, description="the budget: a run that would cost more is refused (privacy)")
    secure: bool = Field(
        False, description="secure aggregation: uploads are masked in pairs, and the server learns their sum only"
    )
    # evaluation
    evaluation: Literal["central", "federated", "both", "off"] = Field(
        "central", description="on the server's test sets, on each client's own held-out samples, both, or not at all"
    )
    split: Literal["test", "validation"] = Field("test", description="the server's sets: choose settings on validation")
    held_out: float = Field(0.2, gt=0, lt=1, description="share that clients hold out when evaluation is federated")
    evaluate_every: int = Field(1, ge=1, description="rounds between evaluations; the last round always is")
    # machine and files
    engine: Literal["cpu", "cuda", "flower"] = Field("cpu", description="where clients run")
    workers: int | None = Field(
        None,
        ge=0,
        description="clients trained at once; none: one per core, 4 to 10 on a GPU; 0: in this process, eagerly",
    )
    precision: Literal["auto", "fp32", "tf32", "bf16"] = Field(
        "auto", description="of the convolutions; auto: fp32 on a CPU, tf32 on a GPU, as in torch itself"
    )
    compress: Literal["fp16", "bf16"] | None = Field(
        None, description="numbers of an uploaded model in half their bytes (flower)"
    )
    round_deadline: float | None = Field(
        None,
        gt=0,
        description="seconds a round waits for clients; none: 600 with data=sites, else 12 hours (flower)",
    )
    join_deadline: float = Field(600, gt=0, description="seconds to wait for clients that are not there (flower)")
    compile: bool = Field(False, description="torch.compile inside the captured steps (cuda)")
    checkpoint_every: int = Field(1, ge=1, description="rounds between checkpoints; the last round always has one")
    keep_checkpoints: int = Field(2, ge=1, description="how many checkpoints are kept")
    memory_budget: float = Field(
        20,
        gt=0,
        description="GB on disk for what clients remember (MOON, private models), and in memory for uploads (robust)",
    )
    # the method's own keys
    parameters: dict[str, Any] = Field(default_factory=dict, description="hyper-parameters of the method")

    def flat(self) -> dict[str, Any]:
        """All keys side by side, the method's own among them."""
        keys = self.model_dump()
        return keys | keys.pop("parameters")

    def build_method(self) -> Method:
        return METHODS[self.method](**self.parameters)

    def replace(self, **keys: Any) -> Config:
        """The same config with other keys, those of a preset among them; a new method starts from its own defaults."""
        preset = PRESETS.get(str(keys.get("preset")), {})
        before = {name: value for name, value in self.flat().items() if name not in preset}
        if keys.get("data", self.data) != self.data:  # what the old data set and nobody changed does not stay
            usual = configure(method=self.method, data=self.data).flat()
            before = {name: value for name, value in before.items() if value != usual.get(name) or name == "method"}
        same = keys.get("method", preset.get("method", self.method)) == self.method
        own = configure(method=self.method, data=self.data, model=self.model, privacy=self.privacy).parameters
        before = {k: v for k, v in before.items() if k not in own or (same and v != own[k])}  # defaults go by the rest
        return configure(**(before | keys))

    def to_toml(self) -> str:
        return "".join(f"{name} = {_toml(value)}\n" for name, value in self.flat().items())


# presets/*.toml: the paper's settings, and what the authors' released code runs with. Each sets method, training, model
# and partition keys together; any of them can be given beside the preset and then wins.
PRESETS: dict[str, dict[str, Any]] = {
    path.stem: tomllib.loads(path.read_text(encoding="utf-8"))
    for path in sorted((Path(__file__).parent / "presets").glob("*.toml"))
}


def configure(**keys: Any) -> Config:
    """A config from any keys: a preset first, then these; whatever is left has its default."""
    preset = keys.pop("preset", None)
    if preset is not None:
        if preset not in list(PRESETS):  # of a list: what a TOML file holds need not be hashable
            raise ConfigError(f"there is no preset {preset!r}{closest(str(preset), PRESETS)}")
        chosen = dict(PRESETS[preset])
        if keys.get("method", chosen["method"]) != chosen["method"]:  # its training and model keys still hold
            own = method_keys(chosen["method"])
            chosen = {name: value for name, value in chosen.items() if name not in own}
        keys = chosen | keys
    if isinstance(keys.get("data"), str):
        keys["data"] = canonical(keys["data"])
        keys = DEFAULTS.get(keys["data"], {}) | keys
    unnamed = keys.get("method") is None
    reason = _asks_for_the_papers(keys) if unnamed else None
    if unnamed:
        keys["method"] = PRINTED if reason else USUAL
    method = keys["method"]
    if method not in list(METHODS):
        raise ConfigError(f"there is no method {method!r}{closest(str(method), METHODS)}")
    own = method_keys(method)
    if keys.get("model") == "textcnn" and "contrasted" in own:  # it has no depths to contrast
        keys = {"contrasted": False} | keys
    if keys.get("privacy", "off") != "off" and "agreed" in own:  # a vote would drown in noise
        keys = {"agreed": False} | keys
    known = [name for name in Config.model_fields if name != "parameters"]
    might_be_meant = [*known, *own, *(method_keys(PRINTED) if unnamed else []), "preset"]
    for name in keys:
        if name not in known and name not in own:
            because = f", since {reason}" if reason else ""
            raise ConfigError(_unknown(name, method + because, might_be_meant))
    for name, allowed in (("data", [*SOURCES, *own_data(keys)]), ("model", [*MODELS, *GROUPS]), ("stem", STEMS)):
        if name in keys and keys[name] not in list(allowed):
            if name == "data" and (kind := _kind_of_file(str(keys[name]))):
                raise ConfigError(
                    f"there is no data {keys[name]!r}, but a {kind} of this name: data={kind}:{keys[name]}"
                )
            raise ConfigError(f"there is no {name} {keys[name]!r}{closest(str(keys[name]), allowed)}")
    keys = {name: None if value == "none" else value for name, value in keys.items()}
    try:
        parameters = {name: value for name, value in keys.items() if name in own}
        checked = TypeAdapter(METHODS[method]).validate_python(parameters)
        config = Config(
            **{name: value for name, value in keys.items() if name not in own}, parameters=dataclasses.asdict(checked)
        )
    except ValidationError as error:
        raise ConfigError(_sentence(error) + (f" (method {method}, since {reason})" if reason else "")) from None
    for name, value in config.flat().items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{name}={value}: input should be a finite number")
    for name in OF_PRIVACY if config.privacy == "off" else ():  # who gives one of these believes to be protected
        if (value := getattr(config, name)) != Config.model_fields[name].default:
            raise ConfigError(f"{name}={value:g} protects nothing by itself: give privacy=central or privacy=local too")
    return config


def _asks_for_the_papers(keys: Mapping[str, Any]) -> str | None:
    """Where no method is named: why it is the paper's and not the default. It has a key that the default has not, as
    M=0; and where models differ or stay with the clients it takes a classifier that is trained.
    """
    only = [way for way in METHODS[PRINTED].exchanges if way not in METHODS[USUAL].exchanges]
    for name, value in keys.items():
        if name in method_keys(PRINTED) and name not in method_keys(USUAL):
            return f"{name} is a key of it"
        if (name == "exchange" and value in only) or (name == "model" and value in list(GROUPS)):
            return f"{name}={value} does not go with {USUAL}"
    return None


def chosen_unnamed(keys: Mapping[str, Any]) -> str | None:
    """In a sentence, where keys that name no method choose another one than the default."""
    if {"method", "preset"} & keys.keys() or (reason := _asks_for_the_papers(keys)) is None:
        return None
    return f"no method is named: {PRINTED}, since {reason}"


def about_keys(keys: Mapping[str, Any], config: Config) -> list[str]:
    """What is to be said of the keys that somebody gave: which chose the method, and which a run does not look at."""
    return [*filter(None, [chosen_unnamed(keys)]), *without_effect(config, keys)]


def without_effect(config: Config, given: Iterable[str]) -> list[str]:
    """Of the keys that somebody gave: those that this run does not look at, each in a sentence."""
    reasons = unused(config)
    return [f"{name} has no effect with {reasons[name]}" for name in given if name in reasons]


def unused(config: Config) -> dict[str, str]:
    """The keys that this run does not look at, each with the setting that is the reason."""
    cut, nid2 = config.scenario, ("nid2_clients", "nid2_classes", "nid2_share", "nid2_equal_size")
    of_sites = ("classes", "image_size", "channels", "pixel_mean", "pixel_std")
    nets = GROUPS.get(config.model, (config.model,))
    looked_at = {
        "scenario": {
            "alpha": "nid1" in cut,
            "min_samples": cut == "nid1",
            "clients": cut not in ("domains", "nid2") or config.data == SITES,
            "clients_per_domain": cut == "domains",
            "samples_per_client": cut == "domains",
            "shards_per_client": cut == "shards",
            **dict.fromkeys(nid2, cut == "nid2"),
        },
        "attack": dict.fromkeys(("attack_share", "attack_scale"), config.attack != "off"),
        "robust": {
            "robust_share": config.robust in ("trimmed", "krum", "multikrum"),
            "robust_clip": config.robust == "clip",
        },
        "data": dict.fromkeys(of_sites, config.data == SITES),
        "model": {
            "width": any(net.startswith("resnet") for net in nets),
            "stem": not {"cnn", "textcnn"}.issuperset(nets),
        },
        "local_steps": {"local_epochs": config.local_steps is None},
        "lr_schedule": {"lr_decay": config.lr_schedule == "exponential"},
        "optimizer": {"momentum": config.optimizer == "sgd"},
        "evaluation": {"held_out": config.evaluation in ("federated", "both")},
        "engine": {"compile": config.engine == "cuda"}
        | dict.fromkeys(("round_deadline", "join_deadline"), config.engine == "flower"),
    }
    return {
        name: f"{reason}={getattr(config, reason)}"
        for reason, keys in looked_at.items()
        for name, matters in keys.items()
        if not matters
    }


def unseen_tests(config: Config) -> str:
    """The ways to test that tell nothing of a client's samples: with data=sites the server has none of its own."""
    return "evaluation=off" if config.data == SITES else "evaluation=central or off"


def own_data(keys: Mapping[str, Any]) -> list[str]:
    """`folder:PATH` and `csv:PATH` are data too, `python:NAME`, a source that a program handed over, and `sites`."""
    name = str(keys.get("data"))
    return [name] if name.startswith(("folder:", "csv:", "python:")) or name == SITES else []


def _kind_of_file(name: str) -> str | None:
    try:
        return "folder" if Path(name).is_dir() else "csv" if Path(name).is_file() else None
    except (OSError, ValueError):  # no name of a file at all
        return None


def method_keys(method: str) -> dict[str, Any]:
    """The hyper-parameters of a method and their defaults."""
    return {field.name: field.default for field in dataclasses.fields(METHODS[method])}


def method_types(method: str) -> dict[str, Any]:
    hints = get_type_hints(METHODS[method], include_extras=False)
    return {name: hints[name] for name in method_keys(method)}


def method_notes(method: str) -> dict[str, str]:
    """What the comment behind each hyper-parameter says: the method's file is where it is explained."""
    notes = dict.fromkeys(method_keys(method), "")
    for cls in reversed(METHODS[method].__mro__[:-1]):
        with contextlib.suppress(OSError):  # a class typed into a shell has no file
            for name, note in re.findall(r"^ {4}(\w+): .+  # (.+)$", inspect.getsource(cls), flags=re.MULTILINE):
                if name in notes:
                    notes[name] = note
    return notes


def describe_type(hint: Any) -> str:
    """How a person would say it: one of the choices, or the kind of number."""
    if choices := get_args(hint):
        return "|".join("none" if choice is type(None) else describe_type(choice) for choice in choices)
    return str(getattr(hint, "__name__", hint))


def parse(arguments: Iterable[str]) -> dict[str, Any]:
    """key=value arguments of the command line."""
    keys: dict[str, Any] = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals or not name:
            raise ConfigError(f"{argument!r} is not a setting: write it as key=value")
        if name in keys:
            raise ConfigError(f"{name} is given twice")
        keys[name] = value
    return keys


def names_and_keys(arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """What names something (fedhpro, fedhpro:M=0, table2, a folder), and the key=value arguments."""
    names = [a for a in arguments if "=" not in a or ":" in a.partition("=")[0]]
    return names, parse(a for a in arguments if a not in names)


def load(path: Path) -> Config:
    """The config of a run folder or of a TOML file."""
    path = path / "config.toml" if path.is_dir() else path
    try:
        return configure(**tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(f"there is no config at {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def worker_count(config: Config, clients: int) -> int:
    if config.workers is not None:
        return config.workers
    return min(available_cores(), clients)


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _unknown(name: str, method: str, known: list[str]) -> str:
    others = [other for other in METHODS if name in method_keys(other)]
    if others:
        return f"{name!r} is a key of method {' or '.join(others)}, and this run's method is {method}"
    found = _nearest(name, known)
    hint = f": did you mean {found!r}? " if found else "; "
    return f"there is no key {name!r}{hint}`fedhpro run --keys` lists all"


def closest(name: str, allowed: Iterable[str]) -> str:
    found = _nearest(name, allowed := list(allowed))
    return f": did you mean {found!r}?" if found else f": choose one of {', '.join(allowed)}"


def _nearest(name: str, allowed: Iterable[str]) -> str | None:
    """Upper and lower case count the same: FedHPro, m."""
    lower = {each.lower(): each for each in allowed}
    found = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.5)
    return lower[found[0]] if found else None


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    if not first["loc"]:  # settings that do not go together: the method says so itself
        return first["msg"].removeprefix("Value error, ")
    name = str(first["loc"][0])
    given = "none" if first["input"] is None else " ".join(str(first["input"]).split())[:80]
    reason = first["msg"][0].lower() + first["msg"][1:].partition(", unable to")[0]
    return f"{name}={given}: {reason}"


def _toml(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{name} = {_toml(item)}" for name, item in value.items()) + " }"
    text = json.dumps(str(value), ensure_ascii=False)  # TOML escapes what JSON does, and DEL
    return text.replace("\x7f", "\\u007f")
