"""The scheme of mdi.engine.speculation in simulated time: what an ideal starter would reach, which knows all beforehand, and
what scheduler and speculation reach, which learn times and rates.

A frame with the known token and guesses, or with guesses alone, goes through nodes that take t * price(rows) each, one frame
after the other, and links between them. When it is back, its rows are judged in order. At the first wrong guess a new frame
leaves with the right token, and what is behind it in the ring is void, but still takes time there.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence

import on_path  # noqa: F401
from mdi.engine.scheduler import Scheduler
from mdi.engine.sequence import Plan, SamplingParams
from mdi.engine.sequence import Sequence as Text
from mdi.engine.speculation import Speculation

Price = Callable[[int], float]  # of so many rows, 1 for one


def simulated_s(
    is_right: Sequence[bool], n_nodes: int, stage_s: float, link_s: float, price: Price, n_rows: int, n_frames: int
) -> float:
    """Seconds of a text, from one token to the last.

    Args:
        is_right: of each token behind the first one, whether its guess is right.
        n_rows: of a frame; n_frames: of the text that may be in the ring.
    """
    free = [0.0] * n_nodes
    flying: deque[tuple[float, int, int, int]] = deque()  # back at, first token that it gives, rows, turn
    now, known, sent, turn, n_live = 0.0, 0, 0, 0, 0
    while known < len(is_right):
        while n_live < n_frames and sent < len(is_right):
            rows = min(n_rows, len(is_right) - sent)
            at, rows_s = now, stage_s * price(rows)
            for node, free_at in enumerate(free):
                at = free[node] = (free_at if free_at > at else at) + rows_s
                at += link_s
            flying.append((at, sent, rows, turn))
            sent, n_live = sent + rows, n_live + 1
        at, first, rows, sent_in = flying.popleft()
        now = max(now, at)
        if sent_in != turn:
            continue
        n_live -= 1
        for token in range(first, first + rows):
            known = token + 1  # drawn; the next row counts if its guess was this token
            if not is_right[token]:
                if sent > known:
                    sent, turn, n_live = known, turn + 1, 0
                break
    return now


def best(
    is_right: Sequence[bool], n_nodes: int, stage_s: float, link_s: float, price: Price, most_rows: int
) -> tuple[float, int, int]:
    """Tokens per second with the best number of rows, and all frames that do not wait for each other; and these numbers.

    Fewer frames are never better: one that waits for no other delays nothing.
    """
    found = []
    for n_rows in range(1, most_rows + 1):
        stage = stage_s * price(n_rows)
        most = max(1, int(n_nodes * (stage + link_s) / stage)) if n_nodes > 1 else 1
        time_s = simulated_s(is_right, n_nodes, stage_s, link_s, price, n_rows, most)
        found.append((len(is_right) / time_s, n_rows, most))
    return max(found)


N_IDS = 1000


class Oracle:
    """Guesses that are right with a probability, each by itself."""

    def __init__(self, truth: Sequence[int], n_prompt: int, p: float, seed: int) -> None:
        self._truth, self._n_prompt, self._p, self._rng = truth, n_prompt, p, random.Random(seed)

    def learn(self, ids: list[int]) -> bool:
        return True

    def propose(self, ids: list[int], n: int) -> list[int]:
        begin = len(ids) - self._n_prompt
        right = self._truth[begin : begin + n]
        return [token if self._rng.random() < self._p else N_IDS + 1 for token in right]

    def close(self) -> None:
        """Nothing is kept."""


def learned_speed(
    stages_s: Sequence[float], link_s: float = 0.0, p: float | None = 0.8, n_tokens: int = 2000, most_rows: int = 4,
    price: Callable[[int], float] = lambda n: 1 + 0.1 * (n - 1), n_places: int | None = None, n_texts: int = 1,
) -> tuple[float, Scheduler]:  # fmt: skip
    """Tokens per second of all texts of a simulated ring, whose guesses are right with probability p; None guesses nothing.

    Args:
        n_places: frames that the ring holds, with those of guesses; None: as many as the engine has. A frame for each node has
            known tokens.
    """
    n_nodes = len(stages_s)
    scheduler = Scheduler()
    scheduler.rewind(n_nodes, None, n_places or (2 * n_nodes if n_nodes > 1 else 1))
    speculation = Speculation(most_rows, kinds=frozenset({"lookup"}))
    speculation.begin_ring(len(stages_s))
    scheduler.guesser = speculation if p is not None else None
    truth = [random.Random(3).randrange(N_IDS) for _ in range(n_tokens)]
    texts = [Text(i, (1,), SamplingParams(n_tokens=n_tokens, temperature=0), 10**6) for i in range(n_texts)]
    for text in texts:
        scheduler.submit(text)
        if p is not None:
            speculation.begin(text, None)
            speculation.texts[text.seq_id].sources["lookup"] = Oracle(truth, 1, p, text.seq_id)
    now, busy, count, n_drawn = 0.0, 0.0, 0, 0
    free = [0.0] * len(stages_s)
    events: list[tuple[float, int, int, Plan]] = []

    def send() -> None:
        nonlocal count
        while (plan := scheduler.schedule()) is not None:
            if not plan.is_plain or speculation.is_watching(plan.number):
                speculation.sent(plan, now)
            count += 1
            heapq.heappush(events, (now, count, 0, plan))

    send()
    while scheduler.has_work:
        now, _, node, plan = heapq.heappop(events)
        if node < len(stages_s):
            n_rows = sum(part.n_rows for part in plan.slices)
            time_s = stages_s[node] * price(n_rows) if n_rows else 0.0
            free[node] = max(now, free[node]) + time_s
            busy += time_s if node == 0 else 0.0
            count += 1
            heapq.heappush(events, (free[node] + link_s, count, node + 1, plan))
            continue
        tokens = {}
        _, are_live = scheduler.due(plan.number)
        for part, is_live in zip(plan.slices, are_live, strict=True):
            if is_live:
                begin = part.start + part.n_rows - part.n_logits  # the prompt has one token
                tokens[part.seq_id] = truth[begin : begin + part.n_logits]
                for i, token in enumerate(part.ids[part.n_rows - part.n_logits + 1 :]):
                    if token != tokens[part.seq_id][i]:
                        del tokens[part.seq_id][i + 1 :]
                        break
        scheduler.update(plan.number, tokens)
        n_drawn += sum(map(len, tokens.values()))
        if plan.number in speculation.under_way:
            speculation.returned(plan.number, now, busy, sum(map(len, tokens.values())))
        send()
    assert all(text.generated == truth for text in texts)
    return n_texts * n_tokens / now, scheduler
