"""What another program computes of the same GGUF file: token ids, and the best tokens of a few texts, beside those of a run."""

from __future__ import annotations

import importlib.util
import json
import math
import queue
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdi.engine.sequence import Events, TokenLogprobs, wait_for_event
from mdi.errors import Code, EngineError, UsageError
from mdi.files import module_environment
from mdi.run.run import Run
from mdi.spec.decode import shown

# Words, code, numbers, and letters that are not English.
TEXTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10,",
    "Übermäßig große Wörter: 你好世界, привет мир,",
)
N_NEW = 12  # greedy tokens behind each
N_BEST = 10
ROOM = 128  # positions of a text, enough for each byte of those above
# Both programs round activations to 8 bits, each in its own way: the best tokens of files in 4 and 8 bits then change places
# where their log probabilities are less apart than this, natural logarithms. Another model differs by several. Two published
# models differed by 0.3 at most, and by 0.04 on average.
CLOSE, CLOSE_ON_AVERAGE = 0.7, 0.2
N_SHOWN = 5

Best = Sequence[tuple[int, float]]  # ids with log probabilities, the best one first


@dataclass(frozen=True)
class Other:
    """What the other program says of a text.

    Attributes:
        ids: of the text, and greedy ones behind it.
        best: at each position, what follows.
    """

    ids: list[int]
    n_prompt: int
    best: list[Best]


@dataclass(frozen=True)
class Difference:
    """A position with another best token.

    Attributes:
        here, there: its best tokens in this program and the other one.
        gap: how much less probable than its own best each one finds the other's, the larger of both; infinity: it is not among
            the best of one.
    """

    text: int
    position: int
    here: tuple[int, float]
    there: tuple[int, float]
    gap: float


@dataclass(frozen=True)
class Comparison:
    """Attributes:
    other: name and version of the other program.
    other_ids: texts, by number, whose ids differ, with those of both.
    apart: of the other's best token at each position, how much its log probability differs; infinity: it is not among the best.
    """

    other: str
    n_texts: int
    other_ids: dict[int, tuple[list[int], list[int]]]
    differences: list[Difference]
    apart: list[float]

    @property
    def is_ok(self) -> bool:
        """Whether no more differs than rounding explains."""
        is_near = all(one.gap < CLOSE for one in self.differences) and self.mean_apart < CLOSE_ON_AVERAGE
        return is_near and not self.other_ids

    @property
    def mean_apart(self) -> float:
        return sum(self.apart) / len(self.apart)


def other_of(file: Path, texts: Sequence[str] = TEXTS) -> tuple[str, list[Other]]:
    """Have llama.cpp compute texts with a GGUF file, in a process of its own.

    Returns:
        its name and version, and what it says of each text.

    Raises:
        UsageError: llama-cpp-python is not installed; EngineError: it cannot do it.
    """
    if importlib.util.find_spec("llama_cpp") is None:
        raise UsageError(
            f"llama-cpp-python is not installed for {sys.executable}: {sys.executable} -m pip install llama-cpp-python "
            "(it compiles llama.cpp, which takes minutes)",
            code=Code.LIBRARY,
        )
    asked = {"file": str(file), "texts": list(texts), "n_new": N_NEW, "n_best": N_BEST}
    done = subprocess.run(
        [sys.executable, "-m", "mdi.run.llama_cpp_ids"], input=json.dumps(asked), capture_output=True, text=True, check=False,
        env=module_environment(),
    )  # fmt: skip
    try:
        told = json.loads(done.stdout.splitlines()[-1])
        found = [Other(one["ids"], one["n_prompt"], one["best"]) for one in told["texts"]]
        return f"llama-cpp-python {told['version']}", found
    except (IndexError, ValueError, TypeError, KeyError):
        how = f"exit status {done.returncode}"
        if done.returncode < 0:
            how = f"signal {signal.Signals(-done.returncode).name}: its build may be for another processor"
        said = (done.stderr.strip().splitlines() or [how])[-1]
        raise EngineError(f"llama.cpp cannot compute with {file.name} ({how}): {shown(said)}") from None


def compare(run: Run, other: str, others: Sequence[Other], texts: Sequence[str] = TEXTS) -> Comparison:
    """Compute the same ids over an open run, and look at every position. Raises MdiError: what has ended the run."""
    other_ids = {}
    differences, apart = [], []
    for number, (text, theirs) in enumerate(zip(texts, others, strict=True)):
        ids = run.model.codec.encode(text)
        if ids != theirs.ids[: theirs.n_prompt]:
            other_ids[number] = ids, theirs.ids[: theirs.n_prompt]
        ours = _best_of(run, theirs.ids)
        for position, (here, there) in enumerate(
            zip(ours, theirs.best, strict=False)
        ):  # nothing follows their last token here
            apart.append(abs(dict(here).get(there[0][0], math.inf) - there[0][1]))
            if here[0][0] != there[0][0]:
                gap = max(_behind(here, there[0][0]), _behind(there, here[0][0]))
                differences.append(Difference(number, position, (*here[0],), (*there[0],), gap))
    return Comparison(other, len(texts), other_ids, differences, apart)


def _behind(best: Best, token: int) -> float:
    return best[0][1] - dict(best).get(token, -math.inf)


def _best_of(run: Run, ids: Sequence[int]) -> list[Best]:
    """At each position but the last."""
    events: Events = queue.SimpleQueue()
    run.engine.submit_scores(ids, events, n_best=N_BEST)
    found: list[TokenLogprobs] = []
    while True:
        event = wait_for_event(events)
        found += event.logprobs
        if event.finish_reason is not None:
            break
    if event.finish_reason != "length":
        run.raise_failure()
        raise EngineError(f"a text was not computed: {event.finish_reason}")
    return [best for _, best in found]


def to_json(found: Comparison) -> dict[str, Any]:
    def number(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "ok": found.is_ok, "other": found.other, "n_texts": found.n_texts, "n_positions": len(found.apart),
        "other_ids": [{"text": text, "here": here, "there": there} for text, (here, there) in found.other_ids.items()],
        "differences": [{**vars(one), "gap": number(one.gap)} for one in found.differences],
        "mean_apart": number(found.mean_apart), "most_apart": number(max(found.apart)),
    }  # fmt: skip


def lines(found: Comparison, run: Run, texts: Sequence[str] = TEXTS) -> list[str]:
    """For people."""
    codec = run.model.codec
    n_same = len(found.apart) - len(found.differences)
    said = [
        f"{run.model.weights.model.name} beside {found.other}, {found.n_texts} texts (both round activations, so small "
        "differences are no fault)",
        f"token ids         equal in {found.n_texts - len(found.other_ids)} of {found.n_texts} texts",
        f"best tokens       equal at {n_same} of {len(found.apart)} positions",
        f"log probability   of its best token: {found.mean_apart:.3f} apart on average, {max(found.apart):.3f} at most",
    ]
    for number, (here, there) in found.other_ids.items():
        said.append(f"text {number + 1} {texts[number]!r}: ids here {here}, there {there}")
    for one in found.differences[:N_SHOWN]:
        best = [
            f"{codec.token_bytes(i).decode(errors='replace')!r} ({log_prob:.2f})"
            for i, log_prob in (one.here, one.there)
        ]
        why = "as close as rounding explains" if one.gap < CLOSE else "more than rounding explains"
        said.append(f"text {one.text + 1}, behind token {one.position + 1}: here {best[0]}, there {best[1]}: {why}")
    if len(found.differences) > N_SHOWN:
        said.append(f"... and {len(found.differences) - N_SHOWN} more positions")
    if found.is_ok:
        said.append("No problems found: both compute the same model.")
    else:
        said.append("They compute different models or texts. Please report it with these lines.")
    return said
