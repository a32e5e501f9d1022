"""The engine over whole rings in one process: the ids of litgpt's uncached model, whatever the ring and the other texts."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from litgpt.model import GPT

from families import CONTEXT, FAMILIES, VOCAB, greedy, model_of, prompt
from loopback import CPU, DEADLINE_S, InProcessRing, Text, hidden_rows, ring_of, stages_of
from mdi.engine.memory import CacheMemory, NodeCaches
from mdi.engine.rows import ArrayRows, TensorRows
from mdi.engine.scheduler import Scheduler
from mdi.engine.sequence import FAILED, SamplingParams, Sequence
from mdi.engine.starter import StarterEngine
from mdi.engine.worker import SecondaryLoop
from mdi.errors import EngineError, NodeLostError, RingEndedError, UsageError
from mdi.net.ring import LoopbackRing
from mdi.net.wire import Frame, Slice
from mdi.stages.torch_stage import Stage, StarterStage
from tensor_frames import frame_of, rows_of
from tolerance import assert_alike

GREEDY = SamplingParams(n_tokens=12, temperature=0)
SAMPLED = SamplingParams(n_tokens=12, temperature=0.9, top_k=40, top_p=0.95, seed=7)
LLAMA = "Llama-3.1-8B"


def reference(family: str, prompts: list[list[int]], n_tokens: int) -> list[list[int]]:
    return [greedy(model_of(family), p, n_tokens) for p in prompts]


N_NODES = (1, 2, 3, 5)
CORNERS = ((1, 7), (2, 2), (3, 7), (5, 1))  # nodes, texts


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        (LLAMA, tuple(itertools.product(N_NODES, (1, 2, 3, 7)))),
        *((family, CORNERS) for family in ("pythia-14m", "Gemma-3-1b-it", "deepseek-v3-shape")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_greedy_equals_the_uncached_model_for_any_ring_and_number_of_sequences(
    family: str, sizes: tuple[tuple[int, int], ...]
) -> None:
    lengths = [3, 1, 20, 2, 70, 9, 13]
    prompts = [prompt(n, seed) for seed, n in enumerate(lengths)]
    expected = reference(family, prompts, 12)
    for n_nodes in N_NODES:
        with ring_of(model_of(family), n_nodes) as ring:
            for n_sequences in (texts for nodes, texts in sizes if nodes == n_nodes):
                texts = ring.generate(prompts[:n_sequences], GREEDY)
                assert [t.ids for t in texts] == expected[:n_sequences], (n_nodes, n_sequences)
                assert {t.reason for t in texts} == {"length"}
                assert ring.caches() == [0] * n_nodes


@torch.no_grad()
def assert_logprobs_of(gpt: GPT, prompt_ids: list[int], text: Text) -> None:
    """A wrong number need not change the best token: all that are told must be those of the uncached model."""
    wanted = torch.log_softmax(gpt(torch.tensor([[*prompt_ids, *text.ids]]))[0, len(prompt_ids) - 1 : -1], dim=-1)
    assert len(text.logprobs) == len(text.ids)
    for row, token, (own, best) in zip(wanted, text.ids, text.logprobs, strict=True):
        assert own == pytest.approx(float(row[token]), abs=2e-3)
        assert [p for _, p in best] == pytest.approx(row.topk(len(best)).values.tolist(), abs=2e-3)
        assert [float(row[i]) for i, _ in best] == pytest.approx([p for _, p in best], abs=2e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_over_three_stages_with_different_prompts_in_flight(family: str) -> None:
    prompts = [prompt(n, 50 + n) for n in (1, 17, 34)]
    with ring_of(model_of(family), 3, chunk_rows=16) as ring:
        texts = ring.generate(prompts, replace(GREEDY, n_logprobs=5))
    assert [t.ids for t in texts] == reference(family, prompts, 12)
    for text, ids in zip(texts, prompts, strict=True):
        assert_logprobs_of(model_of(family), ids, text)


@pytest.mark.parametrize("family", [LLAMA, "Gemma-2-9b", "Gemma-3-1b-it", "Mistral-7B-v0.1"])
def test_long_prompts_go_in_chunks_while_others_decode(family: str) -> None:
    prompts = [prompt(146, 1), prompt(2, 2), prompt(140, 3)]
    with ring_of(model_of(family), 3) as ring:
        texts = ring.generate(prompts, SamplingParams(n_tokens=10, temperature=0))
    assert [t.ids for t in texts] == reference(family, prompts, 10)


def test_more_nodes_than_blocks_but_the_starter_holds_none() -> None:
    gpt = model_of(LLAMA)
    prompts = [prompt(5, 4), prompt(8, 5)]
    with ring_of(gpt, 6, cuts=(0, 1, 2, 3, 4)) as ring:
        texts = ring.generate(prompts, GREEDY)
        assert ring.caches() == [0] * 6
    assert [t.ids for t in texts] == reference(LLAMA, prompts, 12)


def test_sampling_gives_the_same_ids_on_any_ring_and_in_any_batch() -> None:
    prompts = [prompt(n, n) for n in (4, 1, 30)]
    results = []
    for n_nodes in (1, 2, 3, 5):
        with ring_of(model_of(LLAMA), n_nodes) as ring:
            results.append([t.ids for t in ring.generate(prompts, SAMPLED)])
    assert all(r == results[0] for r in results)
    with ring_of(model_of(LLAMA), 2) as ring:
        alone = ring.generate(prompts[:1], SAMPLED)[0].ids
        other_seed = ring.generate(prompts[:1], SamplingParams(n_tokens=12, temperature=0.9, seed=8))[0].ids
    assert alone == results[0][0] and other_seed != alone


class Formula:
    """A starter's stage whose logits follow from the last token alone, by a formula: the same on every machine."""

    returned_width = 1
    row_in = row_out = hidden_rows(1)
    is_head_shared = False

    def __init__(self) -> None:
        self.caches = self

    def rearrange(self, freed: tuple[int, ...], copies: tuple[tuple[int, int], ...]) -> None:
        pass

    def clear(self) -> None:
        pass

    def embed(self, ids: np.ndarray, slices: object = None) -> np.ndarray:
        return ids[:, None].astype(np.float32)

    def __call__(self, x: np.ndarray, slices: object) -> np.ndarray:
        return x

    def head(self, x: np.ndarray) -> np.ndarray:
        return (((np.arange(300)[None, :] * 37 + x * 101) % 307 - 153) / 32).astype(np.float32)


GOLDEN_IDS: list[int] = [193, 203, 126, 104, 114, 45, 43, 48, 209, 167, 191, 167, 166, 19, 138, 287]


@pytest.mark.parametrize("n_prompt", [1, 3, 9])
@pytest.mark.parametrize("n_before", [0, 1, 5])
def test_a_seed_always_means_the_same_text(n_prompt: int, n_before: int) -> None:
    """Draws are counted from the first new token on: not from the prompt's begin, and not from where a run was resumed."""
    engine = StarterEngine(Formula(), Scheduler(chunk_rows=4), 100, ArrayRows())
    params = SamplingParams(n_tokens=len(GOLDEN_IDS), temperature=0.9, top_k=40, top_p=0.95, seed=7)
    begun = GOLDEN_IDS[:n_before]
    request = engine.submit([*range(n_prompt - 1), 11], params, generated=begun)
    engine.run(LoopbackRing(1))
    found = [token for event in request for token in event.tokens]
    assert [*begun, *found] == GOLDEN_IDS


class NoVerdict:
    """A verifier that is never through. The run ends with the first text."""

    is_untrue = False

    def __init__(self, engine: StarterEngine) -> None:
        self._engine = engine

    def returned(self, seq_id: int, start: int, rows: object) -> None: ...

    def holds(self, seq_id: int) -> bool:
        self._engine.close()
        return True

    def forget(self, seq_id: int) -> None: ...

    def judge(self, seq_id: int, position: int, row: object) -> bool:
        return False

    def begin(self) -> dict[int, int]:
        return {}


def test_a_text_that_was_not_verified_when_the_run_ends_has_not_ended_well() -> None:
    engine = StarterEngine(Formula(), Scheduler(chunk_rows=4), 100, ArrayRows())
    engine.verifier = NoVerdict(engine)
    request = engine.submit([11], SamplingParams(n_tokens=3, temperature=0))
    engine.run(LoopbackRing(1))
    engine.end_all()
    events = list(request)
    assert [event.finish_reason for event in events] == [None, None, "failed"] and not events[-1].tokens


@pytest.mark.parametrize("n_nodes", [1, 3])
def test_many_submitted_before_the_run_do_not_block_it(n_nodes: int) -> None:
    prompts = [prompt(3, i) for i in range(20)]
    params = SamplingParams(n_tokens=2, temperature=0)
    with ring_of(model_of(LLAMA), n_nodes) as ring:
        texts = ring.generate(prompts, params)
        assert ring.caches() == [0] * n_nodes
    assert [t.ids for t in texts] == reference(LLAMA, prompts, 2)


def test_a_thousand_short_texts_leave_nothing_behind() -> None:
    prompts = [prompt(1 + i % 3, i) for i in range(50)]
    params = SamplingParams(n_tokens=2, temperature=0)
    expected = reference(LLAMA, prompts, 2)
    with ring_of(model_of(LLAMA), 2) as ring:
        for _ in range(20):
            assert [text.ids for text in ring.generate(prompts, params)] == expected
            assert ring.caches() == [0, 0]
        gc.collect()
        assert not [o for o in gc.get_objects() if type(o) is Sequence], "the engine keeps texts that have ended"


def memory_of(ring: InProcessRing, n_bytes: int) -> CacheMemory:
    """All nodes of a ring with `n_bytes` for caches of float32."""
    classes = [tuple(stage.caches.classes) for stage in ring.stages]
    return CacheMemory(tuple(NodeCaches(f"node{i}", n_bytes, each) for i, each in enumerate(classes)))


@pytest.mark.parametrize("family", [LLAMA, "Gemma-3-1b-it", "deepseek-v3-shape"])
def test_caches_stay_within_what_the_nodes_can_hold_and_everybody_gets_a_turn(family: str) -> None:
    gpt = model_of(family)
    prompts = [prompt(n, n) for n in (10, 4, 25, 110, 1, 30, 64, 2)]
    with ring_of(gpt, 2) as probe:
        needed = max(max(memory_of(probe, 0).needs(n)) for n in (121, 41))
        limit = needed + needed // 2
        enough, tight = memory_of(probe, limit), memory_of(probe, needed - 1)
    with ring_of(gpt, 2, memory=enough) as ring:
        peaks = [0, 0]
        for i, stage in enumerate(ring.stages):  # runs in the thread that fills these caches

            def weigh(stage: Stage, *_: object, i: int = i) -> None:
                peaks[i] = max(peaks[i], stage.caches.n_bytes)

            stage.register_forward_hook(weigh)
        texts = ring.generate(prompts, GREEDY)
    with (
        ring_of(gpt, 2, memory=tight) as ring,
        pytest.raises(UsageError) as refused,
    ):
        ring.submit(prompt(110, 1), GREEDY)
    assert refused.value.code == "memory"
    assert [t.ids for t in texts] == reference(family, prompts, 12)
    assert 0 < max(peaks) <= limit


@pytest.mark.parametrize("n_frames", [1, 2, 5])
def test_any_number_of_frames_and_of_sequences_in_them(n_frames: int) -> None:
    prompts = [prompt(n, n) for n in (10, 4, 25, 7, 1)]
    expected = reference(LLAMA, prompts, 12)
    for decode_rows in (1, 2):
        with ring_of(model_of(LLAMA), 3, n_frames=n_frames, decode_rows=decode_rows) as ring:
            assert [t.ids for t in ring.generate(prompts, GREEDY)] == expected


def test_submit_and_cancel_while_others_run() -> None:
    """From the loop's own thread, where it is known when: commands are done before the next frame is made."""
    gpt = model_of(LLAMA)
    with ring_of(gpt, 3) as ring:
        later: list[Text] = []
        seen: list[int] = []

        def on_token() -> bool:
            seen.append(1)
            if len(seen) == 3:
                later.append(ring.submit(prompt(6, 2), GREEDY))
                second.cancel()
            return len(seen) == 6

        first = ring.submit(prompt(5, 0), SamplingParams(n_tokens=50, temperature=0), then=on_token)
        second = ring.submit(prompt(5, 1), SamplingParams(n_tokens=50, temperature=0))
        third = ring.submit(prompt(5, 3), GREEDY)
        ring.run()
        assert ring.caches() == [0, 0, 0]
    assert (first.reason, second.reason, third.reason) == ("stop", "cancelled", "length")
    assert first.ids == greedy(gpt, prompt(5, 0), 6), "nothing is generated beyond an end that the reader sees"
    assert second.ids == greedy(gpt, prompt(5, 1), 50)[: len(second.ids)] and len(second.ids) <= 6
    assert third.ids == greedy(gpt, prompt(5, 3), 12)
    assert later[0].ids == greedy(gpt, prompt(6, 2), 12)


def test_a_reader_that_raises_ends_its_own_sequence_alone() -> None:
    def fail() -> bool:
        raise RuntimeError("a tokenizer that cannot")

    with ring_of(model_of(LLAMA), 2) as ring:
        broken = ring.submit(prompt(5, 0), GREEDY, then=fail)
        other = ring.submit(prompt(5, 1), GREEDY)
        with pytest.raises(ValueError, match="mine"), ring.submit(prompt(5, 2), GREEDY).request:
            raise ValueError("mine")
        ring.run()
        assert ring.caches() == [0, 0]
    assert (broken.reason, len(broken.ids)) == (FAILED, 1)
    assert other.ids == greedy(model_of(LLAMA), prompt(5, 1), 12)


def test_a_reader_that_never_looks_holds_nobody_up() -> None:
    with ring_of(model_of(LLAMA), 2) as ring:
        unread = ring.engine.submit(prompt(5, 0), GREEDY)
        text = ring.submit(prompt(5, 1), GREEDY)
        ring.run()
        assert text.reason == "length"
    assert unread.events.qsize() == 12  # what it costs: the events of its own tokens


@contextlib.contextmanager
def running(ring: InProcessRing) -> Iterator[None]:
    """The engine in a thread of its own, as in a node."""
    worker = threading.Thread(target=ring.engine.run, args=(ring.ring, False), name="engine")
    worker.start()
    try:
        yield
    finally:
        ring.engine.close()
        worker.join(DEADLINE_S)
        assert not worker.is_alive()


def test_submit_and_cancel_from_another_thread_while_the_engine_waits_for_work() -> None:
    gpt = model_of(LLAMA)
    with ring_of(gpt, 2) as ring, running(ring):
        for seed in range(3):  # with pauses in which the ring is idle
            text = ring.submit(prompt(4, seed), GREEDY)
            text.wait()
            assert text.ids == greedy(gpt, prompt(4, seed), 12)
        begun = threading.Event()
        endless = ring.submit(prompt(4, 9), SamplingParams(n_tokens=150, temperature=0), then=begun.set)
        assert begun.wait(DEADLINE_S)
        endless.cancel()
        endless.wait()
        endless.cancel()  # once more is harmless
        ring.engine.cancel(12345)
        again = ring.submit(prompt(4, 1), GREEDY)
        again.wait()
        assert again.ids == greedy(gpt, prompt(4, 1), 12)


@pytest.mark.parametrize("n_nodes", [1, 3])
def test_submit_and_cancel_do_not_wait_while_the_engine_computes(n_nodes: int) -> None:
    gpt = model_of(LLAMA)
    with ring_of(gpt, n_nodes) as ring, running(ring):
        computing, go_on = threading.Event(), threading.Event()

        def hold(*_: object) -> None:
            computing.set()
            assert go_on.wait(DEADLINE_S)

        ring.stages[0].register_forward_pre_hook(hold)
        first = ring.submit(prompt(4, 0), GREEDY)
        assert computing.wait(DEADLINE_S)
        second, third = (ring.submit(prompt(4, seed), GREEDY) for seed in (1, 2))  # while the stage is being computed
        third.cancel()
        assert not go_on.is_set() and first.n_events == 0
        go_on.set()
        for text in (first, second, third):
            text.wait()
    assert [len(text.ids) for text in (first, second, third)] == [12, 12, 0]


def test_many_threads_submit_and_cancel_at_once() -> None:
    gpt = model_of(LLAMA)
    expected = {seed: greedy(gpt, prompt(4, seed), 12) for seed in range(4)}
    texts: list[tuple[int, Text]] = []

    def client(seed: int) -> None:
        for n in range(6):
            text = ring.submit(prompt(4, seed), GREEDY)
            texts.append((seed, text))
            if n % 3 == 0:
                text.cancel()
            text.wait()

    with ring_of(gpt, 2) as ring:
        with running(ring):
            clients = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
            for thread in clients:
                thread.start()
            for thread in clients:
                thread.join(DEADLINE_S)
                assert not thread.is_alive()
        assert len({text.request.seq_id for _, text in texts}) == len(texts) == 24
    for seed, text in texts:
        assert text.ids == expected[seed][: len(text.ids)]
        assert (text.reason, len(text.ids)) == ("length", 12) or text.reason == "cancelled"


def test_an_engine_that_has_ended_tells_everybody_and_takes_nobody() -> None:
    with ring_of(model_of(LLAMA), 2) as ring:
        texts = [ring.submit(prompt(4, seed), GREEDY) for seed in range(2)]
        ring.engine.end_all()
        assert [text.reason for text in texts] == [FAILED, FAILED]
        with pytest.raises(EngineError):
            ring.submit(prompt(4, 0), GREEDY)
        texts[0].cancel()  # harmless


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("n_after", [1, 2, 4])
def test_texts_go_on_over_another_ring_as_if_nothing_had_happened(params: SamplingParams, n_after: int) -> None:
    """The ring breaks in the middle; new nodes know nothing, and the number of nodes may be another one."""
    gpt = model_of(LLAMA)
    prompts = [prompt(n, n) for n in (4, 1, 30, 70, 9)]
    with ring_of(gpt, 1) as whole:
        expected = [text.ids for text in whole.generate(prompts, params)]
    with ring_of(gpt, 3) as ring, ring_of(gpt, n_after) as following:
        seen: list[int] = []

        def on_token() -> None:
            seen.append(1)
            if len(seen) == 5:
                assert ring.nodes is not None
                ring.nodes.kill(1)
                assert ring.nodes.rings[0].wait_end(DEADLINE_S)

        texts = [ring.submit(p, params, then=on_token if i == 0 else None) for i, p in enumerate(prompts)]
        with pytest.raises(NodeLostError) as caught:
            ring.run()
        assert (caught.value.node, caught.value.code) == ("secondary0", "lost")
        assert all(text.reason is None for text in texts)
        ring.engine.stage = following.stages[0]  # type: ignore[assignment]  # its own stage is that of another cut
        ring.engine.run(following.ring)
        assert following.caches() == [0] * n_after
    assert [text.ids for text in texts] == expected
    assert {text.reason for text in texts} == {"length"}


def test_a_ring_that_is_to_be_left_before_it_begins_is_left() -> None:
    """Another thread may plan the next ring as soon as this one is formed."""
    prompts = [prompt(5, 1)]
    wanted = reference(LLAMA, prompts, 12)
    with ring_of(model_of(LLAMA), 1) as ring:
        text = ring.submit(prompts[0], GREEDY)
        ring.engine.leave(ring.ring.epoch)
        ring.run()
        assert text.ids == [] and text.reason is None
        ring.engine.run(LoopbackRing(1, ring.ring.epoch + 1))
        assert [text.ids] == wanted, "what was said of the ring before does not count any more"


def test_sequences_that_are_put_out_for_lack_of_memory_lose_nothing() -> None:
    gpt = model_of(LLAMA)
    prompts = [prompt(5, seed) for seed in range(3)]
    params = SamplingParams(n_tokens=CONTEXT - 5, temperature=0.9, top_k=40, seed=3)
    with ring_of(gpt, 2) as ring:
        expected = [text.ids for text in ring.generate(prompts, params)]
        limit = max(memory_of(ring, 0).needs(CONTEXT)) * 2
    with ring_of(gpt, 2, memory=memory_of(ring, limit)) as ring:
        n_freed = []
        free = ring.stages[0].caches.free
        ring.stages[0].caches.free = lambda seq_id: (n_freed.append(seq_id), free(seq_id))  # type: ignore
        assert [text.ids for text in ring.generate(prompts, params)] == expected
    assert len(n_freed) > 3, "nobody was put out: the test shows nothing"


def test_a_sequence_cancelled_before_it_began_leaves_nothing() -> None:
    with ring_of(model_of(LLAMA), 2) as ring:
        text = ring.submit(prompt(100, 0), GREEDY)
        text.cancel()
        ring.run()
        assert text.reason == "cancelled" and text.n_events == 1
        assert ring.caches() == [0, 0]


@pytest.mark.parametrize("n_nodes", [1, 3])
def test_eos_stop_sequences_and_length_end_a_sequence(n_nodes: int) -> None:
    gpt = model_of(LLAMA)
    ids = greedy(gpt, prompt(5, 0), 30)
    cut = next(i for i in range(3, 30) if ids[i] not in ids[:i])
    stop = tuple(ids[cut - 2 : cut + 1])
    with ring_of(gpt, n_nodes) as ring:
        eos = ring.submit(
            prompt(5, 0), SamplingParams(n_tokens=30, temperature=0, eos_ids=frozenset({ids[cut], VOCAB}))
        )
        stopped = ring.submit(
            prompt(5, 0), SamplingParams(n_tokens=30, temperature=0, stop_sequences=((1, 2, 3), stop))
        )
        one = ring.submit(prompt(5, 0), SamplingParams(n_tokens=1, temperature=0))
        ring.run()
        assert ring.caches() == [0] * n_nodes
    assert (eos.reason, eos.ids) == ("eos", ids[:cut])
    assert (stopped.reason, stopped.ids) == ("stop", ids[: cut - 2])
    assert (one.reason, one.ids) == ("length", ids[:1])


@pytest.mark.parametrize("n_nodes", [1, 3])
def test_a_full_context_ends_with_length(n_nodes: int) -> None:
    gpt = model_of(LLAMA)
    params = SamplingParams(n_tokens=300, temperature=0)
    with ring_of(gpt, n_nodes, max_length=40) as ring:
        full, nearly, short = ring.generate([prompt(40, 0), prompt(39, 1), prompt(20, 2)], params)
        with pytest.raises(UsageError) as too_long:
            ring.submit(prompt(41, 0), params)
        with pytest.raises(UsageError) as empty:
            ring.submit([], params)
        assert (too_long.value.code, empty.value.code) == ("length", "empty")
    assert {t.reason for t in (full, nearly, short)} == {"length"}
    assert full.ids == greedy(gpt, prompt(40, 0), 1)
    assert nearly.ids == greedy(gpt, prompt(39, 1), 1)
    assert short.ids == greedy(gpt, prompt(20, 2), 20)


def test_the_longest_prompt_of_the_model_gives_one_token() -> None:
    with ring_of(model_of("Gemma-3-1b-it"), 3) as ring:
        text = ring.generate([prompt(CONTEXT, 0)], GREEDY)[0]
    assert (text.reason, text.ids) == ("length", greedy(model_of("Gemma-3-1b-it"), prompt(CONTEXT, 0), 1))


@pytest.mark.parametrize(("n_nodes", "victim"), [(2, 1), (3, 1), (3, 2), (5, 1), (5, 3), (5, 4)])
def test_a_node_that_dies_in_the_middle_ends_the_run_by_name_everywhere(n_nodes: int, victim: int) -> None:
    with ring_of(model_of(LLAMA), n_nodes) as ring:
        assert ring.nodes is not None
        nodes = ring.nodes

        def on_token() -> None:
            seen.append(1)
            if len(seen) == 4:
                nodes.kill(victim)

        seen: list[int] = []

        text = ring.submit(prompt(5, 0), SamplingParams(n_tokens=100, temperature=0), then=on_token)
        with pytest.raises(NodeLostError) as caught:
            ring.run()
        assert (caught.value.node, caught.value.code) == (f"secondary{victim - 1}", "lost")
        assert 4 <= len(text.ids) < 100 and text.reason is None
        ring.ring.close()
        ring.join()
        others = [ending for i, ending in ring.endings.items() if i != victim]
        assert all(isinstance(ending, NodeLostError) for ending in others)


def test_a_stage_that_fails_is_named_with_its_reason() -> None:
    with ring_of(model_of(LLAMA), 3) as ring:
        ring.stages[1].prepare(20, torch.device("cpu"), torch.float32)
        ring.submit(prompt(15, 0), SamplingParams(n_tokens=30, temperature=0))
        with pytest.raises(NodeLostError, match="sequences of this run end at 20") as caught:
            ring.run()
        assert caught.value.node == "secondary0"
    assert isinstance(ring.endings[2], NodeLostError)


def test_a_failure_while_the_starter_computes_is_not_taken_for_a_stop() -> None:
    """The ring breaks between two recv() calls: the reason must still be told."""
    with ring_of(model_of(LLAMA), 3) as ring:
        assert ring.nodes is not None
        nodes = ring.nodes

        def on_token() -> None:
            nodes.kill(1)
            assert nodes.rings[0].wait_end(DEADLINE_S)

        ring.submit(prompt(5, 0), GREEDY, then=on_token)
        with pytest.raises(NodeLostError) as caught:
            ring.run()
        assert (caught.value.node, caught.value.code) == ("secondary0", "lost")


def test_a_ring_that_is_stopped_from_outside_says_so() -> None:
    with ring_of(model_of(LLAMA), 3) as ring:
        assert ring.nodes is not None
        nodes = ring.nodes

        def on_token() -> None:
            nodes.rings[1].stop("someone asked")
            assert nodes.rings[0].wait_end(DEADLINE_S)

        ring.submit(prompt(5, 0), GREEDY, then=on_token)
        with pytest.raises(EngineError):
            ring.run()


def test_runs_one_after_the_other_on_the_same_ring() -> None:
    ring = InProcessRing(model_of(LLAMA), 2)
    try:
        one = ring.generate([prompt(5, 0)], GREEDY)[0].ids
        two = ring.generate([prompt(5, 0), prompt(7, 1)], GREEDY)
        assert two[0].ids == one == greedy(model_of(LLAMA), prompt(5, 0), 12)
        assert two[1].ids == greedy(model_of(LLAMA), prompt(7, 1), 12)
    finally:
        ring.close()
    assert list(ring.endings.values()) == [None]


class Feeding(LoopbackRing):
    """Gives these frames, and keeps the rows of what is sent."""

    def __init__(self, frames: list[Frame], n_embd: int) -> None:
        super().__init__(1, epoch=3)
        self.frames, self.n_embd = frames, n_embd
        self.sent: list[torch.Tensor] = []

    def recv(self, timeout_s: float | None = None) -> Frame:
        if not self.frames:
            raise RingEndedError
        return self.frames.pop(0)

    def send(self, frame: Frame) -> None:
        self.sent.append(rows_of(frame, self.n_embd, CPU, torch.float32).clone())


def test_several_slices_with_several_logits() -> None:
    """The last node sends the last rows of each slice that are wanted, and no others: all, some, one or none of it."""
    gpt = model_of(LLAMA)
    starter, last = stages_of(gpt, (2,))
    assert isinstance(starter, StarterStage)
    slices = tuple(
        Slice(seq_id, 0, n, n_logits) for seq_id, n, n_logits in ((1, 5, 3), (2, 4, 0), (3, 6, 6), (4, 7, 1))
    )
    texts = {s.seq_id: prompt(s.n_rows, s.seq_id) for s in slices}
    x = starter(starter.embed(torch.tensor([token for text in texts.values() for token in text])), slices)
    ring = Feeding([frame_of(x, 3, 0, slices, ())], x.shape[1])
    SecondaryLoop(last, TensorRows(CPU, torch.float32), ring, True).run()
    expected = [gpt(torch.tensor([texts[s.seq_id]]))[0, -s.n_logits :] for s in slices if s.n_logits]
    assert_alike(starter.head(ring.sent[0]), torch.cat(expected), gpt.config)
    assert ArrayRows().wanting_logits(np.arange(22), slices).tolist() == [2, 3, 4, *range(9, 15), 21]


def test_a_frame_may_copy_caches_before_its_rows() -> None:
    """A sequence that goes on from another one's prefix, on a secondary: it computes what the other one would."""
    stage = stages_of(model_of(LLAMA), (2,))[1]
    rows = torch.randn(6, stage.spec.width)
    first = frame_of(rows[:5].clone(), 3, 0, (Slice(1, 0, 5, 1),), ())
    both = torch.cat([rows[5:], rows[5:]])
    second = frame_of(both, 3, 1, (Slice(1, 5, 1, 1), Slice(2, 5, 1, 1)), (), copies=((1, 2),))
    third = frame_of(rows[5:].clone(), 3, 2, (Slice(3, 6, 1, 1),), (1,), copies=((2, 3),))
    ring = Feeding([first, second, third], stage.spec.width)
    SecondaryLoop(stage, TensorRows(CPU, torch.float32), ring, False).run()
    assert torch.equal(ring.sent[1][0], ring.sent[1][1])
    assert len(stage.caches) == 2, "1 was freed, 2 and 3 are there"
    assert torch.isfinite(ring.sent[2]).all() and not torch.equal(ring.sent[2][0], ring.sent[1][0])
