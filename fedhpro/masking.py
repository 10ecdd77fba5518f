"""Secure aggregation: the server learns the sum of a round's uploads, and of no single one of them anything.

Every upload becomes whole numbers modulo 2^64 and is hidden twice. Each pair of clients shares a key (X25519, through
the server) and draws from it (HKDF, ChaCha20) numbers that one adds and the other subtracts: they cancel in the sum of
all. And each client adds numbers from a seed of its own, which it reveals when, as the server says, everybody's upload
is there. A round has three steps:

    offer    a client makes a key pair for this round and sends the public half
    seal     it gets the keys of all members, trains, and sends its upload, hidden; who is lost on the way is left
             out, and the others seal what they have once more, under new keys, with a new seed: another attempt
    reveal   it tells the seed of the last attempt, once, and forgets everything

A client reveals one seed in a round. So an upload that comes late, after a new attempt was begun, stays hidden: without
its own seed and those of the others it is noise. docs/secure-aggregation.md has the threat model.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import wire
from .config import unseen_tests
from .errors import ConfigError
from .methods.base import Tensors

if TYPE_CHECKING:
    from .engines.cpu import Answer, Engine, Memories, Record, Test
    from .federation import Federation

Numbers = NDArray[np.uint64]
FRACTION_BITS = 32  # of a fixed-point number
LARGEST_SUM = 2.0**62  # in units of 2^-32; half of what would be taken for a negative number
FEWEST = 3  # members: of two, each could subtract itself
ATTEMPTS = 3  # in a round
OVER = 2**31  # in place of an attempt: there is none after it
KEY_BYTES = SEED_BYTES = 32


class MaskingError(Exception):
    """Why a client does not do what it is asked, or a sum is none."""


# --- numbers -------------------------------------------------------------------------------------------------------


def encode(values: Tensor, members: int) -> Numbers:
    """Fixed-point numbers whose sum over so many members does not wrap around."""
    scaled = values.detach().double().cpu().numpy() * 2.0**FRACTION_BITS
    if not np.isfinite(scaled).all():
        raise MaskingError("it has values that are not finite")
    if float(np.abs(scaled).max(initial=0)) * members > LARGEST_SUM:
        most = LARGEST_SUM / members / 2.0**FRACTION_BITS
        raise MaskingError(f"it has a value beyond {most:.3g}, the most of which {members} can be summed up")
    return np.rint(scaled).astype(np.int64).view(np.uint64)


def decode(total: Numbers) -> Tensor:
    return torch.from_numpy(total.view(np.int64).astype(np.float64) / 2.0**FRACTION_BITS)


def drawn(key: bytes, count: int) -> Numbers:
    """Numbers that whoever has the key draws alike, and that are noise to everybody else. A key is used once."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(stream.update(bytes(8 * count)), dtype="<u8").astype(np.uint64)


# --- a client ------------------------------------------------------------------------------------------------------


@dataclass
class Member:
    """A client's side of a round. What it holds never leaves but for `public` and, once, the seed."""

    client: int
    round: int
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(KEY_BYTES), repr=False)
    attempt: int = -1  # the last that was sealed
    seed: bytes = field(default=b"", repr=False)

    @property
    def public(self) -> bytes:
        return self._private_key().public_key().public_bytes_raw()

    def seal(self, attempt: int, keys: Mapping[int, bytes], values: Tensor) -> Numbers:
        """The upload, hidden; it can be read in the sum over all members and nowhere else."""
        if len(keys) < FEWEST:
            raise MaskingError(f"{len(keys)} members are too few: with fewer than {FEWEST} a sum gives uploads away")
        if keys.get(self.client) != self.public or len(set(keys.values())) != len(keys):
            raise MaskingError("the keys are not those of this round's members")
        if attempt <= self.attempt:
            raise MaskingError("that attempt is over")
        hidden = encode(values, len(keys))
        self.attempt, self.seed = attempt, secrets.token_bytes(SEED_BYTES)
        hidden += drawn(self.seed, len(hidden))
        for other, public in keys.items():
            if other != self.client:
                numbers = drawn(self._shared(other, public, attempt, keys), len(hidden))
                hidden = hidden + numbers if self.client < other else hidden - numbers
        return hidden

    def reveal(self, attempt: int) -> bytes:
        if attempt != self.attempt or not self.seed:
            raise MaskingError("that is not the last upload that was sealed, or its seed was told already")
        seed, self.seed, self.secret = self.seed, b"", secrets.token_bytes(KEY_BYTES)
        self.attempt = OVER
        return seed

    def _private_key(self):  # type: ignore[no-untyped-def]
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        return X25519PrivateKey.from_private_bytes(self.secret)

    def _shared(self, other: int, public: bytes, attempt: int, keys: Mapping[int, bytes]) -> bytes:
        """The pair's key of this attempt. It hangs on who the members are: two who were told different things draw
        different numbers, and nothing cancels.
        """
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        try:
            secret = self._private_key().exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError:
            raise MaskingError(f"the key of member {other} is none") from None
        members = hashlib.sha256(b"".join(k.to_bytes(8, "big") + keys[k] for k in sorted(keys))).digest()
        pair = sorted((self.client, other))
        about = f"fedhpro masks, round {self.round}, attempt {attempt}, clients {pair[0]} and {pair[1]}".encode()
        return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=members, info=about).derive(secret)


# --- the server ----------------------------------------------------------------------------------------------------


class Transport(Protocol):
    """How the three steps get to clients and back. An answer is a reason where there is none."""

    def offer(self, round: int, clients: Sequence[int]) -> Iterable[tuple[int, bytes | str]]: ...
    def seal(self, round: int, attempt: int, keys: Mapping[int, bytes]) -> Iterable[tuple[int, Numbers | str]]: ...
    def reveal(self, round: int, attempt: int, members: Sequence[int]) -> Iterable[tuple[int, bytes | str]]: ...


@dataclass(frozen=True)
class Outcome:
    total: Numbers | None  # None: nothing came of it
    lost: dict[int, str]  # client -> why it is not in the sum


def gather(transport: Transport, round: int, clients: Sequence[int], size: int, fewest: int) -> Outcome:
    """The sum over those who stay to the end, and why the others are not in it."""
    lost: dict[int, str] = {}

    def good(answers: Iterable[tuple[int, bytes | str]], length: int) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        for k, answer in answers:
            if isinstance(answer, bytes) and len(answer) == length:
                found[k] = answer
            else:
                lost[k] = answer if isinstance(answer, str) else f"what it sent is not {length} bytes"
        return found

    keys = good(transport.offer(round, clients), KEY_BYTES)
    for attempt in range(ATTEMPTS):
        if len(keys) < max(FEWEST, fewest):
            return nothing(keys, lost, f"{len(keys)} members are left, and {max(FEWEST, fewest)} are needed")
        total, members, arrived = np.zeros(size, np.uint64), list(keys), set[int]()
        for k, sealed in transport.seal(round, attempt, keys):
            if isinstance(sealed, str) or sealed.shape != (size,):
                lost[k] = sealed if isinstance(sealed, str) else "what it sent is not of the right size"
            else:
                total += sealed
                arrived.add(k)
        if len(arrived) < len(members):
            keys = {k: key for k, key in keys.items() if k in arrived}
            continue
        seeds = good(transport.reveal(round, attempt, members), SEED_BYTES)
        if len(seeds) < len(members):  # the others told theirs, and tell no other in this round
            return nothing(keys, lost, "a member was lost in the last step, and nothing can be read without its seed")
        for seed in seeds.values():
            total -= drawn(seed, size)
        return Outcome(total, lost)
    return nothing(keys, lost, f"members were lost in each of {ATTEMPTS} attempts")


def nothing(members: Iterable[int], lost: dict[int, str], reason: str) -> Outcome:
    return Outcome(None, dict.fromkeys(members, reason) | lost)


# --- what is summed ------------------------------------------------------------------------------------------------


class Layout:
    """The numbers of an upload in one row, weighted so that their sums are means: samples times model, losses and
    single numbers, reports of the classes that a client holds, and who holds which. Counts by class stay at home.
    """

    def __init__(self, upload: Tensors, by_samples: bool) -> None:
        self.by_samples = by_samples
        self.like = {name: value.shape for name, value in upload.items() if value.is_floating_point()}
        self.by_class = {name for name, shape in self.like.items() if name.startswith("report/") and len(shape) > 0}
        self.classes = len(upload["report/counts"]) if "report/counts" in upload else 0
        self.size = 1 + self.classes + sum(shape.numel() for shape in self.like.values())

    def row(self, upload: Tensors) -> Tensor:
        samples = upload["samples"].double()
        held = (upload["report/counts"] > 0).double() if self.classes else samples.new_zeros(0)
        parts = [samples.reshape(1), held]
        for name in self.like:
            value, weight = upload[name].double(), self._weight(name, samples)
            if name in self.by_class:
                weight = held.reshape(-1, *[1] * (value.dim() - 1))
            parts.append((weight * value).reshape(-1))
        return torch.cat(parts)

    def means(self, total: Tensor, members: int) -> Tensors:
        """An upload that stands for all: means over samples, and over the clients that hold a class."""
        samples, held = total[0], total[1 : 1 + self.classes]
        whole = torch.cat([samples.reshape(1), held])
        if not torch.equal(whole, whole.round()) or samples < members or bool(((held < 0) | (held > members)).any()):
            raise MaskingError("the sum is not one of sound uploads: a member sent something else")
        found, start = Tensors(), 1 + self.classes
        for name, shape in self.like.items():
            value = total[start : start + shape.numel()].reshape(shape)
            start += shape.numel()
            if name in self.by_class:
                value = value / held.clamp_min(1).reshape(-1, *[1] * (value.dim() - 1))
            else:
                value = value / self._weight(name, samples, members)
            if name.endswith("running_var") and bool((value < -1e-6).any()):
                raise MaskingError(f"the sum is not one of sound uploads: {name} has negative values")
            found[name] = value.clamp_min(0).float() if name.endswith("running_var") else value.float()
        found["samples"] = samples.round().long()
        return found | ({"report/counts": held.round().long()} if self.classes else {})

    def _weight(self, name: str, samples: Tensor, members: int = 1) -> Tensor | int:
        """Of one client or of all: of losses and single numbers it is the samples, whatever a model counts."""
        return samples if self.by_samples or not name.startswith("model/") else members


class One:
    """The fold of a round whose uploads were summed elsewhere: the first of its members brings what stands for all."""

    note: Mapping[str, Any] = {}

    def __init__(self) -> None:
        self.count = 0
        self.model, self.report = Tensors(), Tensors()

    def add(self, client: int, model: Tensors, report: Tensors) -> None:
        self.count += 1
        if self.count == 1:
            self.model, self.report = model, report

    def result(self) -> tuple[Tensors, Tensors]:
        return self.model, {name: value[None] for name, value in self.report.items()}


def answers(federation: Federation, transport: Transport, round: int, clients: Sequence[int]) -> Iterator[Answer]:
    """A round by these steps, as any engine answers it: the first member's upload stands for all, the others' are
    empty.
    """
    from .engines.cpu import Answer

    assert federation.layout is not None
    layout = federation.layout
    outcome = gather(transport, round, clients, layout.size, federation.config.min_clients)
    members, means = [k for k in clients if k not in outcome.lost], Tensors()
    if outcome.total is not None:
        try:
            means = layout.means(decode(outcome.total), len(members))
        except MaskingError as error:
            outcome, members = nothing(members, outcome.lost, str(error)), []
    for k in clients:
        if k in outcome.lost:
            yield Answer(k, {}, {}, outcome.lost[k])
        else:
            upload = means if k == members[0] else {}
            yield Answer(k, upload, {}, bytes=8 * layout.size + KEY_BYTES + SEED_BYTES)


class Rehearsed:
    """The steps among clients of this machine: the numbers of a federation, without its secrets."""

    def __init__(self, engine: Engine, federation: Federation) -> None:
        self.engine, self.federation = engine, federation

    @property
    def restarted(self) -> list[Record]:
        return self.engine.restarted

    @restarted.setter
    def restarted(self, value: list[Record]) -> None:
        self.engine.restarted = value

    def train(self, round: int, clients: Sequence[int], sent: Tensors, memories: Memories) -> Iterator[Answer]:
        here = _Here(self, round, clients, sent, memories)
        for answer in answers(self.federation, here, round, clients):
            answer.memory = here.memories.get(answer.client, {})
            yield answer

    def evaluate(self, tests: Sequence[Test], sent: Tensors, memories: Memories) -> list[Tensors]:
        return self.engine.evaluate(tests, sent, memories)

    def close(self) -> None:
        self.engine.close()


class _Here:
    def __init__(
        self, engine: Rehearsed, round: int, clients: Sequence[int], sent: Tensors, memories: Memories
    ) -> None:
        self.members = {k: Member(k, round) for k in clients}
        self.training = engine.engine.train(round, clients, sent, memories)
        self.federation = engine.federation
        self.rows: dict[int, Tensor | str] = {}
        self.memories: dict[int, Tensors] = {}

    def offer(self, round: int, clients: Sequence[int]) -> Iterator[tuple[int, bytes | str]]:
        for k in clients:
            yield k, self.members[k].public

    def seal(self, round: int, attempt: int, keys: Mapping[int, bytes]) -> Iterator[tuple[int, Numbers | str]]:
        if attempt == 0:
            self._train()
        for k in keys:
            row = self.rows[k]
            try:
                yield k, row if isinstance(row, str) else self.members[k].seal(attempt, keys, row)
            except MaskingError as error:
                yield k, str(error)

    def reveal(self, round: int, attempt: int, members: Sequence[int]) -> Iterator[tuple[int, bytes | str]]:
        for k in members:
            yield k, self.members[k].reveal(attempt)

    def _train(self) -> None:
        assert self.federation.layout is not None
        for answer in self.training:
            reason = answer.error or wire.problem(answer.upload, self.federation.schema)
            self.rows[answer.client] = reason or self.federation.layout.row(answer.upload)
            self.memories[answer.client] = {name: value.clone() for name, value in answer.memory.items()}


# --- what it does not go with --------------------------------------------------------------------------------------


def check(federation: Federation) -> None:
    c, method = federation.config, federation.method
    if federation.exchange == "nothing" or method.pools_data:
        raise ConfigError(f"secure=true: with method={c.method} nothing leaves a client")
    if not method.needs_means_only:
        raise ConfigError(
            f"secure=true: method={c.method} looks at what each client sent, and the server has the sum only"
        )
    for key, chosen, why in (("robust", c.robust, "compares"), ("privacy", c.privacy, "clips")):
        if chosen != "off":
            raise ConfigError(f"secure=true: {key}={chosen} {why} single uploads, and the server has the sum only")
    if getattr(method, "uplink", "gradients") == "probabilities":
        raise ConfigError(
            "secure=true: uplink=probabilities is decoded with each client's own classifier, and the server has none "
            "of them: uplink=gradients"
        )
    if c.compress is not None:
        raise ConfigError(f"secure=true: compress={c.compress} would round numbers that cancel when whole")
    if c.evaluation not in ("central", "off"):
        raise ConfigError(
            f"secure=true: evaluation={c.evaluation} would tell how many samples of each class a client holds out: "
            + unseen_tests(c)
        )
    if federation.per_round < FEWEST:
        raise ConfigError(f"secure=true: {federation.per_round} clients are in a round, and {FEWEST} are the fewest")
    for name, value in federation.upload.items():
        by_class = value.dim() > 0 and "report/counts" in federation.upload
        by_class = by_class and len(value) == len(federation.upload["report/counts"])
        mean = (by_class or value.dim() == 0) and value.is_floating_point()  # a single number: over the samples
        if name.startswith("report/") and not (mean or (by_class and name == "report/counts")):
            raise ConfigError(f"secure=true: method={c.method} reports {name[7:]}, which is no mean over its classes")
    try:
        import cryptography  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(f"secure=true needs keys, pip install 'fedhpro[secure]': {error}") from None
