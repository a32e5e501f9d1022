"""The whole model on one device: what is trained, and what the ring is compared with."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from litgpt.model import GPT, Block

from gpt.shape import GPTConfig


class WholeTextAttention(nn.Module):
    """Causal attention over one whole text: no cache, no rotation. Takes over the projections of litgpt's module."""

    def __init__(self, config: GPTConfig, proj: nn.Linear, qkv: nn.Linear) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.proj = proj
        self.qkv = qkv if config.qkv_bias else nn.Linear(qkv.in_features, qkv.out_features, bias=False)

    def forward(self, x: torch.Tensor, *_: object) -> torch.Tensor:
        """(B, T, n_embd) -> (B, T, n_embd); what else litgpt's block passes is for positions, which are in x already."""
        q, k, v = (t.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.proj(y.transpose(1, 2).flatten(-2))
        return out


def make_block(config: GPTConfig, index: int) -> Block:
    block = Block(config, index)
    block.attn = WholeTextAttention(config, block.attn.proj, block.attn.qkv)
    return block


class PositionGPT(GPT):
    """litgpt's GPT with learned positions; `tied`: the head's weight is the embedding, as both systems trained theirs."""

    config: GPTConfig

    def __init__(self, config: GPTConfig, tied: bool = False) -> None:
        super().__init__(config)
        self.transformer["h"] = nn.ModuleList(make_block(config, i) for i in range(config.n_layer))
        self.transformer["wpe"] = nn.Embedding(config.block_size, config.n_embd)
        if tied:
            self.lm_head.weight = self.transformer["wte"].weight
        self.dropout = nn.Dropout(config.dropout)
        if config.dropout:
            for block in self.transformer["h"]:
                for half in (block.attn, block.mlp):
                    half.register_forward_hook(lambda module, inputs, output: self.dropout(output))

    def forward(self, idx: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """(B, T) ids, T at most the context -> (B, T, vocabulary) logits"""
        positions = torch.arange(idx.size(1), device=idx.device)
        x = self.transformer["wte"](idx) + self.transformer["wpe"](positions)
        for block in self.transformer["h"]:
            x = block(x, None, None)
        logits: torch.Tensor = self.lm_head(self.transformer["ln_f"](x))
        return logits


def random_model(config: GPTConfig, seed: int) -> PositionGPT:
    """Tied, with GPT-2's way to begin: deviation 0.02, and less for what writes into the residual stream."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = PositionGPT(config, tied=True)
        model.apply(model._init_weights)
        for name, weight in model.named_parameters():
            if name.endswith("proj.weight"):
                torch.nn.init.normal_(weight, std=0.02 / (2 * config.n_layer) ** 0.5)
    return model


def n_parameters(config: GPTConfig) -> int:
    """Parameters as the thesis counts them: the embedding is the head's weight, and that of positions is left out."""
    with torch.device("meta"):
        model = PositionGPT(config, tied=True)
    return sum(p.numel() for p in model.parameters()) - model.transformer["wpe"].weight.numel()


@torch.inference_mode()
def greedy(model: PositionGPT, prompt_ids: list[int], n_tokens: int) -> list[int]:
    """The most probable text, from the last `block_size` tokens each time."""
    ids = list(prompt_ids)
    for _ in range(n_tokens):
        ids.append(int(model(torch.tensor([ids[-model.config.block_size :]]))[0, -1].argmax()))
    return ids[len(prompt_ids) :]
