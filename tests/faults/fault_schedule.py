"""Seeded schedules of faults: what is broken, at which point of a run, and what must come of it."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from fault_ring import FaultRing, Outcome, Running

# What happens to a node or to the link that leads to it.
ACTIONS = ("kill", "halt", "pause", "reset", "half a frame", "full disk", "late joiner")
# When: while the nodes load, while prompts are computed, in the middle of the texts, while a ring is formed anew after an
# earlier fault, and while a node that was asked to end hands its blocks over.
POINTS = ("load", "prefill", "decode", "recovery", "hand-over")
CRITICAL = 1 / 3  # of all faults, those that do not come in the middle of the texts
DOUBLE = 1 / 10  # with another one at the same moment
ENDS_A_NODE = ("kill", "full disk", "late joiner")
LOSES_A_NODE = ("halt", *ENDS_A_NODE)


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        action: of ACTIONS.
        node: number of the node in the ring, 1 is the first secondary; links lead to a node, 0 is the starter.
        point: of POINTS.
        after: of the texts' tokens, when `point` is "decode"; seconds at the other points.
        size: bytes of half a frame, seconds of a pause, relative to the silence that loses a node.
    """

    action: str
    node: int
    point: str
    after: float
    size: float

    def __str__(self) -> str:
        return f"{self.action} {self.node} at {self.point} {self.after:.2f} ({self.size:.2f})"


def schedule(seed: int, n_nodes: int, n_faults: int, actions: Sequence[str] = ACTIONS) -> list[list[Fault]]:
    """Faults in the order in which they come; those of one entry at the same moment."""
    chance = random.Random(seed)
    found: list[list[Fault]] = []
    n = 0
    while n < n_faults:
        is_critical = chance.random() < CRITICAL
        points = ("load", "prefill", "recovery", "hand-over") if is_critical else ("decode",)
        point = chance.choice(
            points if found else tuple(p for p in points if p in ("load", "prefill", "decode")) or ("load",)
        )
        after = chance.random() * (1.0 if point == "decode" else 0.5)
        together = 2 if chance.random() < DOUBLE and n_faults - n > 1 else 1
        found.append([_fault(chance, n_nodes, point, after, actions) for _ in range(together)])
        n += together
    order = {"load": 0, "prefill": 1, "decode": 2, "recovery": 2, "hand-over": 2}
    found.sort(key=lambda faults: (order[faults[0].point], faults[0].after if faults[0].point == "decode" else 2.0))
    return found


def _fault(chance: random.Random, n_nodes: int, point: str, after: float, actions: Sequence[str]) -> Fault:
    action = chance.choice([one for one in actions if one != "full disk" or point == "load"])
    is_of_link = action in ("reset", "half a frame")
    node = chance.randrange(0 if is_of_link else 1, n_nodes)
    return Fault(action, node, point, after, chance.random())


class Saboteur:
    """Carries a schedule out on a ring while a run goes on, in a thread of its own.

    Args:
        n_tokens: that all texts have together in the end.
        silence_s: after which a node is lost.

    Attributes:
        done: the faults that came before the run was over.
    """

    def __init__(
        self, ring: FaultRing, faults: list[list[Fault]], n_tokens: int, silence_s: float, running: Running
    ) -> None:
        self.ring = ring
        self._faults = faults
        self._n_secondaries = len(ring.secondaries)
        self._n_tokens = n_tokens
        self._silence_s = silence_s
        self.running = running
        self.done: list[Fault] = []
        self.errors: list[BaseException] = []
        self._later: list[threading.Timer] = []
        self._thread = threading.Thread(target=self._run, name="saboteur")
        self._thread.start()

    def join(self) -> None:
        self._thread.join()
        for timer in self._later:
            timer.join()
        if self.errors:
            raise self.errors[0]

    def _run(self) -> None:
        try:
            for together in self._faults:
                if not self._reach(together[0]):
                    return
                for fault in together:
                    self.done.append(fault)
                    if fault.point == "hand-over":
                        self.ring.signal((fault.node + 1) % (self._n_secondaries), signal.SIGTERM)
                    self._do(fault)
        except BaseException as e:
            self.errors.append(e)

    def _reach(self, fault: Fault) -> bool:
        """Wait for the point; False if the run ends before."""
        running = self.running
        if fault.point == "load":
            return running.wait_until(lambda: running.state == "LOADING") and not running.over.wait(fault.after)
        if fault.point == "prefill":
            return running.wait_until(lambda: running.state == "RUNNING")
        if fault.point == "decode":
            return running.wait_until(lambda: running.n_tokens >= fault.after * self._n_tokens)
        # Right after the one before, which makes the ring be formed anew, or blocks be handed over.
        return not running.over.wait(fault.after * self._silence_s)

    def _do(self, fault: Fault) -> None:
        ring, index = self.ring, fault.node - 1
        if fault.action == "kill":
            ring.kill(index)
        elif fault.action == "halt":
            ring.signal(index, signal.SIGSTOP)
        elif fault.action == "pause":
            ring.signal(index, signal.SIGSTOP)
            self._later_do(0.6 * fault.size * self._silence_s, lambda: ring.signal(index, signal.SIGCONT))
        elif fault.action == "reset":
            ring.links[fault.node].reset()
        elif fault.action == "half a frame":
            ring.links[fault.node].cut_after(1 + int(fault.size * 3000))
        elif fault.action == "full disk":
            ring.fill_disk(index)
        elif fault.action == "late joiner":
            ring.kill(index)
            self._later_do(fault.size * self._silence_s, lambda: ring.start(index))

    def _later_do(self, after_s: float, action: object) -> None:
        timer = threading.Timer(after_s, action)  # type: ignore[arg-type]
        timer.start()
        self._later.append(timer)


def complaint(outcome: Outcome, expected: list[list[int]], may_be_lost: bool, done: Sequence[Fault] = ()) -> str:
    """What is wrong with a run; "" if nothing is.

    Args:
        expected: ids of an undisturbed ring.
        may_be_lost: whether the run may end with a lost node, each text having a beginning of what it would have had.
        done: the faults that came.

    A text whose same position was under way when two nodes ended one after the other is ended alone: that is what is promised,
    and chance can bring it about.
    """
    for i, (ids, wanted) in enumerate(zip(outcome.ids, expected, strict=False)):
        if ids != wanted[: len(ids)]:
            place = next(n for n, pair in enumerate(zip(ids, wanted, strict=False)) if pair[0] != pair[1])
            return f"wrong tokens: text {i} from token {place} on"
    if outcome.error is not None:
        return "" if may_be_lost else f"lost tokens: {outcome.error}"
    for i, is_alone in enumerate(outcome.is_ended_alone):
        if is_alone and not (_was_there_twice(outcome, i) and sum(one.action in ENDS_A_NODE for one in done) > 1):
            return f"lost tokens: text {i} was ended alone, and was not computed when two nodes ended in a row"
    is_lost = [
        not alone and ids != wanted
        for ids, wanted, alone in zip(outcome.ids, expected, outcome.is_ended_alone, strict=False)
    ]
    return "lost tokens: a text is not whole" if len(outcome.ids) < len(expected) or any(is_lost) else ""


def _was_there_twice(outcome: Outcome, text: int) -> bool:
    """Whether the same position of a text was under way at two losses, and it had got no token from the one to the other."""
    spans = [loss[text] for loss in outcome.losses if text in loss]
    return any(max(a[0], b[0]) < min(a[1], b[1]) and a[2] == b[2] for a, b in pairwise(spans))
