"""Secure aggregation over Flower: the steps of masking.py as messages, and a client's side of them.

Between messages a node keeps its key, its seed and its upload in Flower's Context, which does not leave the node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message

from .. import masking, wire
from ..data.sites import SiteError
from ..masking import Member, Numbers
from ..methods.base import Tensors
from .cpu import Answer, Record
from .flower import FlowerEngine, Given, Refused, Site, answered, client_app, from_record, log, to_record, trained

OFFER, SEAL, REVEAL = "query.offer", "train.seal", "query.reveal"
STATE, ROW = "masking", "masking-row"  # the names of what a node keeps


# --- the server ----------------------------------------------------------------------------------------------------


def train(engine: FlowerEngine, round: int, clients: Sequence[int], sent: Tensors) -> Iterator[Answer]:
    nodes = Nodes(engine, sent)
    for answer in masking.answers(engine.federation, nodes, round, clients):
        answer.remembered = answer.client in nodes.remembered
        if answer.error is not None:
            log.warning("client %d is left out of this round: %s", answer.client, answer.error)
        yield answer


class Nodes:
    """The Transport to the nodes of Flower."""

    def __init__(self, engine: FlowerEngine, sent: Tensors) -> None:
        self.engine, self.sent = engine, to_record(sent)
        self.remembered: set[int] = set()

    def offer(self, round: int, clients: Sequence[int]) -> Iterator[tuple[int, bytes | str]]:
        engine = self.engine
        messages = {k: engine.message(OFFER, k, {"round": round}) for k in clients if k in engine.nodes}
        for k in clients:
            if k not in messages:
                yield k, engine.turned_away.get(k, "no node of this client is connected")
        yield from self.told(messages, OFFER, round, "key")

    def seal(self, round: int, attempt: int, keys: Mapping[int, bytes]) -> Iterator[tuple[int, Numbers | str]]:
        engine, memory, layout = self.engine, self.engine.federation.memories, self.engine.federation.layout
        assert layout is not None
        schema: wire.Schema = {"sealed": ((layout.size,), torch.int64)}
        messages = {}
        for k in keys:
            what: Record = {"round": round, "attempt": attempt, "members": list(keys), "keys": list(keys.values())}
            what |= {"generation": memory.generations.get(k, 0)}
            what |= {"held": sorted(r for client, r in memory.pinned if client == k)}
            messages[k] = engine.message(SEAL, k, what, self.sent if attempt == 0 else None)
        for k, reply in engine.ask(messages, engine.deadline):
            try:
                about, tensors = engine.read(reply, engine.name_of(SEAL, round), schema, k)
                if (reason := wire.misfit(tensors, schema)) is not None:
                    raise Refused(reason)
                if attempt == 0:
                    engine.note_memory(k, about)
                    self.remembered |= {k} if about.get("remembered") is True else set()
                yield k, tensors["sealed"].numpy().view(np.uint64)
            except Refused as refused:
                yield k, str(refused)

    def reveal(self, round: int, attempt: int, members: Sequence[int]) -> Iterator[tuple[int, bytes | str]]:
        what = {"round": round, "attempt": attempt}
        yield from self.told({k: self.engine.message(REVEAL, k, what) for k in members}, REVEAL, round, "seed")

    def told(
        self, messages: Mapping[int, Message], kind: str, round: int, name: str
    ) -> Iterator[tuple[int, bytes | str]]:
        for k, reply in self.engine.ask(messages, self.engine.deadline):
            try:
                about, _ = self.engine.read(reply, self.engine.name_of(kind, round), {}, k)
                found = about.get(name)
                yield k, found if isinstance(found, bytes) else f"its reply has no {name}"
            except Refused as refused:
                yield k, str(refused)


# --- the client ----------------------------------------------------------------------------------------------------


@client_app.query("offer")
@answered
def offer(
    site: Site, k: int, context: Context, request: Mapping[str, Any], received: Tensors
) -> tuple[Record, Tensors]:
    member = Member(k, int(request["round"]))
    Given(site, k, context, request).check("the seed", member.round)  # two sums of a round differ by one upload
    forget(context)
    keep(context, member)
    return {"key": member.public}, {}


@client_app.train("seal")
@answered
def seal(site: Site, k: int, context: Context, request: Mapping[str, Any], received: Tensors) -> tuple[Record, Tensors]:
    layout, attempt = site.federation.layout, int(request["attempt"])
    if layout is None:
        raise SiteError("this run has no masks")
    member = kept(context, k, int(request["round"]))
    about: Record = {}
    if ROW not in context.state:
        about, upload = trained(site, k, context, request, received)
        context.state[ROW] = to_record({"row": layout.row(upload)})
    row = from_record(context.state.array_records[ROW])["row"]
    keys = dict(zip((int(j) for j in request["members"]), request["keys"], strict=True))
    try:
        sealed = member.seal(attempt, keys, row)
    except masking.MaskingError as error:
        raise SiteError(str(error)) from None
    keep(context, member)
    return about, {"sealed": torch.from_numpy(sealed.view(np.int64))}


@client_app.query("reveal")
@answered
def reveal(
    site: Site, k: int, context: Context, request: Mapping[str, Any], received: Tensors
) -> tuple[Record, Tensors]:
    member = kept(context, k, int(request["round"]))
    try:
        seed = member.reveal(int(request["attempt"]))
    except masking.MaskingError as error:
        raise SiteError(str(error)) from None
    Given(site, k, context, request).note("the seed", member.round)
    forget(context)
    return {"seed": seed}, {}


def keep(context: Context, member: Member) -> None:
    context.state[STATE] = ConfigRecord(
        {"round": member.round, "secret": member.secret, "attempt": member.attempt, "seed": member.seed}
    )


def kept(context: Context, k: int, round: int) -> Member:
    known = context.state.config_records.get(STATE)
    if known is None or known["round"] != round:
        raise SiteError("it has no key for this round: it was started again, or has told its seed")
    return Member(k, round, known["secret"], known["attempt"], known["seed"])  # type: ignore[arg-type]


def forget(context: Context) -> None:
    for name in (STATE, ROW):
        if name in context.state:
            del context.state[name]
