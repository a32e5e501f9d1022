"""What every way to compute blocks must do: litgpt's numbers and tokens, and the same book-keeping of pages."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from litgpt.model import GPT

from backends import ALL, MAKERS, Loaded, embedded, logits
from families import CONTEXT, FAMILIES, greedy, model_of, prompt
from mdi.errors import EngineError
from mdi.kernels.slices import Slice
from mdi.model.caches import PAGE, SLACK
from mdi.stages.torch_cache import TORCH_TYPES
from tolerance import assert_alike

WINDOWED = ["Gemma-2-9b", "Gemma-3-1b-it", "Mistral-7B-v0.1", "Phi-3-mini-4k-instruct"]  # of 12 to 20 positions
ODD = (1, 2, 3, 5, 7, 13, 31, 33, 40)  # rows of a slice: about pages, tiles and lanes, and beside them

backends = pytest.mark.parametrize("name", ALL)


def in_pieces(backend: Loaded, gpt: GPT, texts: Sequence[Sequence[int]], seed: int) -> list[torch.Tensor]:
    """Logits of all positions of texts that are computed together, in pieces of odd lengths."""
    rng = random.Random(seed)
    done = [0] * len(texts)
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    while any(d < len(t) for d, t in zip(done, texts, strict=True)):
        slices, ids = [], []
        for i in rng.sample(range(len(texts)), rng.randint(1, len(texts))):
            if n := min(rng.choice(ODD), len(texts[i]) - done[i]):
                slices.append(Slice(i, done[i], n))
                ids += texts[i][done[i] : done[i] + n]
                done[i] += n
        if slices:
            pieces = backend(embedded(gpt, ids), slices).split([part.n_rows for part in slices])
            for (i, *_), rows in zip(slices, pieces, strict=True):
                found[i].append(logits(gpt, rows))
    return [torch.cat(pieces) for pieces in found]


def last_logits(backend: Loaded, gpt: GPT, seq_id: int, start: int, ids: Sequence[int]) -> torch.Tensor:
    return logits(gpt, backend(embedded(gpt, ids), [Slice(seq_id, start, len(ids))])[-1:])[0]


def whole(gpt: GPT, ids: Sequence[int]) -> torch.Tensor:
    """(n, vocabulary), all at once and without a cache."""
    found: torch.Tensor = gpt(torch.tensor([list(ids)]))[0]
    return found


@backends
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_model(name: str, family: str) -> None:
    gpt = model_of(family)
    texts = [prompt(CONTEXT, 1), prompt(1, 2), prompt(71, 3), prompt(PAGE, 4), prompt(PAGE + 1, 5)]
    for text, found in zip(texts, in_pieces(MAKERS[name](gpt, "float32"), gpt, texts, seed=6), strict=True):
        assert_alike(found, whole(gpt, text), gpt.config)


@backends
@pytest.mark.parametrize("family", ["Llama-3.1-8B", "Gemma-2-9b", "pythia-14m"])
def test_outputs_of_single_blocks_are_those_of_the_model_and_change_nothing(name: str, family: str) -> None:
    gpt = model_of(family)
    n_layer, ids = gpt.config.n_layer, prompt(40, 9)
    seen: dict[int, torch.Tensor] = {}
    hooks = [
        block.register_forward_hook(lambda module, args, y, i=i: seen.update({i: y[0]}))
        for i, block in enumerate(gpt.transformer.h)
    ]
    whole(gpt, ids)
    for hook in hooks:
        hook.remove()
    for taps in ([0], [n_layer - 1], list(range(n_layer))):
        backend = MAKERS[name](gpt, "float32")
        stage, x = backend.stage, embedded(gpt, ids).detach()
        slices = [Slice(0, 0, 33, 2), Slice(1, 0, 7, 7)]
        given = x.numpy() if name == "kernels" else x.to("cuda" if name == "cuda" else "cpu")
        plain = stage(given, slices)
        backend.caches.clear()
        found = torch.as_tensor(stage(given, slices, taps)).cpu()
        assert torch.equal(found[:40], torch.as_tensor(plain).cpu()) and len(found) == 40 + 9 * len(taps)
        assert_alike(found[40:42], seen[taps[0]][31:33], gpt.config)
        for place, tap in enumerate(
            taps
        ):  # each text has the same beginning, and the second one is that of other tokens
            assert_alike(found[40 + 9 * place : 42 + 9 * place], seen[tap][31:33], gpt.config)


@backends
@pytest.mark.parametrize("cache_type", TORCH_TYPES)
@pytest.mark.parametrize("family", ["Llama-3.1-8B", "Gemma-2-9b"])
def test_caches_may_hold_smaller_numbers(name: str, cache_type: str, family: str) -> None:
    gpt = model_of(family)
    texts = [prompt(97, 7), prompt(34, 8)]
    whole_texts = MAKERS["torch"](gpt, cache_type)  # each at once; their keys and values are rounded alike
    for i, found in enumerate(in_pieces(MAKERS[name](gpt, cache_type), gpt, texts, seed=9)):
        expected = logits(gpt, whole_texts(embedded(gpt, texts[i]), [Slice(i, 0, len(texts[i]))]))
        assert_alike(found, expected, gpt.config, TORCH_TYPES[cache_type])


@backends
@pytest.mark.parametrize("cache_type", TORCH_TYPES)
@pytest.mark.parametrize("family", ["Llama-3.1-8B", "Gemma-2-9b", "deepseek-v3-shape"])
def test_a_text_goes_on_in_another_stage_that_was_filled_with_its_caches(
    name: str, cache_type: str, family: str
) -> None:
    """To the same bits in a stage of the same kind, and with its windows, whose first pages are gone."""
    gpt, text = model_of(family), prompt(CONTEXT, 7)
    n = CONTEXT - 20
    first, second, other = (MAKERS[one](gpt, cache_type) for one in (name, name, "torch"))
    for start in range(0, n, 28):
        first(embedded(gpt, text[start : start + 28]), [Slice(0, start, min(28, n - start))])
    run = first.caches.export(0, 0, n)
    rest = embedded(gpt, text[n:])
    for stage in (second, other):
        stage.caches.fill(5, run)
        assert stage.caches.end(5) == n and stage.caches.n_bytes == first.caches.n_bytes
    expected = first(rest, [Slice(0, n, 20)])
    assert torch.equal(second(rest, [Slice(5, n, 20)]), expected)
    assert_alike(
        logits(gpt, other(rest, [Slice(5, n, 20)])), logits(gpt, expected), gpt.config, TORCH_TYPES[cache_type]
    )


@backends
@pytest.mark.parametrize("family", [*WINDOWED, "Llama-3.1-8B", "Mixtral-8x7B-v0.1"])
def test_greedy_tokens_are_those_of_the_model(name: str, family: str) -> None:
    gpt = model_of(family)
    backend = MAKERS[name](gpt, "float32")
    texts = [prompt(n, seed) for seed, n in enumerate((45, 3, 32))]
    expected = [greedy(gpt, text, 20) for text in texts]
    found: list[list[int]] = [[int(last_logits(backend, gpt, i, 0, text).argmax())] for i, text in enumerate(texts)]
    for _ in range(19):  # one row of each text in a batch
        slices = [Slice(i, len(text) + len(found[i]) - 1, 1) for i, text in enumerate(texts)]
        tokens = logits(gpt, backend(embedded(gpt, [new[-1] for new in found]), slices)).argmax(dim=1).tolist()
        for new, token in zip(found, tokens, strict=True):
            new.append(token)
    assert found == expected


@backends
@pytest.mark.parametrize("start", [1, PAGE - 1, PAGE, 50])
def test_a_slice_that_starts_earlier_truncates(name: str, start: int) -> None:
    gpt = model_of("Llama-3.1-8B")
    backend = MAKERS[name](gpt, "float32")
    first, second = prompt(70, 10), prompt(9, 11)
    last_logits(backend, gpt, 0, 0, first)
    found = last_logits(backend, gpt, 0, start, second)
    assert_alike(found, whole(gpt, first[:start] + second)[-1], gpt.config)
    assert backend.caches.end(0) == start + 9


@backends
@pytest.mark.parametrize("family", ["Llama-3.1-8B", "Gemma-2-9b"])
def test_a_copy_goes_its_own_way(name: str, family: str) -> None:
    gpt = model_of(family)
    backend = MAKERS[name](gpt, "float32")
    text, left, right = prompt(PAGE + 8, 12), prompt(5, 13), prompt(5, 14)  # they share a page that is not full
    last_logits(backend, gpt, 0, 0, text)
    before = backend.caches.n_bytes
    backend.caches.rearrange((), [(0, 1)])
    assert backend.caches.n_bytes == before  # a copy is free until it is written to
    slices = [Slice(0, len(text), 5), Slice(1, len(text), 5)]
    found = logits(gpt, backend(embedded(gpt, left + right), slices))
    assert_alike(found[:5], whole(gpt, text + left)[-5:], gpt.config)
    assert_alike(found[5:], whole(gpt, text + right)[-5:], gpt.config)
    assert backend.caches.n_bytes > before
    backend.caches.free(0)
    more = prompt(3, 15)
    assert_alike(last_logits(backend, gpt, 1, len(text) + 5, more), whole(gpt, text + right + more)[-1], gpt.config)


@backends
def test_freed_pages_can_be_had_again(name: str) -> None:
    gpt = model_of("Llama-3.1-8B")
    backend = MAKERS[name](gpt, "float32")
    texts = [prompt(n, n) for n in (40, 64, 65)]
    for text in texts:
        backend.caches.clear()
        assert backend.caches.n_bytes == 0 and len(backend.caches) == 0
        for seq_id in range(3):
            assert_alike(last_logits(backend, gpt, seq_id, 0, text), whole(gpt, text)[-1], gpt.config)
        assert backend.caches.n_bytes == 3 * sum(c.n_bytes(len(text)) for c in backend.caches.classes)
    backend.caches.free(7)  # of a sequence that it never saw
    backend.caches.free(1)
    assert len(backend.caches) == 2


@backends
def test_the_longest_text_is_the_last_one_that_fits(name: str) -> None:
    gpt = model_of("Llama-3.1-8B")
    backend = MAKERS[name](gpt, "float32")
    last_logits(backend, gpt, 0, 0, prompt(CONTEXT, 1))
    with pytest.raises(EngineError):
        last_logits(backend, gpt, 0, CONTEXT, [1])
    with pytest.raises(EngineError):
        last_logits(backend, gpt, 1, 4, [1])  # nothing is before it


@backends
@pytest.mark.parametrize("family", WINDOWED)
def test_pages_that_no_window_sees_are_freed(name: str, family: str) -> None:
    gpt = model_of(family)
    backend = MAKERS[name](gpt, "float32")
    text = prompt(CONTEXT, 16)
    for start in range(0, CONTEXT, 8):
        found = last_logits(backend, gpt, 0, start, text[start : start + 8])
    assert_alike(found, whole(gpt, text)[-1], gpt.config)
    for cache_class, table in zip(backend.caches.classes, backend.caches.entries(0), strict=True):
        assert (table.first > 0) == (cache_class.window is not None and cache_class.window + SLACK + PAGE < CONTEXT - 8)
