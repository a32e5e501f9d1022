"""One set of nodes for run after run, and texts that come and are cancelled: no threads, sockets and files grow."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mdi.engine.sequence import SamplingParams
from mdi.run.local import LocalRing
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.run.texts import SampleReader
from mdi.spec.options import StarterOptions
from serve_client import Held
from tiny_checkpoint import write_checkpoint

N_SAMPLES = 6  # of what the processes hold
PROMPT = "Every node keeps a cache for each sequence."

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what a process holds is read from /proc")


class Nodes:
    """Two secondaries as processes, and one starter after the other in this one."""

    def __init__(self, ring: LocalRing, checkpoint: Path) -> None:
        self._ring, self._checkpoint = ring, checkpoint

    def starter(self) -> Run:
        options = StarterOptions(
            ckpt=self._checkpoint, prompt_style="none", device="cpu", placement="even", wait_s=60.0, draft="none"
        )
        return Run(GivenNodes(self._ring.cluster), options, 40)

    def held(self) -> list[Held]:
        gc.collect()
        return [Held.of(pid) for pid in (os.getpid(), *self._ring.pids)]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", with_end=False)
    with LocalRing(3, None, 1, None, False, False) as ring:
        yield Nodes(ring, checkpoint)


def grown(samples: list[list[Held]]) -> list[str]:
    """What every process holds more of in each of the last samples than in any of the first, after the very first."""
    half = len(samples) // 2
    return [
        f"process {i}: {name}"
        for i in range(len(samples[0]))
        for name in ("threads", "sockets", "files")
        if min(getattr(one[i], name) for one in samples[half:]) > max(getattr(one[i], name) for one in samples[1:half])
    ]


def test_growth_is_seen() -> None:
    quiet, more = [Held(1, 5, 4, 10)], [Held(1, 6, 5, 11)]
    assert grown([quiet] * 6) == grown([more, *[quiet] * 5]) == grown([*[quiet] * 4, more, quiet]) == []
    assert len(grown([*[quiet] * 3, *[more] * 3])) == 3


@pytest.mark.slow
def test_nothing_grows_from_run_to_run(nodes: Nodes) -> None:
    samples, texts = [], set()
    for n in range(2 * N_SAMPLES):
        with nodes.starter() as run:
            text = run.submit("The ring", run.model.codec.encode_prompt("The ring"), SamplingParams(6, 0.0))
            run.read()
            run.close()
        texts.add(tuple(text.token_ids))
        if n % 2:
            samples.append(nodes.held())
    assert len(texts) == 1 and grown(samples) == []


def test_nothing_grows_while_texts_come_and_are_cancelled(nodes: Nodes) -> None:
    chance, samples = random.Random(1), []
    with nodes.starter() as run:
        prompt = run.model.codec.encode_prompt(PROMPT)
        for _ in range(N_SAMPLES):
            reader = SampleReader()
            params = [SamplingParams(chance.randint(1, 30), 0.8) for _ in range(10)]
            texts = [run.submit("", prompt, one, reader=reader) for one in params]
            for text in texts:
                if chance.random() < 0.7:
                    text.cancel()
            reader.read()
            samples.append(nodes.held())
        run.close()
    assert grown(samples) == []
