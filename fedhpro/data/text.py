"""Texts as token ids: a word tokenizer, docs-lite (built from installed packages) and AG News (from local files)."""

from __future__ import annotations

import ast
import csv
import hashlib
import importlib.metadata
import importlib.util
import io
import itertools
import json
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError
from ..files import built_once, cache_folder, checksum, decompressed
from .catalog import CATALOG
from .sources import Domain, Source, Split

SPLITS = ("train", "validation", "test")

# --- tokenizer ---

PADDING, UNKNOWN, FIRST = 0, 1, 2  # ids; words follow from FIRST on
WORD = re.compile(r"[^\W_]+")  # letters and digits of any script; all else separates: "don't" is "don", "t"


def words_of(text: str) -> list[str]:
    return WORD.findall(text.lower())


@dataclass(frozen=True)
class Tokenizer:
    """Words and their ids: the most frequent word has id 2, the next 3, and so on."""

    words: tuple[str, ...]
    _ids: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ids", {word: FIRST + i for i, word in enumerate(self.words)})

    @classmethod
    def fit(cls, texts: Iterable[str], size: int = 20_000, min_count: int = 2) -> Tokenizer:
        """At most `size` ids, padding and unknown among them. Words seen less than `min_count` times are unknown,
        which is what trains the embedding of unknown. Equally frequent words come in alphabetical order.
        """
        counts = Counter(word for text in texts for word in words_of(text))
        known = sorted((word for word in counts if counts[word] >= min_count), key=lambda word: (-counts[word], word))
        return cls(tuple(known[: max(0, size - FIRST)]))

    def __len__(self) -> int:
        """The number of ids: a model's `vocab`."""
        return FIRST + len(self.words)

    def encode(self, texts: Sequence[str], length: int = 200) -> Tensor:
        """int64 [n, length]: a longer text is cut, a shorter one padded with 0."""
        ids = np.zeros((len(texts), length), np.int64)
        for row, text in zip(ids, texts, strict=True):
            found = [self._ids.get(word, UNKNOWN) for word in words_of(text)[:length]]
            row[: len(found)] = found
        return torch.from_numpy(ids)

    def decode(self, ids: Tensor) -> str:
        """The words of one text; unknown ones are "?"."""
        return " ".join(self.words[i - FIRST] if i >= FIRST else "?" for i in ids.tolist() if i != PADDING)

    def to_json(self) -> str:
        return json.dumps({"tokenizer": "words", "version": 1, "words": self.words}, ensure_ascii=False)

    @classmethod
    def from_json(cls, content: str | bytes) -> Tokenizer:
        try:
            about = json.loads(content)
        except ValueError as error:
            raise DataError(f"this is not a tokenizer: {error}") from None
        if not isinstance(about, dict) or (about.get("tokenizer"), about.get("version")) != ("words", 1):
            raise DataError('this is not a tokenizer: it should say {"tokenizer": "words", "version": 1, "words": ...}')
        words = about.get("words")
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise DataError("this is not a tokenizer: its words should be a list of strings")
        if len(set(words)) < len(words):
            raise DataError("this is not a tokenizer: it has a word twice")
        return cls(tuple(words))


# --- docs-lite: which library does a piece of documentation come from? ---

NAME, VERSION, SEED = "docs-lite", 1, 20240607
LENGTH = 100  # tokens; few docstrings have more prose
PER_CLASS = {"train": 1000, "validation": 200, "test": 400}
PER_FILE = {"train": 100, "validation": 20, "test": 20}  # most texts of a file: few, so that many files are tested on
MIN_WORDS = 8
MAX_BYTES = 200_000  # of a file to read: a dozen are larger, and parsing them takes as long as hundreds of others
MIN_PER_CLASS = 20  # texts in each split, without which there is nothing to learn
ABOUT = "docstrings of four installed packages; the class is the package, and its name is removed"
ALLOCATION = {"docs": (10, 400)}

# class: package, distribution, and its folders to read, where the whole would take too long
PACKAGES: dict[str, tuple[str, str, frozenset[str] | None]] = {
    "scipy": ("scipy", "scipy", None),
    "scikit-learn": ("sklearn", "scikit-learn", None),
    "torch": ("torch", "torch", frozenset({"nn", "optim", "distributions", "utils", "autograd", "fx"})),
    "matplotlib": ("matplotlib", "matplotlib", None),
}
# sha256 of the content, as built with the versions in FROZEN_WITH
FROZEN = "ff664c99f53150dfabd7e6c27b7ff13b380d25e112a328f1731f451a926a6f89"
FROZEN_WITH = {"scipy": "1.17.1", "scikit-learn": "1.9.1", "torch": "2.13.0", "matplotlib": "3.11.2"}

SKIPPED_FOLDERS = {"tests", "test", "testing", "externals", "extern", "_lib", "_vendor"}  # tests, and others' code
GIVE_AWAYS = (
    r"(?:scikit[- ]learn|scikits?|sklearn|numpy|np|scipy|(?:py)?torch|torchscript|torchvision|matplotlib|mpl|pyplot|plt"
    r"|pandas|pd)"
)
NAMES = re.compile(rf"\b{GIVE_AWAYS}\b", re.IGNORECASE)
LONE_NAMES = re.compile(rf"(?<![\w.]){GIVE_AWAYS}(?!\w|\.\w)", re.IGNORECASE)  # not as a part of code such as np.sum
DROPPED_SECTIONS = {
    "parameters", "other parameters", "returns", "yields", "receives", "raises", "warns", "attributes", "methods",
    "see also", "references", "examples", "example", "args", "arguments", "kwargs", "return", "shape",
}  # fmt: skip
UNDERLINE = re.compile(r"^([=\-~^*#\"])\1{2,}\s*$")
NO_PROSE = ("..", ">>>", "|", "+-", "* ", "- ")  # how paragraphs begin that are directives, code, tables or lists
CODE = re.compile(  # what is code inside a sentence, as far as its form tells
    r"(?::\w+(?::\w+)?:)?`+[^`]*`+_*"  # `name`, ``expression``, :role:`target`, `link`_
    r"|\$[^$]*\$|\\\w+|https?://\S+"  # mathematics, addresses
    r"|\*{1,2}\w+\*{1,2}"  # *parameter*
    r"|\b[A-Za-z]\w+(?:\.\w+)+|\w*_\w*|\b\w+\(\)"  # a.b, snake_case, call()
    r"|\b[a-z]+[A-Z]\w*|\b[A-Z][a-z0-9]+[A-Z]\w*"  # camelCase, CamelCase
)


Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
BODIES = ("finalbody", "orelse", "handlers", "body")


def load_docs_lite() -> Source:
    """The source, from the cache where that was built by this very recipe from these very versions."""
    path = cache_folder() / f"{NAME}-v{VERSION}.safetensors"
    recipe = hashlib.sha256(Path(__file__).read_bytes() + json.dumps(installed_versions()).encode()).hexdigest()
    return as_source(built_once(path, recipe, build))


def installed_versions() -> dict[str, str]:
    try:
        return {distribution: importlib.metadata.version(distribution) for _, distribution, _ in PACKAGES.values()}
    except importlib.metadata.PackageNotFoundError as error:
        raise DataError(f"{NAME} reads the documentation of the package {error.name}: install it") from None


def build() -> dict[str, Tensor]:
    """Token ids and labels as "split/x" and "split/y", and the tokenizer's JSON as bytes."""
    rng = np.random.Generator(np.random.PCG64(SEED))
    corpora = _without_twins([_corpus(name) for name in PACKAGES])
    cuts = [_cut(corpus, rng) for corpus in corpora]
    texts: dict[str, list[str]] = {}
    labels: dict[str, np.ndarray] = {}
    for split, most in PER_CLASS.items():
        count = min(most, *(len(cut[split]) for cut in cuts))
        if count < MIN_PER_CLASS:
            least = min(zip(cuts, PACKAGES, strict=True), key=lambda pair: len(pair[0][split]))[1]
            raise DataError(f"the installed package {least} has too little documentation in its .py files for {NAME}")
        every = [text for cut in cuts for text in rng.permutation(np.array(cut[split], object))[:count]]
        order = rng.permutation(len(every))
        texts[split], labels[split] = [every[i] for i in order], np.repeat(np.arange(len(cuts)), count)[order]
    tokenizer = Tokenizer.fit(texts["train"])
    tensors = {f"{split}/x": tokenizer.encode(texts[split], LENGTH) for split in SPLITS}
    tensors |= {f"{split}/y": torch.from_numpy(labels[split].astype(np.int64)) for split in SPLITS}
    return tensors | {"tokenizer": torch.from_numpy(np.frombuffer(tokenizer.to_json().encode(), np.uint8).copy())}


def as_source(tensors: Mapping[str, Tensor]) -> Source:
    train, validation, test = (Split(tensors[f"{split}/x"], tensors[f"{split}/y"]) for split in SPLITS)
    domain = Domain("docs", train, validation, test, real=True, about=ABOUT)
    tokenizer = Tokenizer.from_json(tensors["tokenizer"].numpy().tobytes())
    clients, samples = ALLOCATION["docs"]
    allocation = {"docs": (clients, min(samples, len(train) // clients))}
    return Source(NAME, (domain,), tuple(PACKAGES), allocation, crop=0, vocab=len(tokenizer), tokenizer=tokenizer)


def is_frozen(tensors: Mapping[str, Tensor]) -> bool:
    """Whether this is, byte for byte, the content that published numbers refer to."""
    return checksum(tensors) == FROZEN


def prose(docstring: str) -> str:
    """The sentences of a (cleaned) docstring, as lower-case words: without sections that are tables, indented blocks,
    lists and examples; code inside a sentence is the word "code"; names of libraries are gone.
    """
    paragraphs: list[list[str]] = [[]]
    lines, keep = docstring.splitlines(), True
    for line, following in zip(lines, [*lines, ""][1:], strict=True):
        if line.strip() and UNDERLINE.match(following):  # a section's title
            keep = line.strip().rstrip(":").lower() not in DROPPED_SECTIONS
            paragraphs.append([])
        elif not line.strip():
            paragraphs.append([])
        elif keep and not UNDERLINE.match(line):
            paragraphs[-1].append(line)
    words: list[str] = []
    for paragraph in paragraphs:
        text = " ".join(paragraph)
        if paragraph and not (
            text.startswith(NO_PROSE) or ">>>" in text or any(line[0].isspace() for line in paragraph)
        ):
            words += words_of(NAMES.sub(" ", CODE.sub(" code ", LONE_NAMES.sub(" ", text))))
    return re.sub(r"\bcode(?: code)+\b", "code", " ".join(words))


def docstrings(path: Path) -> Iterator[str]:
    """The docstrings of a Python file, which is parsed and never run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes in its strings
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, RecursionError):  # made for another version of Python
            return
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        found = ast.get_docstring(node) if isinstance(node, Documented) else None
        if found:
            yield found
        # statements only: there are no docstrings inside expressions, and many expressions
        nodes += [child for name in BODIES for child in reversed(getattr(node, name, ()))]


def _corpus(name: str) -> dict[str, list[str]]:
    """The texts of each file of a package, by the file's path."""
    package, _, folders = PACKAGES[name]
    spec = importlib.util.find_spec(package)  # found, not imported
    if spec is None or spec.origin is None:
        raise DataError(f"{NAME} reads the documentation of the package {package}: install it")
    root = Path(spec.origin).parent
    texts: dict[str, list[str]] = {}
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).parts):
        inside = path.relative_to(root).parts[:-1]
        if SKIPPED_FOLDERS.intersection(inside) or path.stat().st_size > MAX_BYTES:
            continue
        if folders is None or not inside or inside[0] in folders:
            found = [prose(docstring) for docstring in docstrings(path)]
            texts[path.relative_to(root).as_posix()] = [text for text in found if _is_long(text)]
    return texts


def _is_long(text: str) -> bool:
    return sum(word != "code" for word in text.split()) >= MIN_WORDS


def _without_twins(corpora: Sequence[dict[str, list[str]]]) -> list[dict[str, list[str]]]:
    """Texts that differ in nothing but numbers stay once, the first of them; those of two packages not at all."""

    def key(text: str) -> str:
        return " ".join(word for word in text.split() if not word.isdecimal())

    packages = Counter(k for corpus in corpora for k in {key(text) for texts in corpus.values() for text in texts})
    seen: set[str] = set()
    kept: list[dict[str, list[str]]] = []
    for corpus in corpora:
        kept.append({})
        for file, texts in corpus.items():
            fresh = {key(text): text for text in reversed(texts) if packages[key(text)] == 1 and key(text) not in seen}
            seen.update(fresh)
            kept[-1][file] = list(reversed(fresh.values()))
    return kept


def _cut(corpus: dict[str, list[str]], rng: np.random.Generator) -> dict[str, list[str]]:
    """Whole files to test until it has its share, then to validation, and all others to train."""
    files = list(corpus.values())
    available, needed = sum(map(len, files)), sum(PER_CLASS.values())
    share = min(1.0, available / needed)  # below 1: there is not enough, and every split shrinks
    cut: dict[str, list[str]] = {split: [] for split in SPLITS}
    for i in rng.permutation(len(files)):
        split = next((s for s in ("test", "validation") if len(cut[s]) < share * PER_CLASS[s]), "train")
        cut[split] += list(rng.permutation(np.array(files[i], object))[: PER_FILE[split]])
    return cut


# --- AG News ---

AG_CLASSES = CATALOG["ag-news"].classes
LONGEST = 200  # tokens
AG_LABELS = {"label": 0, "class index": 1}  # header of the label's column: its first label
AG_TEXTS = ("title", "description", "text")


def read_news(path: Path) -> tuple[list[str], np.ndarray]:
    """Texts and labels from 0. Either the original layout (class 1-4, title, description, no header), or a header that
    has "label" (from 0) or "Class Index" (from 1), and title and description, or text.
    """
    rows = _rows(path)
    number, row = next(rows, (0, []))
    if not row:
        raise DataError(f"{path} is empty: it should have a row for each text (class, title, description)")
    names = [cell.strip().lower() for cell in row]
    header = next((name for name in AG_LABELS if name in names), None)
    if header is None:
        width, label_at, texts_at, first = 3, 0, [1, 2], 1
        rows = itertools.chain([(number, row)], rows)
    else:
        width, label_at, first = len(names), names.index(header), AG_LABELS[header]
        texts_at = [names.index(name) for name in AG_TEXTS if name in names]
        if not texts_at:
            raise DataError(f"{path}, row {number}: the header names none of {', '.join(AG_TEXTS)}")
    texts, labels = [], []
    for number, row in rows:
        if len(row) != width:
            wanted = "class, title, description" if header is None else ", ".join(names)
            raise DataError(f"{path}, row {number}: {width} columns are needed ({wanted}), and there are {len(row)}")
        label = row[label_at].strip()
        if label not in {str(first + i) for i in range(len(AG_CLASSES))}:
            raise DataError(
                f"{path}, row {number}: the label is {label[:20]!r}, and it should be a number from "
                f"{first} to {first + len(AG_CLASSES) - 1}"
            )
        text = " ".join(row[i] for i in texts_at)
        if not WORD.search(text):
            raise DataError(f"{path}, row {number}: there is no word in its text")
        texts.append(text)
        labels.append(int(label) - first)
    if not texts:
        raise DataError(f"{path} is empty: it has a header and no texts")
    return texts, np.array(labels, np.int64)


def news_file(folder: Path, name: str) -> Path:
    for path in (folder / f"{name}.csv", folder / f"{name}.csv.gz"):
        if path.is_file():
            return path
    raise DataError(f"{folder / name}.csv is missing: AG News is train.csv and test.csv (or .csv.gz) in one folder")


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Rows that are not blank, each with its number from 1."""
    try:
        text = decompressed(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise DataError(f"{path}, line {line}: this is not UTF-8 text") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    for number in itertools.count(1):
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(f"{path}, row {number}: this is not CSV ({error})") from None
        if row:
            yield number, row
