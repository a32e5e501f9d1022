"""Texts of which all tokens are known: their rows are pooled, or their tokens scored, and none is drawn."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from mdi.serve.api_errors import ApiError
from mdi.serve.api_state import ApiState
from mdi.serve.engine_client import TextEvent
from mdi.serve.models import LoadedModel

TOGETHER = 16  # texts of one request in the ring, or that wait for it


async def known_texts(
    api: ApiState,
    model: LoadedModel,
    owner: str,
    texts: Sequence[Sequence[int]],
    known: Mapping[str, Any],
    n_together: int = TOGETHER,
) -> AsyncIterator[tuple[int, TextEvent]]:
    """The number of each text, and its events.

    Args:
        known: what is wanted, see mdi.serve.backend.
        n_together: texts that are computed at the same time.

    Raises:
        ApiError: the engine could not go on.
    """
    asked = {"model": model.name, "adapter": model.adapter, "owner": owner, "grammar": None, "known": known}
    for first in range(0, len(texts), n_together):
        some = texts[first : first + n_together]
        with api.engine.generate([{**asked, "ids": list(ids)} for ids in some]) as running:
            async for index, event in running:
                if event.finish_reason not in (None, "length"):
                    raise ApiError(500, "the nodes could not go on with this text", f"engine_{event.finish_reason}")
                yield first + index, event


async def scores_of(
    api: ApiState, model: LoadedModel, owner: str, texts: Sequence[Sequence[int]], n_best: int
) -> list[list[Any]]:
    """Of each text, [logprob, [[token, logprob], ...]] of all its tokens but the first: its own, and the best ones."""
    found: list[list[Any]] = [[] for _ in texts]
    longer = [i for i, ids in enumerate(texts) if len(ids) > 1]
    async for index, event in known_texts(api, model, owner, [texts[i] for i in longer], {"n_best": n_best}):
        found[longer[index]] += event.logprobs or []
    return found
