"""How a system answers: it loads once, then runs the cases that arrive on its stdin, one JSON object per line.

    -> {"n_nodes": 2, ...}                                  what to load; the first line
    <- {"ready": true, ...}
    -> {"case": {"n_sequences": 8, "n_prompt": 16, "n_new": 48}}
    <- {"times_s": [[0.1, 0.2, ...], ...]}                  when each sequence got its tokens, from the case's begin on
    -> {"end": true}
    <- {"peak_rss_bytes": ...}

An error is answered with {"error": "..."}, and ends the process. What libraries print goes to stderr.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Case:
    """What is to be generated: `n_new` tokens for each of `n_sequences` prompts of `n_prompt` tokens, greedily."""

    n_sequences: int
    n_prompt: int
    n_new: int

    @property
    def n_positions(self) -> int:
        return self.n_prompt + self.n_new

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    def prompt(self, index: int) -> list[int]:
        """Token ids of one prompt; each begins differently, so that no system can share a prefix."""
        return [(index * 37 + i * 11) % 251 + 1 for i in range(self.n_prompt)]


class System(Protocol):
    """What `serve` needs of a system."""

    def run(self, case: Case) -> dict[str, Any]:
        """Run a case; {"times_s": ...}, and what else was measured."""

    def end(self) -> dict[str, Any]:
        """Give everything back; what was measured over all cases."""


def serve(load: Callable[[dict[str, Any]], System]) -> None:
    """Answer the lines of stdin until they end. `load` makes the system from the first line's object."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library that prints must not be taken for an answer

    def answer(found: dict[str, Any]) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    system: System | None = None
    try:
        for line in sys.stdin:
            request = json.loads(line)
            if system is None:
                system = load(request)
                answer({"ready": True})
            elif "case" in request:
                answer(system.run(Case(**request["case"])))
            else:
                found, system = system.end(), None
                answer({"peak_rss_bytes": peak_rss_bytes(), **found})
                return
    except BaseException as e:
        answer({"error": f"{type(e).__name__}: {e}".splitlines()[0]})
        raise
    finally:
        if system is not None:
            system.end()


def peak_rss_bytes() -> int:
    """The most memory that this process has held; 0 where the system does not tell."""
    try:
        found = re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0
