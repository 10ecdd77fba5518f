"""Flower's Grid in this process: nodes that answer at once, without a SuperLink or ray.

Two things that Flower's own runtimes set are not public, and are set here: the identity of the task, and message ids.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedhpro.engines.flower import client_app


class LocalGrid(Grid):
    def __init__(self, nodes: int, **node_config: Any) -> None:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
        self.contexts = {
            700 - k: Context(1, 700 - k, {"partition-id": k, "num-partitions": nodes} | node_config, RecordDict(), {})
            for k in range(nodes)
        }
        self.online = list(self.contexts)
        self.replies: dict[str, Message] = {}
        self.numbers = itertools.count(1)
        self.seen: list[Message] = []
        self.meddle: Callable[[Message, Message, Context], Any] = lambda message, reply, context: reply

    def node_of(self, k: int) -> int:
        return 700 - k

    def get_node_ids(self) -> Iterable[int]:
        return list(self.online)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        identifiers = []
        for message in messages:
            identifier = str(next(self.numbers))
            message.metadata.__dict__["_message_id"] = identifier
            self.seen.append(message)
            context = self.contexts[message.metadata.dst_node_id]
            reply = self.meddle(message, client_app(message, context), context)
            if reply is not None:
                self.replies[identifier] = reply
            identifiers.append(identifier)
        return identifiers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        found = [self.replies.pop(i) for i in message_ids if i in self.replies]
        for reply in found:
            if isinstance(reply, Exception):
                raise reply
        return found

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError

    def create_message(self, *arguments: Any, **more: Any) -> Message:
        raise NotImplementedError

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError
