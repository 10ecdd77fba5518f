"""What may watch a run. A callback is any subclass; every hook is optional."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .federation import Federation
    from .runs import Result


class Callback:
    def start(self, federation: Federation, result: Result) -> None:
        """Before the first round, also of a resumed run, whose history the result then holds."""

    def client(self, round: int, done: int, total: int) -> None:
        """After each client of a round."""

    def round(self, record: dict[str, Any]) -> None:
        """After each round, when its record is written and its checkpoint saved."""

    def end(self, result: Result) -> None:
        """After the last round, or after an interruption."""
