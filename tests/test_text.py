"""Texts: the tokenizer, docs-lite and its promises, AG News files whole and broken, and the AG-NID federations."""

from __future__ import annotations

import gzip
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedhpro import models
from fedhpro.data import clients, partition, sources, text
from fedhpro.data.text import Tokenizer
from fedhpro.errors import DataError, PartitionError, UserError

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
FOREIGN = {
    name: version(name) for name, pinned in text.FROZEN_WITH.items() if version(name).partition("+")[0] != pinned
}
quick = settings(max_examples=60, deadline=None)


# tokenizer


@pytest.mark.parametrize(
    ("given_text", "words"),
    [
        ("Wall St. Bears Claw Back", ["wall", "st", "bears", "claw", "back"]),
        ("Don't: #39;s e-mail, a_b\tX2 3.14", ["don", "t", "39", "s", "e", "mail", "a", "b", "x2", "3", "14"]),
        ("Bézier ÜBER 東京 ½", ["bézier", "über", "東京", "½"]),
        (" -- !\n_", []),
    ],
)  # fmt: skip
def test_words_are_runs_of_letters_and_digits(given_text: str, words: list[str]) -> None:
    assert text.words_of(given_text) == words


def test_most_frequent_first_then_alphabetical() -> None:
    tokenizer = Tokenizer.fit(["b a c", "c b B", "d"], min_count=1)
    assert tokenizer.words == ("b", "c", "a", "d")
    assert len(tokenizer) == 6
    assert Tokenizer.fit(["b a c", "c b B", "d"]).words == ("b", "c")
    assert Tokenizer.fit(["b a c", "c b B", "d"], size=5, min_count=1).words == ("b", "c", "a")
    assert Tokenizer.fit(["a"], size=1, min_count=1).words == ()


def test_encoding_pads_cuts_and_marks_unknown_words() -> None:
    tokenizer = Tokenizer(("a", "b"))
    ids = tokenizer.encode(["B x A!", "a b a b a b", ""], length=4)
    assert ids.dtype == torch.int64
    assert ids.tolist() == [[3, 1, 2, 0], [2, 3, 2, 3], [0, 0, 0, 0]]
    assert [tokenizer.decode(row) for row in ids] == ["b ? a", "a b a b", ""]
    assert tokenizer.encode(["a"]).shape == (1, 200)
    assert tokenizer.encode([], 7).shape == (0, 7)


@quick
@given(st.lists(st.text(max_size=40), max_size=8), st.integers(2, 12), st.integers(1, 3), st.integers(1, 9))
def test_any_text_survives(texts: list[str], size: int, min_count: int, length: int) -> None:
    tokenizer = Tokenizer.fit(texts, size, min_count)
    again = Tokenizer.from_json(tokenizer.to_json())
    assert again == tokenizer == Tokenizer.fit(texts[::-1], size, min_count)  # the order of texts is no matter
    assert len(tokenizer) <= size
    ids = again.encode(texts, length)
    assert ids.shape == (len(texts), length)
    assert bool(((ids >= 0) & (ids < len(again))).all())
    assert [int((row > 0).sum()) for row in ids] == [min(length, len(text.words_of(t))) for t in texts]
    assert all(bool((row[int((row > 0).sum()) :] == 0).all()) for row in ids)  # padding is at the end


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '"words"', '{"words": ["a"]}', '{"tokenizer": "words", "version": 1, "words": ["a", 1]}',
     '{"tokenizer": "words", "version": 1, "words": ["a", "a"]}', '{"tokenizer": "words", "version": 2, "words": []}',
     b"\xff"],
)  # fmt: skip
def test_what_is_not_a_tokenizer(content: str | bytes) -> None:
    with pytest.raises(DataError, match=r"^this is not a tokenizer"):
        Tokenizer.from_json(content)


# docs-lite: from docstrings to texts

DOCSTRING = """Compute the NumPy-like sum of `values` with scipy.stats, see :func:`torch.sum` and my_function().

Second paragraph about scikit-learn and MyClass in sklearn.

* a list is no prose

Parameters
----------
values : array
    What is summed.

Notes
-----
It is $x^2$ in Matplotlib.

>>> print(1)
1

Args:
    x: indented

.. versionadded:: 1
"""


def test_prose_keeps_sentences_and_hides_code_and_names() -> None:
    assert text.prose(DOCSTRING) == (
        "compute the like sum of code with code see code and code second paragraph about and code in it is code in"
    )
    assert text.prose("") == ""


def test_docstrings_are_read_without_running_the_file(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        '"""Of the module."""\nraise SystemExit\n"no docstring"\nif True:\n  def f():\n    r"""Of f."""\n'
        'class C:\n  """Of C."""\n  async def g(self):\n    "Of g."\n    return "\\d"\n'
    )
    assert sorted(text.docstrings(path)) == ["Of C.", "Of f.", "Of g.", "Of the module."]
    path.write_text("def broken(:\n")
    assert list(text.docstrings(path)) == []


def package(folder: Path, name: str, topics: str, files: int = 30, per_file: int = 6) -> None:
    """A package whose docstrings are about its own topics; each text names its file."""
    rng = np.random.default_rng(len(name))
    for i in range(files):
        path = folder / name / ("tests" if i == files - 1 else "sub") / f"file{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        functions = []
        for j in range(per_file):
            words = " ".join(rng.choice(topics.split(), 8))
            functions.append(f'def f{j}():\n    """{name}{i} makes {words} {"abcdefgh"[j]} from {words[::-1]}."""\n')
        path.write_text("\n".join(functions))
    (folder / name / "__init__.py").write_text('"""Shared by all packages: a sentence that nobody can tell apart."""\n')


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    names = ("fakeone", "faketwo", "fakethree", "fakefour")
    for name, topics in zip(names, ("red green blue", "up down left", "cat dog cow", "sun moon star"), strict=True):
        package(tmp_path, name, topics)
    monkeypatch.setattr(text, "PACKAGES", {name: (name, name, None) for name in names})
    monkeypatch.setattr(text, "installed_versions", lambda: {"fake": "1"})
    monkeypatch.setenv("FEDHPRO_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_file_is_in_one_split_only(packages: Path) -> None:
    corpora = text._without_twins([text._corpus(name) for name in text.PACKAGES])
    for corpus in corpora:
        assert not any("tests/" in file for file in corpus)
        assert corpus["__init__.py"] == []  # all packages have that text
        home = {item: file for file, texts in corpus.items() for item in texts}
        cut = text._cut(corpus, np.random.default_rng(0))
        files = [{home[item] for item in cut[split]} for split in text.SPLITS]
        assert all(files)
        assert sum(map(len, files)) == len(set().union(*files))
        assert sum(map(len, cut.values())) == len(home)


def test_scarce_documentation_makes_it_smaller_and_balanced(packages: Path) -> None:
    tensors = text.build()
    source = text.as_source(tensors)
    for split in text.SPLITS:
        counts = torch.bincount(tensors[f"{split}/y"])
        assert len(counts) == 4 and counts.min() == counts.max() >= text.MIN_PER_CLASS
    count, samples = source.allocation["docs"]
    assert count * samples <= len(source.domains[0].train)


def test_the_same_packages_make_the_same_bytes(packages: Path) -> None:
    assert text.checksum(text.build()) == text.checksum(text.build())


def test_cache_is_used_and_rebuilt_when_versions_change(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds = []
    build = text.build
    monkeypatch.setattr(text, "build", lambda: builds.append(1) or build())
    first, second = text.load_docs_lite(), text.load_docs_lite()
    assert len(builds) == 1
    assert first.tokenizer == second.tokenizer
    assert torch.equal(first.domains[0].test.x, second.domains[0].test.x)
    monkeypatch.setattr(text, "installed_versions", lambda: {"fake": "2"})
    text.load_docs_lite()
    assert len(builds) == 2
    cache = packages / "cache" / "docs-lite-v1.safetensors"
    content = bytearray(cache.read_bytes())
    content[-1] ^= 1
    cache.write_bytes(content)
    text.load_docs_lite()
    assert len(builds) == 3


def test_missing_or_empty_package(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = text.PACKAGES
    monkeypatch.setattr(text, "PACKAGES", {**real, "absent": ("absent_package", "absent", None)})
    with pytest.raises(
        DataError, match=r"^docs-lite reads the documentation of the package absent_package: install it$"
    ):
        text.build()
    package(packages, "bare", "a b", files=2)
    monkeypatch.setattr(text, "PACKAGES", {**real, "bare": ("bare", "bare", None)})
    with pytest.raises(DataError, match=r"^the installed package bare has too little documentation"):
        text.build()


def test_missing_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "PACKAGES", {"absent": ("absent", "no-such-distribution", None)})
    with pytest.raises(DataError, match="the package no-such-distribution: install it"):
        text.installed_versions()


# docs-lite: the real thing


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    return text.build()


@pytest.fixture(scope="module")
def docs(tensors: dict[str, Tensor]) -> sources.Source:
    return text.as_source(tensors)


def test_sizes_shapes_and_types(docs: sources.Source) -> None:
    (domain,) = docs.domains
    assert (docs.name, docs.classes, docs.shape) == ("docs-lite", tuple(text.PACKAGES), (text.LENGTH,))
    assert (docs.crop, docs.flip) == (0, False)
    assert docs.tokenizer is not None and docs.vocab == len(docs.tokenizer) > 1000
    for split, per_class in zip((domain.train, domain.validation, domain.test), (1000, 200, 400), strict=True):
        assert (split.x.dtype, split.y.dtype) == (torch.int64, torch.int64)
        counts = torch.bincount(split.y, minlength=4).tolist()
        assert counts == [per_class] * 4 if not FOREIGN else len(set(counts)) == 1
        assert split.x.shape == (len(split), text.LENGTH)
        assert int(split.x.min()) >= 0 and int(split.x.max()) < docs.vocab
        assert int((split.x > 0).sum(1).min()) >= text.MIN_WORDS
        assert len(set(split.y[:50].tolist())) == 4  # shuffled


def test_names_of_libraries_are_gone(docs: sources.Source) -> None:
    assert docs.tokenizer is not None
    names = {"numpy", "np", "scipy", "sklearn", "scikit", "torch", "pytorch", "matplotlib", "pyplot", "plt", "pandas"}
    assert not names.intersection(docs.tokenizer.words)


def test_vocabulary_is_of_training_texts_only(docs: sources.Source) -> None:
    used = set(docs.domains[0].train.x.flatten().tolist())
    # texts are cut at LENGTH after the vocabulary is made, so a few words are out of sight
    assert docs.vocab is not None and len(used) > 0.8 * docs.vocab
    assert (docs.domains[0].test.x == text.UNKNOWN).any() and (docs.domains[0].train.x == text.UNKNOWN).any()


@pytest.mark.skipif(bool(FOREIGN), reason=f"other versions than those of the frozen content: {FOREIGN}")
def test_content_is_the_frozen_one(tensors: dict[str, Tensor]) -> None:
    assert text.is_frozen(tensors)


def test_a_linear_model_learns_it_but_not_by_heart(docs: sources.Source) -> None:
    """Far above chance (25 %), far below what a give-away would allow."""
    from sklearn.naive_bayes import MultinomialNB

    def bags(split: sources.Split) -> np.ndarray:
        counts = np.zeros((len(split), docs.vocab or 0), np.float32)
        rows = np.repeat(np.arange(len(split)), split.x.shape[1])
        np.add.at(counts, (rows, split.x.numpy().ravel()), 1)
        return counts[:, 1:]

    (domain,) = docs.domains
    model = MultinomialNB().fit(bags(domain.train), domain.train.y.numpy())
    assert 0.6 < model.score(bags(domain.test), domain.test.y.numpy()) < 0.9


def test_it_fits_the_text_model_and_the_federations(docs: sources.Source) -> None:
    net = models.build("textcnn", docs.num_classes, vocab=docs.vocab)
    assert net(docs.domains[0].test.x[:3]).shape == (3, 4)
    for scenario in ("domains", "iid", "nid1"):
        parts = clients.cut(docs, scenario=scenario, seed=0)
        assert len(parts) == 10
        assert all(part.train.x.dtype == torch.int64 for part in parts)


def test_heavy_packages_stay_out() -> None:
    """Packages are found and read, not imported."""
    code = (
        "import sys, fedhpro.data.text as t\n"
        "t.PACKAGES = {name: (package, '', frozenset({'io', 'style'})) for name, (package, *_) in t.PACKAGES.items()}\n"
        "assert t._corpus('scipy') and t._corpus('matplotlib')\n"
        "print([m for m in ('matplotlib', 'sklearn', 'scipy', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_registry() -> None:
    assert {"docs-lite", "ag-news"} <= set(sources.SOURCES)


# AG News

ORIGINAL = [(k % 4 + 1, f'Title {k}, a ""quoted"" one', f"Words of class{k % 4}\\\\and more, #39;s") for k in range(80)]


def write(folder: Path, name: str, rows: list[str] | bytes | str) -> Path:
    path = folder / "ag_news" / name
    path.parent.mkdir(exist_ok=True)
    content = "\n".join([*rows, ""]) if isinstance(rows, list) else rows
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def original(rows: list[tuple[int, str, str]]) -> list[str]:
    return [f'"{label}","{title}","{description}"' for label, title, description in rows]


@pytest.fixture
def news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDHPRO_DATA", str(tmp_path))
    monkeypatch.setenv("FEDHPRO_CACHE", str(tmp_path / "cache"))
    write(tmp_path, "train.csv", original(ORIGINAL))
    write(tmp_path, "test.csv", original(ORIGINAL[:8]))
    return tmp_path


def test_ag_news_from_the_original_files(news: Path) -> None:
    source = sources.load("ag-news")
    (domain,) = source.domains
    assert source.classes == ("World", "Sports", "Business", "Sci/Tech")
    assert (source.shape, source.crop) == ((200,), 0)
    assert tuple(map(len, (domain.train, domain.validation, domain.test))) == (80, 0, 8)
    (held,) = sources.with_validation(source).domains
    assert tuple(map(len, (held.train, held.validation, held.test))) == (76, 4, 8)
    assert torch.bincount(held.validation.y).tolist() == [1] * 4
    assert domain.test.y.tolist() == [0, 1, 2, 3] * 2
    assert source.tokenizer is not None and source.vocab == len(source.tokenizer)
    assert source.tokenizer.decode(domain.test.x[1]) == "title ? a quoted one words of class1 and more 39 s"
    assert source.allocation == {"ag-news": (10, 8)}
    (again,) = sources.with_validation(sources.load("ag_news")).domains
    assert torch.equal(held.train.x, again.train.x) and torch.equal(held.validation.x, again.validation.x)


def test_words_of_the_test_part_are_not_in_the_vocabulary(news: Path) -> None:
    write(news, "test.csv", ["1,zebra zebra zebra,zebra"] * 3)
    source = sources.load("ag-news")
    assert source.tokenizer is not None and "zebra" not in source.tokenizer.words
    assert source.domains[0].test.x[0, :4].tolist() == [1] * 4


@pytest.mark.parametrize(
    ("header", "rows"),
    [
        ("label,title,description", ["0,a,b c", '3,"d",e']),
        ("label,text,source,has_title", ["0,a b c,web,1", "3,d e,web,0"]),
        ("text,label", ["a b c,0", "d e,3"]),
        ("Class Index,Title,Description", ["1,a,b c", "4,d,e"]),
        ("\ufefflabel,title,description", ["0,a,b c", "", "3,d,e"]),
    ],
)
def test_layouts_with_a_header(tmp_path: Path, header: str, rows: list[str]) -> None:
    texts, labels = text.read_news(write(tmp_path, "x.csv", [header, *rows]))
    assert (texts, labels.tolist()) == (["a b c", "d e"], [0, 3])


def test_compressed_files(news: Path) -> None:
    for name in ("train", "test"):
        plain = news / "ag_news" / f"{name}.csv"
        (news / "ag_news" / f"{name}.csv.gz").write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()
    assert len(sources.load("ag-news").domains[0].test) == 8


@pytest.mark.parametrize("name", ["train", "test"])
def test_missing_file(news: Path, name: str) -> None:
    (news / "ag_news" / f"{name}.csv").unlink()
    with pytest.raises(UserError) as caught:
        sources.load("ag-news")
    path = news / "ag_news" / f"{name}.csv"
    assert str(caught.value) == (f"{path} is missing: AG News is train.csv and test.csv (or .csv.gz) in one folder")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", " is empty: it should have a row for each text (class, title, description)"),
        (b"\n\n", " is empty: it should have a row for each text (class, title, description)"),
        (b"label,text\n", " is empty: it has a header and no texts"),
        (b"label,body\n1,a\n", ", row 1: the header names none of title, description, text"),
        (b"1,a,b\n2,c\n", ", row 2: 3 columns are needed (class, title, description), and there are 2"),
        (b"1,a,b\n\n2,c,d,e\n", ", row 3: 3 columns are needed (class, title, description), and there are 4"),
        (b"label,text\n1,a,b\n", ", row 2: 2 columns are needed (label, text), and there are 3"),
        (b"1,a,b\n5,c,d\n", ", row 2: the label is '5', and it should be a number from 1 to 4"),
        (b"0,a,b\n", ", row 1: the label is '0', and it should be a number from 1 to 4"),
        (b"label,text\n4,a\n", ", row 2: the label is '4', and it should be a number from 0 to 3"),
        (b"sport,a,b\n", ", row 1: the label is 'sport', and it should be a number from 1 to 4"),
        (b"1,a,b\n2,,--\n", ", row 2: there is no word in its text"),
        (b'1,a,b\n2,"c,d\n1,e,f\n', ", row 2: this is not CSV (unexpected end of data)"),
        (b"1,a,b\n2,\xff,d\n", ", line 2: this is not UTF-8 text"),
    ],
)
def test_broken_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = write(tmp_path, "train.csv", content)
    with pytest.raises(DataError) as caught:
        text.read_news(path)
    assert str(caught.value) == f"{path}{message}"


@pytest.mark.parametrize("cut", [slice(None, -9), slice(3, None)])
def test_damaged_gzip(tmp_path: Path, cut: slice) -> None:
    path = write(tmp_path, "train.csv.gz", gzip.compress(b"1,a,b\n")[cut])
    with pytest.raises(DataError, match="cannot be read"):
        text.read_news(path)


def test_a_class_without_rows(news: Path) -> None:
    write(news, "train.csv", [line for line in original(ORIGINAL) if not line.startswith('"3"')])
    with pytest.raises(DataError, match="has no sample of class Business in its train part"):
        sources.load("ag-news")


@pytest.mark.skipif(not (SHARED / "ag_news_test_full.csv.gz").exists(), reason=f"no AG News in {SHARED}")
def test_the_real_test_file() -> None:
    texts, labels = text.read_news(SHARED / "ag_news_test_full.csv.gz")
    assert np.bincount(labels).tolist() == [1900] * 4
    assert texts[0].startswith("Fears for T N pension after talks Unions representing workers")
    ids = Tokenizer.fit(texts).encode(texts)
    assert ids.shape == (7600, 200)
    parts = partition.ag_nid(labels, 50, np.random.default_rng(0))
    assert {len(part) for part in parts} == {1900 * 4 // 50}


# AG-NID


def full(per_class: int = 30_000) -> np.ndarray:
    return np.random.default_rng(1).permutation(np.repeat(np.arange(4), per_class))


def table(labels: np.ndarray, parts: list[np.ndarray]) -> np.ndarray:
    return np.stack([np.bincount(labels[part], minlength=4) for part in parts])


def test_k50_is_exact_on_the_full_data() -> None:
    counts = table(labels := full(), partition.ag_nid(labels, 50, np.random.default_rng(0)))
    assert (counts[40:] == 600).all()
    assert set(counts[:40].flatten().tolist()) == {0, 1200}
    assert ((counts[:40] > 0).sum(1) == 2).all()
    assert (counts[:40] > 0).sum(0).tolist() == [20] * 4
    assert (counts.sum(1) == 2400).all()


def test_k10_is_exact_on_the_full_data() -> None:
    counts = table(labels := full(), partition.ag_nid(labels, 10, np.random.default_rng(0)))
    assert counts[:5].tolist() == [
        [5000, 7500, 0, 0],
        [0, 0, 7500, 5000],
        [5000, 0, 7500, 0],
        [0, 7500, 0, 5000],
        [5000, 0, 0, 5000],
    ]
    assert (counts[5:] == 3000).all()


@quick
@given(st.sampled_from([10, 50]), st.lists(st.integers(0, 300), min_size=4, max_size=4), st.integers(0, 2**32 - 1))
def test_ag_nid_is_complete_disjoint_and_in_proportion(k: int, extra: list[int], seed: int) -> None:
    sizes = np.array(extra) + k
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(4), sizes))
    before = labels.copy()
    parts = partition.ag_nid(labels, k, np.random.default_rng(seed))
    assert np.array_equal(labels, before)
    assert len(parts) == k
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    assert all(np.array_equal(part, np.sort(part)) for part in parts)
    counts, twos = table(labels, parts), partition.AG_NID[k]
    assert ((counts > 0).sum(1) == [2] * twos + [4] * (k - twos)).all()
    assert (np.abs(counts[twos:] - sizes / k) < 1).all()  # 1/K of each class
    slots = (counts[:twos] > 0).sum(0)
    expected = (counts[:twos] > 0) * (sizes * twos / k / slots)
    assert (np.abs(counts[:twos] - expected) <= 1).all()
    again = partition.ag_nid(labels, k, np.random.default_rng(seed))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


def test_ag_nid_depends_on_the_seed() -> None:
    one, other = (partition.ag_nid(full(100), 10, np.random.default_rng(seed)) for seed in (0, 1))
    assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("labels", "k", "message"),
    [
        (full(60), 20, "ag-nid is made for 10 or 50 clients, not for 20"),
        (np.arange(100) % 3, 10, "ag-nid is made for the classes 0 to 3, and the labels are [0, 1, 2]"),
        (np.arange(100) % 5, 10, "ag-nid is made for the classes 0 to 3, and the labels are [0, 1, 2, 3, 4]"),
        (np.array([], int), 10, "ag-nid is made for the classes 0 to 3, and the labels are []"),
        (np.repeat(np.arange(4), [60, 60, 49, 60]), 50,
         "ag-nid with 50 clients needs 50 samples of each class, and class 2 has 49"),
    ],
)  # fmt: skip
def test_ag_nid_where_it_cannot_be(labels: np.ndarray, k: int, message: str) -> None:
    with pytest.raises(PartitionError) as caught:
        partition.ag_nid(labels, k, np.random.default_rng(0))
    assert str(caught.value) == message
