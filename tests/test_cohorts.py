"""Texts that are continued together: beam search finds the best ones by its definition, whatever happens to the ring.

The texts of transformers are in references/test_beams.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from families import VOCAB, model_of, prompt
from loopback import Text, ring_of
from mdi.engine.cohort import Beams, Choice, Cohort, EarlyStopping
from mdi.engine.memory import CacheMemory
from mdi.engine.sampling import Row
from mdi.engine.sequence import FAILED, UNMATCHED, SamplingParams
from mdi.engine.sequence import Sequence as TextSequence
from mdi.errors import EngineError, UsageError
from mdi.net.ring import LoopbackRing
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.spec.cluster import standalone
from mdi.spec.options import StarterOptions
from secondaries import cluster_of, secondaries
from test_prefixes import ring_memory
from tiny_checkpoint import write_checkpoint

Logprobs = Callable[[tuple[int, ...]], np.ndarray]  # of the next token behind some ids
FAMILIES = ["Llama-3.1-8B", "Gemma-3-1b-it", "Mistral-7B-v0.1", "deepseek-v3-shape", "pythia-14m"]
PARAMS = SamplingParams(n_tokens=10)


def naive(after: Logprobs, start: tuple[int, ...], params: SamplingParams, beams: Beams) -> list[tuple[int, ...]]:
    """Beam search word by word, over whole texts: all ways to go on, the best of them, and those that have ended."""
    running, ended = [(0.0, ())], []
    for length in range(1, params.n_tokens + 1):
        ways = [
            (score + float(p), (*ids, token))
            for score, ids in running for token, p in enumerate(after((*start, *ids))) if p > -math.inf
        ]  # fmt: skip
        ways.sort(key=lambda way: -way[0])
        ways = ways[: max(2, 1 + len(params.eos_ids)) * beams.n]
        running = []
        for rank, (score, ids) in enumerate(ways):
            if ids[-1] not in params.eos_ids and length < params.n_tokens:
                running.append((score, ids))
            elif rank < beams.n:
                ended.append((score / length**beams.length_penalty, ids))
        running = running[: beams.n]
        ended = sorted(ended, key=lambda one: -one[0])[: beams.n]
        if len(ended) == beams.n and running:
            far = params.n_tokens if beams.early_stopping == "never" and beams.length_penalty > 0 else length
            if beams.early_stopping is True or running[0][0] / far**beams.length_penalty <= ended[-1][0]:
                break
    return [ids[:-1] if ids[-1] in params.eos_ids else ids for _, ids in ended]


def searched(after: Logprobs, start: tuple[int, ...], params: SamplingParams, beams: Beams) -> list[tuple[int, ...]]:
    """The same by a cohort, without a ring."""
    texts = [TextSequence(i, start, params, 1000) for i in range(beams.n)]
    cohort = Cohort(texts, beams)
    while True:
        for text in texts:
            is_last = cohort.take(text.seq_id, after(tuple(text.ids)))
        assert is_last
        if not (choices := cohort.choose()):
            return [one.tokens for one in cohort.ended]
        ids = [text.ids for text in texts]
        for text, choice in zip(texts, choices, strict=True):
            text.ids = [*ids[choice.parent], choice.token]


def formula(n_vocabulary: int, seed: int) -> Logprobs:
    """Logits that follow from the last three ids and their number."""

    def after(ids: tuple[int, ...]) -> np.ndarray:
        random = np.random.default_rng([seed, len(ids), *ids[-3:]])
        logits = random.normal(size=n_vocabulary).astype(np.float32)
        return (logits - np.log(np.exp(logits).sum())).astype(np.float32)

    return after


KINDS = st.sampled_from([True, False, "never"])


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 1000), st.integers(1, 5), st.integers(6, 12), st.integers(1, 9), st.sets(st.integers(0, 3)), KINDS,
    st.sampled_from([-1.0, 0.0, 0.7, 1.0, 3.0]),
)  # fmt: skip
def test_a_cohort_finds_what_beam_search_is_defined_to(
    seed: int, n: int, n_vocabulary: int, n_tokens: int, eos: set[int], kind: EarlyStopping, penalty: float
) -> None:
    params = SamplingParams(n_tokens, eos_ids=frozenset(eos))
    after, beams = formula(n_vocabulary, seed), Beams(n, penalty, kind)
    assert searched(after, (5, 4), params, beams) == naive(after, (5, 4), params, beams)


def naive_groups(
    after: Logprobs, start: tuple[int, ...], params: SamplingParams, beams: Beams
) -> list[tuple[int, ...]]:
    """Diverse beam search over whole texts: groups go on one after the other, each with `n` / `n_groups` texts."""
    size, ended = beams.n // beams.n_groups, []
    groups = [[(0.0, ())] for _ in range(beams.n_groups)]
    for length in range(1, params.n_tokens + 1):
        used: list[int] = []
        for g, running in enumerate(groups):
            ways = [
                (score + float(p) - beams.diversity_penalty * used.count(token), (*ids, token))
                for score, ids in running for token, p in enumerate(after((*start, *ids))) if p > -math.inf
            ]  # fmt: skip
            going: list[tuple[float, tuple[int, ...]]] = []
            new = []
            for rank, (score, ids) in enumerate(sorted(ways, key=lambda way: -way[0])):
                if len(going) == size:
                    break
                if ids[-1] in params.eos_ids:
                    ended += [(score / length**beams.length_penalty, ids)] if rank < size else []
                    continue
                going.append((score, ids))
                new.append(ids[-1])
                if length == params.n_tokens and rank < size:
                    ended.append((score / length**beams.length_penalty, ids))
            used += new
            groups[g] = going
        ended = sorted(ended, key=lambda one: -one[0])[: beams.n]
        if len(ended) == beams.n:
            far = params.n_tokens if beams.early_stopping == "never" and beams.length_penalty > 0 else length
            best = max((score for group in groups for score, _ in group), default=-math.inf)
            if beams.early_stopping is True or best / far**beams.length_penalty <= ended[-1][0]:
                break
    return [ids[:-1] if ids[-1] in params.eos_ids else ids for _, ids in ended]


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 1000), st.sampled_from([(2, 2), (4, 2), (6, 2), (6, 3), (3, 1)]), st.integers(8, 14), st.integers(1, 9),
    st.sets(st.integers(0, 3), max_size=2), KINDS, st.sampled_from([0.0, 0.3, 2.0, 50.0]),
)  # fmt: skip
def test_groups_find_what_diverse_beam_search_is_defined_to(
    seed: int, shape: tuple[int, int], n_vocabulary: int, n_tokens: int, eos: set[int], kind: EarlyStopping, cost: float
) -> None:
    params = SamplingParams(n_tokens, eos_ids=frozenset(eos))
    n, n_groups = shape
    after, beams = formula(n_vocabulary, seed), Beams(n, 1.0, kind, n_groups, cost)
    assert searched(after, (5, 4), params, beams) == naive_groups(after, (5, 4), params, beams)


@pytest.mark.parametrize(("n", "n_groups"), [(4, 3), (2, 4), (4, 0)])
def test_groups_that_cannot_be(n: int, n_groups: int) -> None:
    with pytest.raises(UsageError, match="groups"):
        Beams(n, n_groups=n_groups)


def model_logprobs(family: str) -> Logprobs:
    gpt = model_of(family)

    @torch.no_grad()
    def after(ids: tuple[int, ...]) -> np.ndarray:
        found: np.ndarray = torch.log_softmax(gpt(torch.tensor([ids]))[0, -1, :VOCAB].float(), -1).numpy()
        return found

    return after


@pytest.mark.parametrize("family", FAMILIES)
def test_over_any_ring_the_texts_are_those_of_the_uncached_model(family: str) -> None:
    """Beside other texts, and with prompts that are shared and such that fill no page."""
    prompts = [prompt(70, 1), prompt(5, 2)]
    params = replace(PARAMS, eos_ids=frozenset({3, 50, 71}))
    after = model_logprobs(family)
    wanted = [naive(after, tuple(ids), params, Beams(4)) for ids in prompts]
    with ring_of(model_of(family), 1) as ring:
        alone = ring.generate([prompt(40, 3)], SamplingParams(20))[0].ids
    for n_nodes in (1, 2, 3):
        with ring_of(model_of(family), n_nodes) as ring:
            other = ring.submit(prompt(40, 3), SamplingParams(20))
            found = [[Text(r) for r in ring.engine.submit_beams(ids, params, Beams(4))] for ids in prompts]
            ring.run()
            assert [[tuple(text.ids) for text in texts] for texts in found] == wanted
            assert all(text.n_events == 1 and text.reason in ("eos", "length") for texts in found for text in texts)
            assert other.ids == alone and ring.caches() == [0] * n_nodes


def test_little_memory_changes_no_text() -> None:
    """Two searches that together need more than there is: whole cohorts are put out and let in again."""
    family = "Llama-3.1-8B"
    params = replace(PARAMS, n_tokens=120)
    prompts = [prompt(9, 1), prompt(5, 2)]
    memory = ring_memory(family, 2)
    with ring_of(model_of(family), 2, memory=memory) as ring:
        wanted = [[Text(r) for r in ring.engine.submit_beams(ids, params, Beams(3))] for ids in prompts]
        ring.run()
    nodes = tuple(replace(node, limit_bytes=4 * node.n_bytes(129)) for node in memory.nodes)
    with ring_of(model_of(family), 2, memory=CacheMemory(nodes)) as ring:
        found = [[Text(r) for r in ring.engine.submit_beams(ids, params, Beams(3))] for ids in prompts]
        ring.run()
        assert [[t.ids for t in texts] for texts in found] == [[t.ids for t in texts] for texts in wanted]
        assert ring.engine.scheduler.n_preempted >= 3, "nobody was put out: the test shows nothing"
        with pytest.raises(UsageError) as caught:
            ring.engine.submit_beams(prompts[0], params, Beams(6))
        assert caught.value.code == "memory"


def test_groups_of_beams_differ() -> None:
    """With one beam in each group and a large penalty, no two texts have a token at the same place; with none, all do."""
    family = "Llama-3.1-8B"
    with ring_of(model_of(family), 2) as ring:
        greedy = ring.generate([prompt(40, 1)], replace(PARAMS, temperature=0))[0].ids
        for penalty in (0.0, 100.0):
            beams = Beams(3, n_groups=3, diversity_penalty=penalty)
            requests = ring.engine.submit_beams(prompt(40, 1), PARAMS, beams)
            texts = [Text(request) for request in requests]
            ring.run()
            assert greedy in [text.ids for text in texts]
            at_each = [len(set(tokens)) for tokens in zip(*(text.ids for text in texts), strict=True)]
            assert at_each == [3 if penalty else 1] * PARAMS.n_tokens


class Even:
    """A constraint: only even tokens, until `n` have come; it fails behind token 2."""

    def __init__(self, n: int) -> None:
        self._left, self._has_failed = n, False

    def allowed(self) -> np.ndarray:
        if self._has_failed:
            raise EngineError("no token may follow")
        return np.arange(VOCAB) % 2 == 0

    def take(self, token: int) -> bool:
        assert token % 2 == 0
        self._left, self._has_failed = self._left - 1, token == 2
        return not self._left

    def copy(self) -> Even:
        other = Even(self._left)
        other._has_failed = self._has_failed
        return other

    def n_valid(self, tokens: list[int]) -> int:
        return len(tokens)

    def forced(self) -> list[int]:
        return []


def test_each_text_has_a_constraint_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    family, ids = "Llama-3.1-8B", prompt(40, 1)
    model = model_logprobs(family)

    def after(given: tuple[int, ...]) -> np.ndarray:
        if 2 in given[len(ids) :]:
            return np.full(VOCAB, -np.inf)
        return np.where(np.arange(VOCAB) % 2 == 0, model(given), -np.inf)

    with ring_of(model_of(family), 2) as ring:
        texts = [Text(r) for r in ring.engine.submit_beams(ids, PARAMS, Beams(4), constraint=Even(6))]
        ring.run()
        wanted = naive(after, tuple(ids), replace(PARAMS, n_tokens=6), Beams(4))
        assert [tuple(text.ids) for text in texts] == wanted and {text.reason for text in texts} == {"stop"}
        none = [Text(r) for r in ring.engine.submit_beams(ids, PARAMS, Beams(2), constraint=Nothing(1))]
        ring.run()
        assert [(text.ids, text.reason) for text in none] == [([], UNMATCHED)] * 2
        assert "its grammar failed" not in caplog.text, "it has only come to its end"
        broken = [Text(r) for r in ring.engine.submit_beams(ids, PARAMS, Beams(2), constraint=Broken(1))]
        ring.run()
        assert [(text.ids, text.reason) for text in broken] == [([], UNMATCHED)] * 2
        assert "its grammar failed" in caplog.text and "no such field" in caplog.text


class Nothing(Even):
    def allowed(self) -> np.ndarray:
        raise EngineError("no token may follow")

    def copy(self) -> Nothing:
        return self


class Broken(Nothing):
    def allowed(self) -> np.ndarray:
        raise AttributeError("no such field")


def test_stops_penalties_and_log_probabilities() -> None:
    family, ids = "Llama-3.1-8B", prompt(40, 1)
    with ring_of(model_of(family), 2) as ring:
        (best, *_) = [Text(r) for r in ring.engine.submit_beams(ids, replace(PARAMS, n_logprobs=2), Beams(3))]
        ring.run()
        after = model_logprobs(family)
        wanted = [float(after((*ids, *best.ids[:k]))[token]) for k, token in enumerate(best.ids)]
        assert [own for own, _ in best.logprobs] == pytest.approx(wanted, abs=2e-4)
        assert all(len(top) == 2 for _, top in best.logprobs)

        stop = tuple(best.ids[3:5])
        params = replace(PARAMS, stop_sequences=(stop,), n_logprobs=0)
        texts = [Text(r) for r in ring.engine.submit_beams(ids, params, Beams(3, 0.0))]
        ring.run()
        (stopped,) = [text for text in texts if text.ids == best.ids[:3]]
        assert stopped.reason == "stop" and len(stopped.logprobs) == 3

        requests = ring.engine.submit_beams(
            ids, PARAMS, Beams(3, 0.0), is_stopped=lambda tokens: tokens[-2:] == list(stop)
        )
        texts = [Text(r) for r in requests]
        ring.run()
        assert best.ids[:5] in [text.ids for text in texts if text.reason == "stop"]

        requests = ring.engine.submit_beams(ids, replace(PARAMS, logit_bias=((best.ids[0], -1e30),)), Beams(3))
        texts = [Text(r) for r in requests]
        ring.run()
        assert all(best.ids[0] not in text.ids for text in texts)


def test_a_search_ends_as_a_whole() -> None:
    def fails(rows: Sequence[Row], logits: np.ndarray) -> list[Choice]:
        raise ValueError

    with ring_of(model_of("Llama-3.1-8B"), 2) as ring:
        cancelled = [Text(r) for r in ring.engine.submit_beams(prompt(40, 1), PARAMS, Beams(3))]
        failed = [Text(r) for r in ring.engine.submit_beams(prompt(40, 2), PARAMS, Beams(2), chooser=fails)]
        other = ring.submit(prompt(9, 1), PARAMS)
        cancelled[1].cancel()
        ring.run()
        assert [text.reason for text in cancelled] == ["cancelled"] * 3
        assert [text.reason for text in failed] == [FAILED] * 2
        assert other.reason == "length" and ring.caches() == [0, 0]


def test_a_row_from_before_a_text_lost_its_caches_counts_nothing() -> None:
    """Put out in the middle of a step, all texts are computed again: the step is complete only with the new rows of all."""
    texts = [TextSequence(i, (1, 2), PARAMS, 100) for i in range(2)]
    cohort, row = Cohort(texts, Beams(2)), np.zeros(9, dtype=np.float32)
    assert not cohort.take(0, row)
    for text in texts:
        text.rewind()
    assert not cohort.take(1, row)
    assert cohort.take(0, row)


def test_a_search_that_takes_long_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("mdi.engine.cohort.REPORT_S", -1.0)
    with ring_of(model_of("Llama-3.1-8B"), 2) as ring:
        texts = [Text(r) for r in ring.engine.submit_beams(prompt(40, 1), PARAMS, Beams(3))]
        ring.run()
        assert [text.reason for text in texts] == ["length"] * 3
    told = [line for line in caplog.messages if "are searched" in line]
    assert told == [f"the best texts are searched: {n} of at most 10 tokens" for n in range(1, 10)]


@pytest.mark.parametrize(("n", "penalty"), [(0, 1.0), (33, 1.0), (4, math.inf), (4, math.nan)])
def test_what_beams_cannot_be(n: int, penalty: float) -> None:
    with pytest.raises(UsageError) as caught:
        Beams(n, penalty)
    assert caught.value.code == "value"


def test_a_search_goes_on_over_another_ring_without_caches() -> None:
    """Left after each of the first tokens in turn, in the middle of a step or between two."""
    ids, params = prompt(40, 1), replace(PARAMS, eos_ids=frozenset({3, 50}))
    with ring_of(model_of("Gemma-3-1b-it"), 1) as ring:
        first = [Text(r) for r in ring.engine.submit_beams(ids, params, Beams(3))]
        ring.run()
        for n in range(1, 12, 3):
            seen: list[int] = []

            def leaves(tokens: list[int], n: int = n, seen: list[int] = seen) -> bool:
                seen.append(len(tokens))
                if len(seen) == n:
                    ring.engine.leave(ring.ring.epoch)
                return False

            texts = [Text(r) for r in ring.engine.submit_beams(ids, params, Beams(3), is_stopped=leaves)]
            other = ring.submit(prompt(70, 2), PARAMS)
            ring.run()
            assert other.reason is None, "the ring was not left"
            ring.ring = LoopbackRing(2, epoch=n)
            ring.run()
            assert [text.ids for text in texts] == [text.ids for text in first]
            assert ring.caches() == [0]


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_caches_in_8_bits_are_copied_with_their_scales(kv_dtype: str, tmp_path: Path) -> None:
    """The texts are those that the definition finds with the probabilities of the same run, text by text."""
    checkpoint, n = write_checkpoint(tmp_path / "m"), 3
    options = StarterOptions(ckpt=checkpoint, prompt_style="none", device="cpu", kv_dtype=kv_dtype)
    params = SamplingParams(n_tokens=6)
    start = tuple(3 + k % 40 for k in range(50))
    found = []
    with secondaries(1, tmp_path) as nodes:
        for cluster in (standalone(), cluster_of(nodes)):
            with Run(GivenNodes(cluster), options, 80, n_texts=n) as run:

                def after(ids: tuple[int, ...], run: Run = run) -> np.ndarray:
                    sample, values = run.submit("", ids, SamplingParams(1, temperature=0, n_logprobs=1 << 20)), []
                    take = sample.take
                    sample.take = lambda event: (values.extend(event.logprobs), take(event))  # type: ignore
                    run.read()
                    best = dict(values[0][1])
                    return np.array([best.get(token, -math.inf) for token in range(len(best))])

                samples = run.submit_beams("", start, params, Beams(n), on_texts=[None] * n)
                run.read()
                found.append([tuple(sample.token_ids) for sample in samples])
                eos = run.model.codec.eos_ids
                assert found[-1] == naive(after, start, replace(params, eos_ids=eos), Beams(n))
    assert found[0] == found[1]
