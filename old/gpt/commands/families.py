"""The models of the two earlier systems, made when they are needed: a wrong flag need not wait for torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mdi.node.kind import ModelKind


def gpt2() -> ModelKind:
    from gpt.kinds import GPT2Kind

    return GPT2Kind()


def nano(role: str = "starter") -> ModelKind:
    from gpt.kinds import NanoKind

    return NanoKind(role)
