"""Logits of the reference model `qwen3_5` in float64, by its formulas alone: how far float32 is from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

Array = np.ndarray[Any, np.dtype[np.float64]]
PREFIX = "model.language_model."
LENGTH_EPS = 1e-6


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


class Model:
    """A published folder's weights in float64."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))["text_config"]
        self.weights = {name: w.astype(np.float64) for name, w in load_file(folder / "model.safetensors").items()}

    def logits(self, ids: list[int]) -> Array:
        """(ids, vocabulary), behind each of the ids of one text."""
        x = self.weights[f"{PREFIX}embed_tokens.weight"][ids]
        for i, kind in enumerate(self.config["layer_types"]):
            name = f"{PREFIX}layers.{i}."
            mix = self.attention if kind == "full_attention" else self.delta_net
            x = x + mix(self.norm(x, f"{name}input_layernorm.weight"), name)
            h = self.norm(x, f"{name}post_attention_layernorm.weight")
            x = x + (self.experts if f"{name}mlp.gate.weight" in self.weights else self.mlp)(h, f"{name}mlp.")
        x = self.norm(x, f"{PREFIX}norm.weight")
        return x @ self.weights["lm_head.weight"].T

    def linear(self, x: Array, name: str) -> Array:
        return x @ self.weights[f"{name}.weight"].T

    def mlp(self, x: Array, name: str) -> Array:
        return self.linear(
            silu(self.linear(x, f"{name}gate_proj")) * self.linear(x, f"{name}up_proj"), f"{name}down_proj"
        )

    def experts(self, x: Array, name: str) -> Array:
        """The best few by a softmax, whose weights add up to one, and a shared one with a gate of its own."""
        scores = np.exp(self.linear(x, f"{name}gate"))
        best = np.argsort(-scores, axis=1)[:, : self.config["num_experts_per_tok"]]
        found = sigmoid(self.linear(x, f"{name}shared_expert_gate")) * self.mlp(x, f"{name}shared_expert.")
        into, out = self.weights[f"{name}experts.gate_up_proj"], self.weights[f"{name}experts.down_proj"]
        for row, chosen in enumerate(best):
            for i in chosen:
                gate, up = np.split(into[i] @ x[row], 2)
                found[row] += scores[row, i] / scores[row, chosen].sum() * (out[i] @ (silu(gate) * up))
        return found

    def norm(self, x: Array, name: str, offset: float = 1.0) -> Array:
        mean = (x * x).mean(-1, keepdims=True)
        return x / np.sqrt(mean + self.config["rms_norm_eps"]) * (offset + self.weights[name])

    def attention(self, x: Array, name: str) -> Array:
        n, n_head, n_groups = len(x), self.config["num_attention_heads"], self.config["num_key_value_heads"]
        name, size = f"{name}self_attn.", self.config["head_dim"]
        q, gate = np.split(self.linear(x, f"{name}q_proj").reshape(n, n_head, 2 * size), 2, -1)
        k, v = (self.linear(x, f"{name}{one}_proj").reshape(n, n_groups, size) for one in "kv")
        q, k = self.rotated(self.norm(q, f"{name}q_norm.weight")), self.rotated(self.norm(k, f"{name}k_norm.weight"))
        k, v = (one.repeat(n_head // n_groups, 1) for one in (k, v))
        scores = np.where(np.tri(n, dtype=bool), np.einsum("ihd,jhd->hij", q, k) / np.sqrt(size), -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        given = np.einsum("hij,jhd->ihd", shares / shares.sum(-1, keepdims=True), v) * sigmoid(gate)
        return self.linear(given.reshape(n, -1), f"{name}o_proj")

    def rotated(self, x: Array) -> Array:
        rope = self.config["rope_parameters"]
        n = int(self.config["head_dim"] * rope["partial_rotary_factor"])
        angles = np.arange(len(x))[:, None, None] * rope["rope_theta"] ** -(np.arange(0, n, 2) / n)
        low, high = x[..., : n // 2], x[..., n // 2 : n]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin, x[..., n:]], -1)

    def delta_net(self, x: Array, name: str) -> Array:
        n, n_groups, n_head = len(x), self.config["linear_num_key_heads"], self.config["linear_num_value_heads"]
        k_size, v_size, name = (
            self.config["linear_key_head_dim"],
            self.config["linear_value_head_dim"],
            f"{name}linear_attn.",
        )
        taps = self.weights[f"{name}conv1d.weight"][:, 0]
        into = np.pad(self.linear(x, f"{name}in_proj_qkv"), ((taps.shape[1] - 1, 0), (0, 0)))
        seen = silu(sum(into[t : t + n] * taps[:, t] for t in range(taps.shape[1])))
        q, k, v = np.split(seen, [n_groups * k_size, 2 * n_groups * k_size], 1)
        q, k = (one.reshape(n, n_groups, k_size).repeat(n_head // n_groups, 1) for one in (q, k))
        q, k = (one / np.sqrt((one * one).sum(-1, keepdims=True) + LENGTH_EPS) for one in (q, k))
        v, b = v.reshape(n, n_head, v_size), sigmoid(self.linear(x, f"{name}in_proj_b"))
        step = np.logaddexp(0, self.linear(x, f"{name}in_proj_a") + self.weights[f"{name}dt_bias"])
        decay = np.exp(-np.exp(self.weights[f"{name}A_log"]) * step)
        state, given = np.zeros((n_head, k_size, v_size)), []
        for t in range(n):
            state = state * decay[t][:, None, None]
            change = b[t][:, None] * (v[t] - np.einsum("hk,hkv->hv", k[t], state))
            state = state + k[t][:, :, None] * change[:, None]
            given.append(np.einsum("hk,hkv->hv", q[t], state) / np.sqrt(k_size))
        gate = silu(self.linear(x, f"{name}in_proj_z").reshape(n, n_head, v_size))
        normed = self.norm(np.array(given), f"{name}norm.weight", offset=0.0) * gate
        return self.linear(normed.reshape(n, -1), f"{name}out_proj")
