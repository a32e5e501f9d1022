"""What each key may use: tokens per minute and per day, and texts at the same time.

Each number of tokens is a bucket that tokens fall into, of prompts (those that a cache still holds, too) and generated ones,
and that empties evenly: in a minute, or in a day, as many as the limit leave it. A request is refused while it is full. How
much a request will generate is not known before, so it may overfill a bucket; then the key waits for longer.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from mdi.serve.api_errors import ApiError
from mdi.serve.process import ApiKey

PERIODS_S = {"minute": 60.0, "day": 86400.0}


@dataclass
class _Bucket:
    limit: int
    period_s: float
    level: float = 0.0
    at_s: float = 0.0

    def fill(self, n_tokens: int, now_s: float) -> None:
        left = self.level - (now_s - self.at_s) * self.limit / self.period_s
        self.level, self.at_s = max(0.0, left) + n_tokens, now_s

    def wait_s(self, now_s: float) -> float:
        """Seconds until there is room for a token."""
        self.fill(0, now_s)
        return max(0.0, (self.level - self.limit + 1) * self.period_s / self.limit)


@dataclass
class _Use:
    """By one key, since the server began."""

    texts: int  # it may have at the same time; 0: any number
    buckets: dict[str, _Bucket]
    n_texts: int = 0  # now
    n_refused: int = 0
    tokens: Counter[str] = field(default_factory=Counter)  # of prompts, and generated ones


class Quotas:
    """Of all keys, by their names: keys of one name share. An observer of requests. Belongs to one event loop.

    Args:
        now_s: seconds that pass.
    """

    def __init__(self, keys: Iterable[ApiKey], now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self.uses: dict[str, _Use] = {}
        for key in keys:
            limits = {"minute": key.minute_tokens, "day": key.day_tokens}
            buckets = {name: _Bucket(limit, PERIODS_S[name], at_s=now_s()) for name, limit in limits.items() if limit}
            self.uses.setdefault(key.name, _Use(key.texts, buckets))

    @contextmanager
    def begun(self, owner: str, n_texts: int) -> Iterator[None]:
        """A request for texts, which wait or run meanwhile. Raises ApiError if the key may not ask for them now."""
        use = self.uses.get(owner)
        if use is None:
            yield
            return
        self._check_texts(owner, use, n_texts)
        self.check_tokens(owner)
        use.n_texts += n_texts
        try:
            yield
        finally:
            use.n_texts -= n_texts

    def _check_texts(self, owner: str, use: _Use, n_texts: int) -> None:
        if use.texts and use.n_texts + n_texts > use.texts:
            if n_texts > use.texts:
                raise ApiError(
                    400, f"the key {owner} may have {use.texts} texts at the same time, and this request asks for {n_texts}: "
                    "ask for fewer texts in one request", "too_many_texts",
                )  # fmt: skip
            self._refuse(use, f"the key {owner} has {use.n_texts} of its {use.texts} texts at the same time", 1)

    def check_tokens(self, owner: str) -> None:
        """Raises ApiError if the key has used its tokens. Behind a queue, others of the key may have used them meanwhile."""
        use = self.uses.get(owner)
        waits = {} if use is None else {name: one.wait_s(self._now_s()) for name, one in use.buckets.items()}
        name = max(waits, key=lambda one: waits[one], default="")
        if use is not None and name and waits[name] > 0:
            self._refuse(use, f"the key {owner} has used its {use.buckets[name].limit} tokens per {name}", waits[name])

    def _refuse(self, use: _Use, why: str, wait_s: float) -> None:
        use.n_refused += 1
        seconds = math.ceil(max(1.0, wait_s))
        headers = {"retry-after": str(seconds)}  # some clients read the text instead
        raise ApiError(429, f"{why}: try again in {seconds}s", "rate_limit_exceeded", headers=headers)

    def began(self, owner: str, model: str, n_prompt: int) -> None:
        self._count(owner, "prompt", n_prompt)

    def first_token(self, wait_s: float) -> None: ...

    def tokens(self, owner: str, n: int, since_s: float) -> None:
        self._count(owner, "generated", n)

    def ended(self, reason: str) -> None: ...

    def _count(self, owner: str, what: str, n: int) -> None:
        if (use := self.uses.get(owner)) is not None:
            use.tokens[what] += n
            for bucket in use.buckets.values():
                bucket.fill(n, self._now_s())
