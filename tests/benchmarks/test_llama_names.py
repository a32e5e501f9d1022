"""The same weights under other programs' names. Neither transformers nor llama.cpp is needed for it."""

import torch
from litgpt.model import GPT

from peers.llama_names import gguf_tensors, hf_tensors, interleave_halves, split_qkv
from random_checkpoint import config_of, n_weights


def weights(shape="tiny-1m"):
    torch.manual_seed(0)
    return {name: torch.randn_like(t) for name, t in GPT(config_of(shape)).state_dict().items()}


def rotated(x, position, pairs):
    """x (n_heads, head_size), each of `pairs` (a, b) of elements turned by its angle."""
    y = x.clone()
    for i, (a, b) in enumerate(pairs):
        angle = torch.tensor(position / 10000 ** (2 * i / x.size(1)), dtype=x.dtype)
        y[:, a] = x[:, a] * angle.cos() - x[:, b] * angle.sin()
        y[:, b] = x[:, b] * angle.cos() + x[:, a] * angle.sin()
    return y


def test_scores_are_the_same_in_either_rotation():
    torch.manual_seed(1)
    n_heads, size, n_embd = 3, 8, 16
    q, k = (torch.randn(n_heads * size, n_embd, dtype=torch.float64) for _ in range(2))
    x, y = (torch.randn(n_embd, dtype=torch.float64) for _ in range(2))
    halves = [(i, i + size // 2) for i in range(size // 2)]
    pairs = [(2 * i, 2 * i + 1) for i in range(size // 2)]

    def scores(q, k, how):
        return (rotated((q @ x).view(n_heads, size), 5, how) * rotated((k @ y).view(n_heads, size), 2, how)).sum(1)

    expected = scores(q, k, halves)
    torch.testing.assert_close(scores(interleave_halves(q, n_heads), interleave_halves(k, n_heads), pairs), expected)
    assert not torch.allclose(scores(q, k, pairs), expected)


def test_rows_of_a_head_are_interleaved_and_heads_stay_apart():
    rows = interleave_halves(torch.arange(8.0)[:, None], n_heads=2)
    assert rows.flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_queries_keys_and_values_come_apart():
    config = config_of("tiny-1m")
    parts = split_qkv(torch.zeros((config.n_head + 2 * config.n_query_groups) * config.head_size, 1), config)
    assert [len(part) for part in parts] == [128, 32, 32]


def test_no_weight_is_lost_or_named_twice():
    before, config = weights(), config_of("tiny-1m")
    n_all = sum(t.numel() for t in before.values())
    total = sum(t.double().sum() for t in before.values())
    for named in (hf_tensors(before, config), gguf_tensors(before, config)):
        assert sum(t.numel() for t in named.values()) == n_all
        torch.testing.assert_close(sum(t.double().sum() for t in named.values()), total)
    assert "blk.2.attn_k.weight" in gguf_tensors(before, config)
    assert "model.layers.2.self_attn.k_proj.weight" in hf_tensors(before, config)


def test_the_weights_that_a_token_meets_are_counted():
    matrices = {name: t.numel() for name, t in weights().items() if t.dim() > 1}
    blocks = sum(n for name, n in matrices.items() if ".h." in name)
    assert n_weights("tiny-1m") == (blocks, matrices["lm_head.weight"])
