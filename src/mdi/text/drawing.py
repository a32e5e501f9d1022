"""How a model's tokens are drawn where a request or a flag does not say it."""

from __future__ import annotations

import math
from collections.abc import Mapping

# Where a model's publisher says nothing. Of 32 answers of SmolLM2-135M-Instruct to a question of knowledge 21 were right with
# such values, and 11 with a temperature of 1 and nothing else. `top_k` 0 is all tokens.
OWN: Mapping[str, float] = {"temperature": 0.8, "top_p": 1.0, "top_k": 0, "min_p": 0.05, "repetition_penalty": 1.0}
_NEUTRAL = {**OWN, "temperature": 1.0, "min_p": 0.0}
_MOST = {"temperature": 2, "top_p": 1, "top_k": 1 << 31, "min_p": 1, "repetition_penalty": 10}
_CHOOSING = ("temperature", "top_p", "top_k", "min_p")


def drawing_of(generation: Mapping[str, object]) -> dict[str, float]:
    """temperature, top_p, top_k, min_p and repetition_penalty of a model, from the object in its generation_config.json.

    If it chooses tokens by one of the first four, those that it leaves out have no effect; else they are our own. A value that
    makes no sense counts as left out.
    """
    stated = {name: _number(name, generation.get(name)) for name in OWN}
    found = {name: value for name, value in stated.items() if value is not None}
    return {**(_NEUTRAL if any(name in found for name in _CHOOSING) else OWN), **found}


def _number(name: str, value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    if not 0 <= value <= _MOST[name] or (value == 0 and name in ("top_p", "repetition_penalty")):
        return None
    return int(value) if name == "top_k" else float(value)
