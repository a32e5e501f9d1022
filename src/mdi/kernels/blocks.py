"""A range of transformer blocks in the kernels, with its tables of rotary positions: one call computes a frame. Then the final
norm and the head, or some rows of it. Needs neither torch nor litgpt.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mdi.errors import EngineError, KernelError
from mdi.kernels.context import Context, Linear
from mdi.kernels.layout import Matrix
from mdi.kernels.page_sizes import cache_classes, windows_of
from mdi.kernels.pages import CachePages, Pool
from mdi.kernels.structures import (
    ACTIVATIONS,
    CACHE_TYPES,
    NORM_TYPES,
    BlockReader,
    MdiBlock,
    MdiFrame,
    MdiMlp,
    MdiModel,
    MdiStage,
    Tensors,
)
from mdi.slices import Slices, SliceTable

Floats = np.ndarray


def rope_n_elem(config: Mapping[str, Any]) -> int:
    """Numbers of a head that are turned."""
    return int(config["rotary_percentage"] * config["head_size"])


def n_tables(config: Mapping[str, Any]) -> int:
    return 1 if config["rope_local_base_freq"] is None else 2


def rope_tables(config: Mapping[str, Any], max_length: int) -> tuple[Floats, Floats]:
    """Cosines and sines, float32 (n_tables, max_length, rope_n_elem).

    Angles are rounded where litgpt rounds them, to float32; their cosines are then exact to the last bit or so.

    Args:
        config: litgpt's Config as a plain dict.
    """
    n = rope_n_elem(config)
    base = _frequencies(config["rope_base"], n)
    scaling = np.float32(1)
    adjustments = config["rope_adjustments"]
    if adjustments is not None:
        base, scaling = _adjusted(base, n, config["rope_base"], adjustments)
    tables = [base]
    if config["rope_local_base_freq"] is not None:
        tables.append(_frequencies(config["rope_local_base_freq"], n))
    positions = np.arange(max_length, dtype=np.float32) / np.float32(config["rope_condense_ratio"])
    angles = [np.tile(np.outer(positions, theta), (1, 2))[:, :n].astype(np.float64) for theta in tables]
    cos = np.stack([np.cos(a).astype(np.float32) * scaling for a in angles])
    sin = np.stack([np.sin(a).astype(np.float32) * scaling for a in angles])
    return np.ascontiguousarray(cos, dtype=np.float32), np.ascontiguousarray(sin, dtype=np.float32)


def _powers(base: float, n: int) -> Floats:
    exponents = np.arange(0, n, 2, dtype=np.float32) / np.float32(n)
    return np.power(np.float64(base), exponents.astype(np.float64)).astype(np.float32)


def _frequencies(base: float, n: int) -> Floats:
    return np.float32(1) / _powers(base, n)


def _adjusted(theta: Floats, n: int, base: float, adjustments: Mapping[str, Any]) -> tuple[Floats, np.float32]:
    """Frequencies for contexts longer than the model was first trained for, and a factor on cosines and sines."""
    one = np.float32(1)
    if "beta_fast" in adjustments or "beta_slow" in adjustments:
        return _yarn(n, base, adjustments)
    if "low_freq_factor" in adjustments:
        factor, low = np.float32(adjustments["factor"]), np.float32(adjustments["low_freq_factor"])
        ratio = np.float32(adjustments["original_max_seq_len"]) / (np.float32(2 * math.pi) / theta)
        smooth = np.clip(
            (ratio - low) / np.float32(adjustments["high_freq_factor"] - adjustments["low_freq_factor"]), 0, 1
        )
        return ((one - smooth) * (theta / factor) + smooth * theta).astype(np.float32), one
    if "factor" in adjustments:
        return theta / np.float32(adjustments["factor"]), one
    return theta, one


def yarn_mscale(scale: float, mscale: float = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def _yarn(n: int, base: float, adjustments: Mapping[str, Any]) -> tuple[Floats, np.float32]:
    """YaRN (Peng et al. 2023, section 3): low frequencies are stretched, high ones kept, those between are mixed."""
    factor, longest = adjustments["factor"], adjustments["original_max_seq_len"]
    mscale, mscale_all = adjustments.get("mscale"), adjustments.get("mscale_all_dim")
    if mscale and mscale_all:
        scaling = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all)
    else:
        alone = mscale_all or mscale
        scaling = yarn_mscale(factor, alone) if alone else 1.0

    def dimension(rotations: float) -> float:
        return n * math.log(longest / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(dimension(adjustments["beta_fast"])), 0)
    high: float = min(math.ceil(dimension(adjustments["beta_slow"])), n // 2 - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(n // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    powers = _powers(base, n)
    one = np.float32(1)
    theta = one / (np.float32(factor) * powers) * (one - ramp) + one / powers * ramp
    return theta.astype(np.float32), np.float32(scaling)


# Settings of litgpt's Config that are read here and in kernels.rope.
# fmt: off
_SETTINGS = {
    "attention_logit_softcapping", "attention_scores_scalar", "first_k_dense_replace", "gelu_approximate",
    "head_size", "intermediate_size", "latent_attention", "mlp_class_name", "moe_intermediate_size", "n_embd", "n_layer",
    "n_expert", "n_expert_groups", "n_expert_per_token", "n_head", "n_query_groups", "n_shared_expert", "name",
    "norm_1", "norm_2", "norm_class_name", "norm_eps", "norm_qk", "norm_qk_type", "parallel_residual",
    "post_attention_norm", "post_mlp_norm", "rope_adjustments", "rope_base", "rope_condense_ratio",
    "rope_indices", "rope_interleave", "rope_local_base_freq", "rotary_percentage", "routed_scaling_factor",
    "shared_attention_norm", "sliding_window_indices", "sliding_window_size",
}
# fmt: on
MOST_ROPE = 1024  # csrc/rotary.h


def why_not_in_kernels(config: Mapping[str, Any]) -> str | None:
    """Name the feature of a model (litgpt's Config as a dict) that the kernels lack; None if they compute all blocks."""
    try:
        return _unknown(config)
    except (TypeError, ValueError, AttributeError, OverflowError) as e:  # it may come from another node
        return f"a config with a setting of the wrong kind ({e})"


def _unknown(config: Mapping[str, Any]) -> str | None:
    if missing := sorted(_SETTINGS - config.keys()):
        return f"a config without {missing[0]}"
    if config["latent_attention"]:
        return "latent attention"
    if config["n_expert_groups"]:
        return "experts in groups"
    if config["norm_class_name"] not in NORM_TYPES:
        return f"norms of type {config['norm_class_name']}"
    if config["mlp_class_name"] not in _MLPS:
        return f"MLPs of type {config['mlp_class_name']}"
    if not 2 <= rope_n_elem(config) <= MOST_ROPE:
        return f"rotary positions of {rope_n_elem(config)} numbers"
    return _contradiction(config)


def _contradiction(config: Mapping[str, Any]) -> str | None:
    """Numbers that do not fit each other, which may come from another node: the kernels would read beyond their memory."""
    heads, groups, size = config["n_head"], config["n_query_groups"], config["head_size"]
    if groups < 1 or heads % groups:
        return f"{heads} heads in {groups} groups"
    if rope_n_elem(config) > size:
        return f"rotary positions of {rope_n_elem(config)} numbers in heads of {size}"
    if config["mlp_class_name"] == "LLaMAMoE" and not 1 <= config["n_expert_per_token"] <= config["n_expert"]:
        return f"{config['n_expert_per_token']} of {config['n_expert']} experts"
    if any(table not in range(n_tables(config)) for table in config["rope_indices"] or ()):
        return f"tables of rotary positions {config['rope_indices']}"
    for name in ("rope_indices", "sliding_window_indices"):
        if config[name] and len(config[name]) < config["n_layer"]:
            return f"{name} of {len(config[name])} blocks, where there are {config['n_layer']}"
    return None


def _gelu(config: Mapping[str, Any]) -> str:
    return "gelu_tanh" if config["gelu_approximate"] == "tanh" else "gelu"


_MLPS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "GptNeoxMLP": _gelu,
    "GemmaMLP": _gelu,
    "LLaMAMLP": lambda config: "silu",
    "LLaMAMoE": lambda config: "silu",
}


def model_of(config: Mapping[str, Any], cache_type: str = "float32") -> MdiModel:
    """Settings that all blocks of a model share. The head's norm and linear layer use them as well."""
    adjustments = config["rope_adjustments"] or {}
    scales = adjustments.get("mscale_all_dim") and adjustments.get("factor")
    mscale = yarn_mscale(adjustments["factor"], adjustments["mscale_all_dim"]) if scales else 1.0
    return MdiModel(
        n_embd=config["n_embd"],
        n_head=config["n_head"],
        n_groups=config["n_query_groups"],
        head_size=config["head_size"],
        rope_n_elem=rope_n_elem(config),
        rope_interleave=bool(config["rope_interleave"]),
        norm_type=NORM_TYPES[config["norm_class_name"]],
        unit_offset=config["norm_class_name"] == "RMSNorm" and "Gemma" in config["name"],
        parallel_residual=bool(config["parallel_residual"]),
        shared_attention_norm=bool(config["shared_attention_norm"]),
        qk_norm_all_heads=config["norm_qk_type"] == "olmo2",
        activation=ACTIVATIONS[_MLPS[config["mlp_class_name"]](config)],
        n_expert_per_token=config["n_expert_per_token"],
        cache_type=CACHE_TYPES[cache_type],
        heads_per_group=config["n_head"] // config["n_query_groups"],
        norm_eps=config["norm_eps"],
        scale=mscale**2 / math.sqrt(config["attention_scores_scalar"] or config["head_size"]),
        softcap=config["attention_logit_softcapping"] or 0.0,
        expert_scale=config["routed_scaling_factor"],
    )


class Blocks:
    """Blocks [start, stop) of a model.

    Args:
        config: litgpt's Config as a plain dict, with all defaults.
        tensors: of block i, by litgpt's names without "transformer.h.<i>.": packed weights of linear layers as Matrix,
            norms and biases as float32 arrays. Their memory is used without copying.
        cache_type: what caches hold, one of page_sizes.CACHE_TYPES.

    Raises:
        KernelError: a tensor is missing or of another shape, or there are no kernels.
    """

    caches: CachePages  # this and what follows: from `prepare` on
    _cos: np.ndarray
    _sin: np.ndarray
    _pool: np.ndarray
    _page_bytes: np.ndarray
    _pool_address: int
    _page_bytes_address: int
    _stage: MdiStage

    def __init__(
        self, config: Mapping[str, Any], start: int, stop: int, tensors: Callable[[int], Tensors], cache_type: str,
        context: Context,
    ) -> None:  # fmt: skip
        self.config, self.start, self.stop = config, start, stop
        self.context = context
        self.n_embd = int(config["n_embd"])
        self.classes, self._places = cache_classes(config, start, stop, cache_type)
        self._model = model_of(config, cache_type)
        self._kept: list[Any] = []  # keeps alive what the structures refer to
        self._blocks = (MdiBlock * (stop - start))()
        for i in range(start, stop):
            self._blocks[i - start] = self._block(i, tensors(i))
        self.max_length = 0
        self._n_finished = np.zeros(1, dtype=np.int64)

    @property
    def n_finished(self) -> int:
        """Blocks that have been computed so far, also of the frame that is being computed. From any thread."""
        return int(self._n_finished[0])

    def prepare(self, max_length: int, capacities: Sequence[int]) -> None:
        """Build the tables of positions of a run, and its pools of so many pages per class."""
        self.max_length = max_length
        self._cos, self._sin = rope_tables(self.config, max_length)
        pools = [Pool(c.page_bytes, n) for c, n in zip(self.classes, capacities, strict=True)]
        self.caches = CachePages(self.classes, pools)
        self._pool = np.array([pool.address for pool in pools], dtype=np.uint64)
        self._page_bytes = np.array([pool.page_bytes for pool in pools], dtype=np.int64)
        self._pool_address, self._page_bytes_address = self._pool.ctypes.data, self._page_bytes.ctypes.data
        self._stage = MdiStage(
            ctypes.pointer(self._model), self._blocks, self._cos.ctypes.data, self._sin.ctypes.data,
            self._cos[0].size, len(self._blocks), len(self.classes), self._n_finished.ctypes.data,
        )  # fmt: skip

    def forward(self, rows: np.ndarray, slices: Slices) -> None:
        """Run the blocks, in place.

        Args:
            rows: float32 (N, n_embd), contiguous: the rows of all slices.

        Raises:
            EngineError: a slice that fits neither the run's length nor its sequence's cache, or memory that has run out.
        """
        frame, kept = self._frame(rows, slices)
        self.context.look_around()
        if self.context.library.mdi_forward(self.context.handle, ctypes.byref(self._stage), ctypes.byref(frame)):
            raise EngineError(f"no memory is left to compute a frame of {len(rows)} rows", "memory")
        del kept

    def forward_in_halves(
        self, rows: np.ndarray, slices: Slices,
        ready: Callable[[int, int], contextlib.AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        """Run the blocks half by half, to the same bits as `forward`.

        Args:
            ready: called with a block's number in the model and 0 for attention or 1 for the MLP: within what it gives, the
                weights of that half are in memory.

        Raises:
            EngineError: as `forward`; or whatever `ready` raises.
        """
        frame, kept = self._frame(rows, slices)
        self.context.look_around()
        library, handle = self.context.library, self.context.handle
        for block in range(len(self._blocks)):
            for half in (0, 1):
                with ready(self.start + block, half):
                    done = library.mdi_step(handle, ctypes.byref(self._stage), block, half, ctypes.byref(frame))
                if done:
                    raise EngineError(f"no memory is left to compute a frame of {len(rows)} rows", "memory")
            self._n_finished += 1
        del kept

    def half(self, block: int, half: int, rows: np.ndarray, slices: Slices) -> np.ndarray:
        """Compute what one half of a block adds to the rows, before the norm that may follow: 0 is attention, 1 the MLP.

        Returns:
            float32 (N, n_embd); `rows` stay as they are.
        """
        frame, kept = self._frame(rows, slices)
        y = np.empty_like(rows)
        self._piece(block, half, frame, y)
        del kept
        return y

    def _piece(self, block: int, piece: int, frame: MdiFrame, y: np.ndarray) -> None:
        """Compute one piece of a block (structures.PIECES) for a frame that `_frame` made."""
        done = self.context.library.mdi_half(
            self.context.handle, ctypes.byref(self._stage), block - self.start, piece, ctypes.byref(frame),
            ctypes.c_void_p(y.ctypes.data),
        )  # fmt: skip
        if done:
            raise EngineError(f"no memory is left to compute a frame of {frame.n_rows} rows", "memory")

    def _frame(self, rows: np.ndarray, slices: Slices) -> tuple[MdiFrame, object]:
        """The structure of a frame, and the memory that it refers to."""
        pages, first = array("Q"), array("i")  # of each slice and class
        n_rows = 0
        for seq_id, start, n, *_ in slices:
            if start < 0 or n < 1:
                raise EngineError(f"a slice of {n} rows from position {start} of sequence {seq_id} on")
            if start + n > self.max_length:
                raise EngineError(
                    f"position {start + n} of sequence {seq_id}, but sequences of this run end at {self.max_length}"
                )
            for table in self.caches.extend(seq_id, start, n):
                pages.append(table.address)
                first.append(table.first)
            n_rows += n
        if rows.shape != (n_rows, self.n_embd) or rows.dtype != np.float32 or not rows.flags.c_contiguous:
            raise EngineError(
                f"rows of shape {rows.shape}, but the slices of this frame have {n_rows} of {self.n_embd}"
            )
        frame = MdiFrame(
            rows.ctypes.data, SliceTable.of(slices).records, pages.buffer_info()[0], first.buffer_info()[0],
            self._pool_address, self._page_bytes_address, len(slices), n_rows,
        )  # fmt: skip
        return frame, (pages, first)

    def _block(self, index: int, tensors: Tensors) -> MdiBlock:
        c = self.config
        plain = c["norm_class_name"] == "LayerNorm" and "OLMo" in c["name"]
        reader = BlockReader(index, tensors, self._kept, plain)
        size, n_embd = c["head_size"], c["n_embd"]
        heads, groups = c["n_head"] * size, c["n_query_groups"] * size
        over_heads = (heads, groups) if c["norm_qk_type"] == "olmo2" else (size, size)
        block = MdiBlock(
            norm_1=reader.norm("norm_1", n_embd, c["norm_1"]),
            post_attention_norm=reader.norm("post_attention_norm", n_embd, c["post_attention_norm"]),
            norm_2=reader.norm("norm_2", n_embd, c["norm_2"] and not c["shared_attention_norm"]),
            post_mlp_norm=reader.norm("post_mlp_norm", n_embd, c["post_mlp_norm"]),
            norm_q=reader.norm("attn.norm_q", over_heads[0], c["norm_qk"]),
            norm_k=reader.norm("attn.norm_k", over_heads[1], c["norm_qk"]),
            qkv=reader.matrix("attn.qkv", heads + 2 * groups, n_embd),
            attention_proj=reader.matrix("attn.proj", n_embd, heads),
            window=windows_of(c, index, index + 1)[0] or 0,
            cache_class=self._places[index - self.start][0],
            cache_layer=self._places[index - self.start][1],
            rope_table=c["rope_indices"][index] if n_tables(c) > 1 and c["rope_indices"] else 0,
        )
        is_dense = c["first_k_dense_replace"] is not None and index < c["first_k_dense_replace"]
        if c["mlp_class_name"] == "LLaMAMoE" and not is_dense:
            self._experts(block, reader)
        else:
            block.mlp = reader.mlp("mlp", n_embd, c["intermediate_size"], c["mlp_class_name"] != "GptNeoxMLP")
        return block

    def _experts(self, block: MdiBlock, reader: BlockReader) -> None:
        c = self.config
        n_embd, width = c["n_embd"], c["moe_intermediate_size"] or c["intermediate_size"]
        block.router = reader.router("mlp.gate", c["n_expert"], n_embd)
        experts = (MdiMlp * c["n_expert"])(
            *(reader.mlp(f"mlp.experts.{e}", n_embd, width, True) for e in range(c["n_expert"]))
        )
        self._kept.append(experts)
        block.experts, block.n_expert = experts, c["n_expert"]
        if c["n_shared_expert"]:
            block.mlp = reader.mlp("mlp.shared_experts", n_embd, width * c["n_shared_expert"], True)


Weights = Mapping[str, Matrix | np.ndarray]


class Head:
    """Rows that went through all blocks -> logits.

    Args:
        config: litgpt's Config as a plain dict.
        weights: of the part "head".
        n_tokens: how many of the vocabulary the weights are for.

    Raises:
        KernelError: a tensor is missing or of another shape.
    """

    def __init__(self, config: Mapping[str, Any], weights: Weights, n_tokens: int, context: Context) -> None:
        matrix, n_embd = weights.get("lm_head.weight"), int(config["n_embd"])
        if not isinstance(matrix, Matrix) or (matrix.n_out, matrix.n_in) != (n_tokens, n_embd):
            raise KernelError(f"the head is no packed weight of {n_tokens} x {n_embd}")
        bias = _row(weights, "lm_head.bias", n_tokens)
        norm = _row(weights, "transformer.ln_f.weight", n_embd)
        if norm is None:
            norm = np.ones(n_embd, dtype=np.float32)  # a norm without weights
        norms = norm, _row(weights, "transformer.ln_f.bias", n_embd)
        self._linear = Linear(context, model_of(config), norms, matrix, bias, config["final_logit_softcapping"])

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """float32 (M, n_embd) -> (M, n_tokens)"""
        return self._linear(np.ascontiguousarray(x, dtype=np.float32))


def _row(weights: Weights, name: str, size: int) -> np.ndarray | None:
    """float32 (size); None if there is none. The kernels read it unchecked."""
    if name not in weights:
        return None
    found = array_of(weights, name)
    if found.shape != (size,):
        raise KernelError(f"{name} is no row of {size} numbers")
    return np.ascontiguousarray(found, dtype=np.float32)


def array_of(weights: Weights, name: str) -> np.ndarray:
    found = weights.get(name)
    if not isinstance(found, np.ndarray):
        raise KernelError(f"the weights lack {name}")
    return found
