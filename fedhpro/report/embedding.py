"""t-SNE of a run's test features together with its prototypes, in the plane (scikit-learn)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from .. import config as configuration
from ..data.sources import Source
from ..equations import class_means
from ..errors import RunError, UserError
from ..federation import load_source
from ..files import DamagedFile, load_tensors
from ..probe import KINDS
from ..use import load_model
from .charts import scatter
from .curves import COLOURS
from .markup import Markup, join, tag
from .reading import Group

if TYPE_CHECKING:
    from .picture import Picture

SAMPLES = 400


@dataclass(frozen=True)
class Embedding:
    """Points in the plane, from 0 to 1: the samples, then the class means of these samples, then the server's own."""

    points: np.ndarray  # [n, 2]
    labels: np.ndarray  # [n]: the class
    kinds: list[str]  # [n]: sample, prototype or hyper
    domains: list[str]  # [n]: of samples; of the others what they are
    classes: tuple[str, ...]
    about: str


def embed(folder: Path, source: Source | None = None, samples: int = SAMPLES) -> Embedding:
    """Equally many samples of each domain, features scaled to length 1, as the cosines of HPCL see them."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    predictor = load_model(folder)
    config = configuration.load(folder)
    source = load_source(config, source)
    rng = torch.Generator().manual_seed(0)
    rows, labels, domains = [], [], list[str]()
    for domain in source.domains:
        tested = domain.test if config.split == "test" else domain.validation
        chosen = torch.randperm(len(tested), generator=rng)[: max(1, samples // len(source.domains))]
        rows += [predictor.features(tested.x[part]) for part in chosen.split(64)]
        labels.append(tested.y[chosen])
        domains += [domain.name] * len(chosen)
    z, y = torch.cat(rows), torch.cat(labels)
    if not len(z):  # they are at the sites of a deployment
        raise RunError(f"{folder} has no samples here to look at")
    means, counts = class_means(z, y, len(predictor.classes))
    present = counts.nonzero()[:, 0]
    own, kind = _server_vectors(folder, z.shape[1], len(predictor.classes))
    every = torch.cat([z, means[present], own.flatten(0, 1)])
    classes = torch.cat([y, present, torch.arange(len(own)).repeat_interleave(own.shape[1])])
    unit = torch.nn.functional.normalize(every, dim=1).numpy()
    perplexity = min(30.0, (len(unit) - 1) / 3)
    with threadpool_limits(1):  # the same picture on any number of cores
        flat = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(unit)
    flat = (flat - flat.min(0)) / np.maximum(flat.max(0) - flat.min(0), 1e-9)
    many = own.shape[0] * own.shape[1]
    kinds = ["sample"] * len(z) + ["prototype"] * len(present) + ["hyper"] * many
    domains += ["class mean of these samples"] * len(present) + [kind] * many
    what = [
        f"the features of {len(z)} {config.split} samples",
        "their class means",
        *([f"the server's {kind}"] * (many > 0)),
    ]
    about = f"t-SNE of {', '.join(what)}; all scaled to length 1, perplexity {perplexity:g}"
    return Embedding(flat, classes.numpy(), kinds, domains, predictor.classes, about)


def _server_vectors(folder: Path, dim: int, num_classes: int) -> tuple[torch.Tensor, str]:
    """What the method keeps for each class: [C, I, d]."""
    path = folder / "server.safetensors"
    try:
        state = load_tensors(path)[0] if path.is_file() else {}
    except DamagedFile as error:
        raise RunError(str(error)) from None
    for name, kind in KINDS.items():
        if name in state and state[name].shape[0] == num_classes and state[name].shape[-1] == dim:
            found = state[name].float()
            return (found if found.dim() == 3 else found[:, None]), kind
    return torch.zeros(0, 1, dim), ""


def draw_embedding(group: Group, several: bool) -> Markup:
    """For the page; a sentence where the run has no model to look at."""
    title = join(group.label) if several else "test features"
    number = group.number if several else None
    try:
        found = embed(group.first.folder)
    except UserError as error:
        return tag("p", f"{group.label}: no t-SNE, {error}", class_="note", data_group=number)
    marks = [
        (float(x), float(y), int(c), kind, f"{found.classes[c]}\n{domain}")
        for (x, y), c, kind, domain in zip(found.points, found.labels, found.kinds, found.domains, strict=True)
    ]
    names = [(x, y, found.classes[c]) for x, y, c, kind, _ in marks if kind == "prototype"]
    picture = scatter(title, marks, names if len(names) <= 20 else [], data_group=number)
    triangles = ", triangles what the server keeps" if "hyper" in found.kinds else ""
    again = " (from the ninth on, colours come again with another shape)" if len(found.classes) > len(COLOURS) else ""
    shapes = f"Small marks are samples, diamonds class means{triangles}; the colour is the class{again}."
    return tag("div", picture, tag("p", f"{found.about}. {shapes}", class_="note"), data_group=number)


def figure_of(found: Embedding) -> Picture:
    """The same as a matplotlib figure."""
    from matplotlib.patheffects import withStroke

    from .picture import Picture

    picture = Picture(figsize=(6.4, 6.0), layout="constrained")
    axes = picture.subplots()
    shapes = {"sample": ("osP", 12), "hyper": ("^^^", 50), "prototype": ("DDD", 150)}
    turns = found.labels // len(COLOURS) % 3  # a colour that comes again has another shape
    for kind, (markers, size) in shapes.items():
        for turn, marker in enumerate(markers):
            rows = np.array([other == kind for other in found.kinds]) & (turns == turn)
            colours = [COLOURS[c % len(COLOURS)] for c in found.labels[rows]]
            edge = "none" if kind == "sample" else "white"
            x, y = found.points[rows].T
            axes.scatter(x, y, s=size, c=colours, marker=marker, edgecolors=edge)
    for (x, y), c, kind in zip(found.points, found.labels, found.kinds, strict=True):
        if kind == "prototype":
            name = axes.text(x, y, found.classes[c], color="white", ha="center", va="center", parse_math=False)
            name.set_path_effects([withStroke(linewidth=2, foreground="black")])  # to be read on any colour
    axes.set_axis_off()
    axes.set_title(found.about, fontsize=8, wrap=True, parse_math=False)
    return picture
