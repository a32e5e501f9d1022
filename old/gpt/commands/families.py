"""The models of the two earlier systems, made when they are needed: a wrong flag need not wait for torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mdi.stages.model_family import ModelFamily


def gpt2() -> ModelFamily:
    from gpt.families import GPT2Family

    return GPT2Family()


def nano(role: str = "starter") -> ModelFamily:
    from gpt.families import NanoFamily

    return NanoFamily(role)
