"""What recovery needs from the texts of a run while they wait for a ring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from mdi.recovery.suspects import Span


class Texts(Protocol):
    """What the engine says of its sequences, between two rings."""

    @property
    def last_token_s(self) -> float | None: ...

    @property
    def first_token_s(self) -> float | None: ...

    @property
    def in_flight(self) -> Mapping[int, Span]: ...

    @property
    def n_known(self) -> Mapping[int, int]: ...

    def isolate(self, seq_ids: frozenset[int]) -> None: ...

    def cancel(self, seq_id: int, reason: str) -> None: ...


class NoTexts:
    """Before the first ring is closed."""

    last_token_s = first_token_s = None
    in_flight: Mapping[int, Span] = {}
    n_known: Mapping[int, int] = {}

    def isolate(self, seq_ids: frozenset[int]) -> None: ...

    def cancel(self, seq_id: int, reason: str) -> None: ...
