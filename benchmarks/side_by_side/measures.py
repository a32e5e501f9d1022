"""From the times of tokens to rates, and from rates to ratios. Numbers in, numbers out."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Found = dict[str, float]


def measured(answer: Mapping[str, Any], n_prompt: int) -> Found:
    """What one case says: rates in tokens per second, times in seconds, and what else the system measured itself.

    decode_tokens_per_s: of all sequences, while all of them decode: from the moment when the last one got its first
    token to the moment when the first one ended. per_stream_tokens_per_s: a sequence's share of it. ttft_s: the median
    time to first token. prefill_tokens_per_s: prompt tokens of all sequences until the last one got its first token.
    """
    times: Sequence[Sequence[float]] = answer["times_s"]
    found = {k: float(v) for k, v in answer.items() if k.endswith(("_per_s", "_per_row", "_ready_s")) and v is not None}
    if not times:
        return found
    firsts = [t[0] for t in times]
    found["ttft_s"] = statistics.median(firsts)
    found["prefill_tokens_per_s"] = n_prompt * len(times) / max(firsts)
    rate = decode_rate(times)
    if rate is not None:
        found["decode_tokens_per_s"] = rate
        found["per_stream_tokens_per_s"] = rate / len(times)
    return found


def decode_rate(times: Sequence[Sequence[float]]) -> float | None:
    """Tokens per second of all sequences while all decode; None if there was no such time."""
    begin, end = max(t[0] for t in times), min(t[-1] for t in times)
    if end <= begin:
        return None
    return sum(begin < t <= end for one in times for t in one) / (end - begin)


@dataclass(frozen=True)
class Summary:
    """Median and range of what the rounds gave."""

    median: float
    lowest: float
    highest: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        return cls(statistics.median(values), min(values), max(values), len(values))

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def medians(rounds: Sequence[Found]) -> Found:
    """The median of each number that every round has."""
    keys = [key for key in rounds[0] if all(key in found for found in rounds)]
    return {key: statistics.median(found[key] for found in rounds) for key in keys}


def pair_ratios(
    above: Sequence[Found], below: Sequence[Sequence[Found]], metrics: tuple[str, str], factor: float = 1.0
) -> list[float]:
    """Round by round: factor x above / below, where the largest of several below counts; without any, factor x above.

    Args:
        above: one system's numbers, by round.
        below: the numbers of one or more systems, each by round.
        metrics: which number of the system above, and which of those below.
    """
    n_rounds = min(map(len, [above, *below]))
    return [
        factor * above[r][metrics[0]] / max((b[r][metrics[1]] for b in below), default=1.0) for r in range(n_rounds)
    ]
