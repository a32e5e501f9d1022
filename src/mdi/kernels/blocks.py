"""A range of transformer blocks in the kernels: the structures as C has them, the threads that compute, the tables of rotary
positions. One call computes a frame. Then the final norm and the head, or some rows of it. Needs neither torch nor litgpt.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import time
from array import array
from collections.abc import Callable, Generator, Mapping, Sequence
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from mdi.control_groups import n_cores
from mdi.errors import Code, EngineError, KernelError, UsageError
from mdi.kernels.cache_columns import CacheColumns
from mdi.kernels.cache_rows import KernelLayout
from mdi.kernels.layout import Matrix, matrix_bytes, pack
from mdi.kernels.library import load
from mdi.kernels.pages import CachePages, Pool
from mdi.kernels.positions import rope_tables, score_bias
from mdi.kernels.slices import Slices, SliceTable, only_logits
from mdi.kernels.states import StateEntry, StateStore
from mdi.kernels.weight_formats import check_packed, layout_of
from mdi.model.caches import Paged, State, cache_numbers, stage_places
from mdi.model.plain import ModelConfig, spec_of
from mdi.model.spec import (
    Attention,
    BlockSpec,
    DeltaNet,
    Dense,
    Experts,
    Gated,
    LatentAttention,
    Mlp,
    ModelSpec,
    Norm,
    Rotary,
)
from mdi.model.tensors import FINAL_NORM, HEAD

CACHE_TYPES = {"float32": 0, "bf16": 1, "fp16": 2, "int8": 3}
NORM_TYPES = {"rms": 0, "layer": 1}
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "clamped_glu": 4}
RESIDUALS = {"sequential": 0, "parallel": 1, "behind": 2}
PIECES = {"attention": 0, "mlp": 1, "project": 2, "attend": 3}  # MdiPiece


class MdiMatrix(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("bias", c_void_p),
        *((n, c_int32) for n in ("format", "n_out", "n_in", "skip")),
        ("pieces", c_void_p),
        *((n, c_int32) for n in ("n_pieces", "reserved")),
    ]

    @classmethod
    def of(cls, matrix: Matrix, bias: np.ndarray | None, kept: list[Any]) -> MdiMatrix:
        """Refers to memory, all of which goes to `kept`."""
        kept.append((matrix, bias))
        pieces = matrix.pieces
        form = layout_of(pieces[0].format).number
        address = None if bias is None else bias.ctypes.data
        found = cls(matrix.data.ctypes.data, address, form, matrix.n_out, matrix.n_in, matrix.skip)
        if len(pieces) > 1:
            first = [sum(piece.n_out for piece in pieces[:i]) for i in range(len(pieces))]
            own = [None if bias is None else bias[at : at + p.n_out] for at, p in zip(first, pieces, strict=True)]
            array = (cls * len(pieces))(*(cls.of(*of, kept) for of in zip(pieces, own, strict=True)))
            kept.append(array)
            found.pieces, found.n_pieces = ctypes.addressof(array), len(array)
        return found


class MdiNorm(ctypes.Structure):
    _fields_ = [
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("type", c_int32),
        ("unit_offset", c_int32),
        ("eps", c_float),
        ("reserved", c_int32),
    ]


class MdiMlp(ctypes.Structure):
    _fields_ = [
        *((n, MdiMatrix) for n in ("fc_1", "fc_2", "proj")),
        ("activation", c_int32),
        ("limit", c_float),
    ]


class MdiAttention(ctypes.Structure):
    _fields_ = [
        *((n, MdiNorm) for n in ("norm_q", "norm_k", "norm_v")),
        *((n, MdiMatrix) for n in ("qkv", "proj", "out_gate")),
        *((n, c_void_p) for n in ("sinks", "cos", "sin", "score_bias")),
        ("score_bias_floats", c_int64),
        *(
            (n, c_int32)
            for n in (
                *("n_head", "n_groups", "head_size", "n_keys", "n_values"),
                *("queries_per_group", "first_head", "norms_over_all"),
            )
        ),
        *(
            (n, c_int32)
            for n in ("rope_n_elem", "rope_interleaved", "window", "cache_type", "cache_class", "cache_layer")
        ),
        *((n, c_float) for n in ("scale", "softcap")),
    ]


class MdiLatent(ctypes.Structure):
    _fields_ = [
        *((n, MdiNorm) for n in ("norm_q", "norm_kv")),
        *((n, MdiMatrix) for n in ("q_a", "q_b")),
        *((n, POINTER(MdiMatrix)) for n in ("up_k", "up_v")),
        *((n, c_int32) for n in ("kv_rank", "nope_size", "value_size", "reserved")),
    ]


class MdiDelta(ctypes.Structure):
    _fields_ = [
        *((n, MdiMatrix) for n in ("qkv", "out_gate", "gates", "proj")),
        ("norm", MdiNorm),
        *((n, c_void_p) for n in ("taps", "dt_bias", "log_rate")),
        *((n, c_int32) for n in ("n_head", "n_groups", "k_size", "v_size", "n_taps", "is_in_turn")),
        *((n, c_int32) for n in ("cache_class", "cache_layer")),
        ("scale", c_float),
        ("reserved", c_int32),
    ]


class MdiExperts(ctypes.Structure):
    _fields_ = [
        ("router", MdiMatrix),
        *((n, MdiNorm) for n in ("norm_router", "norm", "norm_behind", "norm_behind_shared")),
        *((n, c_void_p) for n in ("correction", "scales")),
        ("experts", POINTER(MdiMlp)),
        ("shared_gate", MdiMatrix),
        *((n, c_int32) for n in ("n", "n_used", "n_groups", "n_used_groups", "n_scores")),
        ("scale", c_float),
    ]


class MdiGated(ctypes.Structure):
    _fields_ = [
        *((n, MdiMatrix) for n in ("gate", "proj")),
        ("norm", MdiNorm),
        *((n, c_int32) for n in ("activation", "at")),
    ]


class MdiBlock(ctypes.Structure):
    _fields_ = [
        *((n, MdiNorm) for n in ("norm_1", "post_attention_norm", "norm_2", "post_mlp_norm")),
        ("attention", MdiAttention),
        ("latent", MdiLatent),
        ("delta", MdiDelta),
        ("mlp", MdiMlp),
        ("experts", MdiExperts),
        ("gated", MdiGated),
        ("scalar", c_void_p),
        *((n, c_int32) for n in ("residual", "norm_is_shared")),
    ]


class MdiStage(ctypes.Structure):
    _fields_ = [
        ("blocks", POINTER(MdiBlock)),
        *((n, c_int32) for n in ("n_blocks", "n_classes", "n_embd", "n_state_classes")),
        *((n, c_void_p) for n in ("n_finished", "low_rank", "low_rank_of_block")),
    ]


class MdiLowRank(ctypes.Structure):
    _fields_ = [
        ("a", c_void_p),
        ("b", c_void_p),
        *((n, c_int32) for n in ("adapter", "layer", "rank", "n_in", "first", "n_out")),
    ]


class MdiFrame(ctypes.Structure):
    _fields_ = [
        ("rows", c_void_p),
        ("slices", c_char_p),  # the records of a slices.SliceTable
        ("pages", c_void_p),
        ("first", c_void_p),
        ("pool", c_void_p),
        ("page_bytes", c_void_p),
        ("n_slices", c_int32),
        ("n_rows", c_int32),
        ("columns", c_void_p),
        ("n_columns", c_int64),
        ("states", c_void_p),
    ]


Tensors = Mapping[str, Matrix | np.ndarray]


class ExpertReader(Protocol):
    """Brings experts into memory as they are chosen."""

    def ready(self, block: int, chosen: Sequence[int]) -> Generator[tuple[int, list[tuple[int, int]]], None, None]:
        """Bring chosen experts, in rising order, of a block by its number in the model.

        Yields:
            how many of them, from the first on, have come by now: those behind the last yield are in memory until the next one.
            Of each that lies elsewhere than before, its number and by how many bytes.
        """


def norm_of(
    norm: Norm | None, weight: np.ndarray | None, bias: np.ndarray | None, size: int, kept: list[Any]
) -> MdiNorm:
    """The structure of a norm over rows of `size` numbers, whose memory goes to `kept`; without weights they are ones."""
    if norm is None:
        return MdiNorm()
    weight = np.ones(size, dtype=np.float32) if weight is None else weight
    kept.append((weight, bias))
    address = None if bias is None else bias.ctypes.data
    return MdiNorm(weight.ctypes.data, address, NORM_TYPES[norm.kind], norm.unit_offset, norm.eps)


class BlockReader:
    """Takes the tensors of a block by name, checks their shapes, and keeps their memory."""

    def __init__(self, block: int, tensors: Tensors, kept: list[Any]) -> None:
        self._block, self._tensors, self._kept = block, tensors, kept

    def norm(self, name: str, size: int, norm: Norm | None) -> MdiNorm:
        weight = self._array(f"{name}.weight", size) if norm is not None and norm.has_weight else None
        bias = self._array(f"{name}.bias", size) if norm is not None and norm.has_bias else None
        return norm_of(norm, weight, bias, size, self._kept)

    def matrix(self, name: str, n_out: int, n_in: int) -> MdiMatrix:
        matrix = self._tensors.get(f"{name}.weight")
        if not isinstance(matrix, Matrix) or (matrix.n_out, matrix.n_in - matrix.skip) != (n_out, n_in):
            raise KernelError(f"block {self._block}: {name}.weight is no packed weight of {n_out} x {n_in}")
        check_matrix(matrix)
        bias = self._array(f"{name}.bias", n_out) if f"{name}.bias" in self._tensors else None
        return MdiMatrix.of(matrix, bias, self._kept)

    def small_matrix(self, name: str, n_out: int, n_in: int) -> MdiMatrix:
        """One that files hold in plain numbers."""
        found = self._tensors.get(f"{name}.weight")
        if isinstance(found, np.ndarray) and found.shape == (n_out, n_in):
            self._tensors = {**self._tensors, f"{name}.weight": pack("float32", found)}
        return self.matrix(name, n_out, n_in)

    def mixer(self, of: Attention, width: int) -> MdiAttention:
        """Without positions and the places of its cache."""
        size, q, k = of.head_size, of.n_head * of.head_size, of.n_groups * of.head_size
        _, n_keys, n_values = of.made
        rotary = of.positions if isinstance(of.positions, Rotary) else None
        return MdiAttention(
            norm_q=self.norm("attn.norm_q", q if of.qk_norm_over_all else size, of.qk_norm),
            norm_k=self.norm("attn.norm_k", k if of.qk_norm_over_all else size, of.qk_norm if n_keys else None),
            norm_v=norm_of(of.v_norm, None, None, size, self._kept),
            qkv=self.matrix("attn.qkv", sum(of.made) * size, width),
            proj=self.matrix("attn.proj", width, q),
            out_gate=self.matrix("attn.out_gate", q, width) if of.has_gate else MdiMatrix(),
            sinks=int(self._array("attn.sinks", of.n_head).ctypes.data) if of.has_sinks else None,
            n_head=of.n_head,
            n_groups=of.n_groups,
            head_size=size,
            n_keys=n_keys,
            n_values=n_values,
            queries_per_group=of.queries_per_group,
            first_head=of.share[1] if of.share else 0,
            norms_over_all=of.qk_norm_over_all,
            rope_n_elem=rotary.n_elem if rotary else 0,
            rope_interleaved=rotary.interleaved if rotary else False,
            window=of.window or 0,
            scale=of.scale,
            softcap=of.softcap or 0.0,
        )

    def shared_part(self, of: LatentAttention, width: int) -> MdiAttention:
        """What latent attention has in common with other attention, without positions and the places of its cache."""
        size = of.kv_rank + of.rope_size
        return MdiAttention(
            qkv=self.matrix("attn.kv_a_proj_with_mqa", size, width),
            proj=self.matrix("attn.proj", width, of.n_head * of.value_size),
            n_head=of.n_head,
            n_groups=1,
            head_size=size,
            rope_n_elem=of.rope_size,
            rope_interleaved=of.positions.interleaved,
            window=of.window or 0,
            scale=of.scale,
            softcap=of.softcap or 0.0,
        )

    def latent(self, of: LatentAttention, width: int) -> MdiLatent:
        norm, n_queries = Norm("rms", of.norm_eps), of.n_head * (of.nope_size + of.rope_size)
        found = MdiLatent(
            norm_kv=self.norm("attn.kv_a_norm", of.kv_rank, norm),
            kv_rank=of.kv_rank,
            nope_size=of.nope_size,
            value_size=of.value_size,
        )
        if of.q_rank is None:
            found.q_b = self.matrix("attn.q_proj", n_queries, width)
        else:
            found.q_a = self.matrix("attn.q_a_proj", of.q_rank, width)
            found.norm_q = self.norm("attn.q_a_norm", of.q_rank, norm)
            found.q_b = self.matrix("attn.q_b_proj", n_queries, of.q_rank)
        found.up_k, found.up_v = self._absorbed(of)
        return found

    def _absorbed(self, of: LatentAttention) -> tuple[Any, Any]:
        """Of each head, what makes keys and values: numbers of which bfloat16 loses nothing are that."""
        name, n = "attn.kv_b_proj.weight", of.nope_size + of.value_size
        up = self._tensors.get(name)
        if not isinstance(up, np.ndarray) or up.shape != (of.n_head * n, of.kv_rank):
            raise KernelError(f"block {self._block}: {name} is no array of {of.n_head * n} x {of.kv_rank}")
        up = np.ascontiguousarray(up, dtype=np.float32)
        form = "float32" if (up.view(np.uint32) & 0xFFFF).any() else "bf16"
        found = []
        for rows, is_turned in ((slice(0, of.nope_size), True), (slice(of.nope_size, n), False)):
            own = [head[rows].T if is_turned else head[rows] for head in up.reshape(of.n_head, n, of.kv_rank)]
            packed = [MdiMatrix.of(pack(form, np.ascontiguousarray(one)), None, self._kept) for one in own]
            found.append((MdiMatrix * len(packed))(*packed))
        self._kept.append(found)
        return found[0], found[1]

    def delta(self, of: DeltaNet, width: int) -> MdiDelta:
        """Without the place of its states; nothing for a node of a group that has no heads."""
        if not of.n_head:
            return MdiDelta()
        n_values = of.n_head * of.v_size
        return MdiDelta(
            qkv=self.matrix("delta.qkv", of.n_channels, width),
            out_gate=self.matrix("delta.out_gate", n_values, width),
            gates=self.small_matrix("delta.gates", 2 * of.n_head, width),
            proj=self.matrix("delta.proj", width, n_values),
            norm=self.norm("delta.norm", of.v_size, of.norm),
            taps=self._array("delta.conv.weight", of.n_channels, 1, of.n_taps, is_turned=True).ctypes.data,
            dt_bias=self._array("delta.dt_bias", of.n_head).ctypes.data,
            log_rate=self._array("delta.A_log", of.n_head).ctypes.data,
            n_head=of.n_head,
            n_groups=of.n_groups,
            k_size=of.k_size,
            v_size=of.v_size,
            n_taps=of.n_taps,
            is_in_turn=of.is_in_turn,
            scale=of.k_size**-0.5,
        )

    def mlp(self, name: str, width: int, of: Dense) -> MdiMlp:
        into = {"fc_1": "fc_1", "fc_2": "fc_2"} if of.is_gated else {"fc_1": "fc"}
        return MdiMlp(
            **{key: self.matrix(f"{name}.{fc}", of.width, width) for key, fc in into.items()},
            proj=self.matrix(f"{name}.proj", width, of.width),
            activation=ACTIVATIONS[of.activation],
            limit=of.limit or 0.0,
        )

    def experts(self, width: int, of: Experts) -> MdiExperts:
        name, router = "mlp.gate", of.router
        found = MdiExperts(self.small_matrix(name, of.n, width), n=of.n, n_used=of.n_used, scale=router.scale)
        found.n_groups, found.n_used_groups, found.n_scores = (
            router.n_groups,
            router.n_used_groups,
            router.n_scores_per_group,
        )
        if router.has_correction:
            found.correction = self._array(f"{name}.e_score_correction_bias", of.n).ctypes.data
        if router.has_expert_scales:
            found.scales = self._array(f"{name}.expert_scales", of.n).ctypes.data
        if of.has_shared_gate:
            found.shared_gate = self.small_matrix("mlp.shared_experts.gate", 1, width)
        if of.own_norm is not None:
            weight = self._array("mlp.norm_gate.weight", width) / np.sqrt(np.float32(width))
            found.norm_router = norm_of(of.own_norm, weight, None, width, self._kept)
            found.norm = self.norm("mlp.norm_experts", width, of.own_norm)
            found.norm_behind = self.norm("mlp.norm_post_experts", width, of.own_norm)
            found.norm_behind_shared = self.norm("mlp.norm_post_shared", width, of.own_norm)
        experts = (MdiMlp * of.n)(*(self.mlp(f"mlp.experts.{e}", width, of.expert) for e in range(of.n)))
        self._kept.append(experts)
        found.experts = experts
        return found

    def gated(self, of: Gated, width: int) -> MdiGated:
        """Without the place of its column."""
        gate, proj = self.matrix("gated.fc", of.width, width), self.matrix("gated.proj", width, of.width)
        return MdiGated(gate, proj, self.norm("gated.norm", width, of.norm), ACTIVATIONS[of.activation])

    def scalar(self) -> int:
        return int(self._array("scalar", 1).ctypes.data)

    def _array(self, name: str, *shape: int, is_turned: bool = False) -> np.ndarray:
        """float32; with `is_turned`, its dimensions in the reverse order."""
        array = self._tensors.get(name)
        if not isinstance(array, np.ndarray) or array.shape != shape:
            raise KernelError(f"block {self._block}: {name} is no array of {' x '.join(map(str, shape))} numbers")
        array = np.ascontiguousarray(array.T if is_turned else array, dtype=np.float32)
        self._kept.append(array)
        return array


def check_matrix(matrix: Matrix) -> None:
    """Raises KernelError if its bytes are not just those of its shape: the kernels read them unchecked."""
    try:
        check_packed(matrix.format)
        data, n_bytes = matrix.data, matrix_bytes(matrix.format, matrix.n_out, matrix.n_in)
    except UsageError as e:
        raise KernelError(str(e)) from None
    if data.dtype != np.uint8 or data.shape != (n_bytes,) or not data.flags.c_contiguous:
        raise KernelError(
            f"a weight of {matrix.n_out} x {matrix.n_in} in {matrix.format} has {n_bytes} bytes, not {data.size}"
        )
    if not 0 <= matrix.skip <= matrix.n_in:
        raise KernelError(f"a weight of {matrix.n_in} inputs that begins with input {matrix.skip}")


MOST_THREADS = 256  # csrc/stage.h
SPINS = 2000  # looks of an idle thread before it sleeps: tens of microseconds
SPAN_S = 1.0  # between two measurements
OTHERS_SHARE = 0.1  # share of each used core that other programs may take


class Context:
    """The threads and the working memory of one stage. One call computes at a time."""

    def __init__(self, n_threads: int = 1) -> None:
        library = load()
        if library is None:
            raise KernelError("the kernels are not available")
        self.library = library
        library.mdi_context_new.restype = ctypes.c_void_p
        n_threads = max(1, min(n_threads, MOST_THREADS))
        self.n_threads = n_threads
        handle = library.mdi_context_new(n_threads, 0)
        if not handle:
            raise KernelError(f"the system refused {n_threads} threads for the kernels: ask for fewer with --threads")
        self._handle: ctypes.c_void_p | None = ctypes.c_void_p(handle)
        self._free_cores, self._spins = FreeCores(n_threads), 0

    @property
    def handle(self) -> ctypes.c_void_p:
        assert self._handle is not None, "closed"
        return self._handle

    def poll_neighbours(self) -> None:
        """Let idle threads look for work, or sleep at once, as other processes leave the cores free now."""
        spins = self._free_cores.spins()
        if spins != self._spins:
            self._spins = spins
            self.library.mdi_context_spins(self.handle, spins)

    def close(self) -> None:
        if self._handle is not None:
            self.library.mdi_context_delete(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self.close()


class Linear:
    """A norm, if there is one, and a linear layer: float32 (N, n_in) -> (N, n_out); with `softcap`, of the results.

    Args:
        norm: and its weight and bias (n_in); the memory of all is used without copying.

    Raises:
        KernelError: the matrix has other bytes than its shape says.
    """

    def __init__(
        self, context: Context, matrix: Matrix, bias: np.ndarray | None = None, softcap: float | None = None,
        norm: tuple[Norm, np.ndarray | None, np.ndarray | None] | None = None,
    ) -> None:  # fmt: skip
        check_matrix(matrix)
        self._context = context
        self._kept: list[Any] = []
        self._n_in, self.n_out = matrix.n_in - matrix.skip, matrix.n_out
        self._norm = MdiNorm() if norm is None else norm_of(*norm, matrix.n_in, self._kept)
        self._matrix = MdiMatrix.of(matrix, bias, self._kept)
        self.arguments = ctypes.byref(self._norm), ctypes.byref(self._matrix), c_float(softcap or 0.0)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Raises EngineError: no memory is left."""
        assert x.shape[1] == self._n_in and x.dtype == np.float32 and x.flags.c_contiguous
        y = np.empty((len(x), self.n_out), dtype=np.float32)
        done = self._context.library.mdi_linear(
            self._context.handle, *self.arguments, ctypes.c_void_p(x.ctypes.data), len(x), ctypes.c_void_p(y.ctypes.data),
        )  # fmt: skip
        if done:
            raise EngineError(f"no memory is left to compute {len(x)} rows", Code.MEMORY)
        return y


class FreeCores:
    """Whether this process has its cores to itself: only then may its idle threads spin.

    Measures about once a second, when it is asked, what other processes take of this one's cores.

    Args:
        n_threads: that compute.
        clock, own_s: seconds, and processor seconds of this process.
        busy_s: processor seconds of all processes on this one's cores; None where the system does not tell.
    """

    def __init__(
        self,
        n_threads: int,
        clock: Callable[[], float] = time.monotonic,
        own_s: Callable[[], float] = time.process_time,
        busy_s: Callable[[], float | None] | None = None,
    ) -> None:
        self._n_threads = n_threads
        self._clock, self._own_s, self._busy_s = clock, own_s, busy_s or busy_core_s
        self._can_spin = 1 < n_threads <= n_cores()
        self._begin, self._before = clock(), self._others_s()
        self._spins = 0

    def spins(self) -> int:
        """How often an idle thread of the kernels may poll for work before it sleeps; 0 beside other work or under a quota."""
        now = self._clock()
        if not self._can_spin or now - self._begin < SPAN_S:
            return self._spins
        others, span, before = self._others_s(), now - self._begin, self._before
        self._begin, self._before = now, others
        is_free = before is not None and others is not None and others - before <= OTHERS_SHARE * self._n_threads * span
        self._spins = SPINS if is_free else 0
        return self._spins

    def _others_s(self) -> float | None:
        busy = self._busy_s() if self._can_spin else None
        return None if busy is None else busy - self._own_s()


def busy_core_s(stat: Path = Path("/proc/stat")) -> float | None:
    """Seconds that the cores which this process may use were busy since the system's start; None if it does not say."""
    try:
        lines = stat.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    busy, n_found = 0, 0
    for name, *fields in (line.split() for line in lines if line.startswith("cpu")):
        if name in cores:
            user, nice, system, _idle, _iowait, *interrupted = map(int, fields[:8])
            busy += user + nice + system + sum(interrupted)
            n_found += 1
    return busy / os.sysconf("SC_CLK_TCK") if n_found == len(cores) else None  # a sandbox may show fewer


MOST_ROPE = 1024  # csrc/rotary.h
LATENTS_TOGETHER = 16  # csrc/latent.h


def why_not_in_kernels(config: ModelConfig) -> str | None:
    """Name the feature of a model that the kernels lack; None if they compute all blocks."""
    try:
        spec = spec_of(config)
    except (ValueError, ArithmeticError, LookupError, TypeError) as e:  # it may come from another node
        return str(e)
    return next(filter(None, map(_why_not, spec.kinds)), None)


def _why_not(block: BlockSpec) -> str | None:
    mixer, mlp = block.mixer, block.mlp
    if isinstance(mlp, Experts) and mlp.router.has_correction and not mlp.router.is_normed:
        return "weights of experts that do not add up to one"
    if isinstance(mixer, DeltaNet):
        wrong = _contradiction_of_net(mixer)
    else:
        wrong = _contradiction_of_latents(mixer) if isinstance(mixer, LatentAttention) else _contradiction(mixer)
    return wrong or _contradiction_of_mlp(mlp)


def _contradiction(of: Attention) -> str | None:
    """Numbers that do not fit each other: the kernels would read beyond their memory."""
    if of.n_groups < 1 or (of.share is None and of.n_head % of.n_groups):
        return f"{of.n_head} heads in {of.n_groups} groups"
    if isinstance(of.positions, Rotary):
        n = of.positions.n_elem
        if not 2 <= n <= MOST_ROPE:
            return f"rotary positions of {n} numbers"
        if n > of.head_size:
            return f"rotary positions of {n} numbers in heads of {of.head_size}"
    return f"windows of {of.window} positions" if of.window is not None and of.window < 1 else None


def _contradiction_of_latents(of: LatentAttention) -> str | None:
    if of.bias or of.a_bias:
        return "biases of latent attention"
    if of.kv_rank % LATENTS_TOGETHER or of.rope_size % LATENTS_TOGETHER or of.rope_size > MOST_ROPE:
        return f"latent attention with rows of {of.kv_rank} and {of.rope_size} numbers"
    return f"windows of {of.window} positions" if of.window is not None and of.window < 1 else None


def _contradiction_of_net(of: DeltaNet) -> str | None:
    sizes = of.n_head, of.n_groups, of.k_size, of.v_size, of.n_taps
    if min(sizes[1:]) < 1 or of.n_head < 0 or of.n_head % of.n_groups:
        return f"gated delta nets of the sizes {', '.join(map(str, sizes))}"
    return None


def _contradiction_of_mlp(of: Mlp) -> str | None:
    if isinstance(of, Experts) and not 1 <= of.n_used <= of.n:
        return f"{of.n_used} of {of.n} experts"
    if isinstance(of, Experts) and of.router.n_groups > 1:
        router, each = of.router, of.n // of.router.n_groups
        is_whole = each * router.n_groups == of.n and router.has_correction and router.n_scores_per_group <= each
        if not is_whole or not of.n_used <= router.n_used_groups * each <= of.n:
            return f"{of.n_used} of {of.n} experts in {router.n_groups} groups"
    dense = of if isinstance(of, Dense) else of.expert
    return "clamped MLPs of two layers" if dense.activation == "clamped_glu" and not dense.is_gated else None


# Layers to which adapters may add something, as csrc/model.h numbers them.
LAYERS = {
    "attn.qkv": 0, "attn.proj": 1, "mlp.fc": 2, "mlp.fc_1": 2, "mlp.fc_2": 3, "mlp.proj": 4, "attn.out_gate": 5,
    "delta.qkv": 0, "delta.proj": 1, "delta.out_gate": 5, "delta.gates": 6,
}  # fmt: skip
MOST_RANK = 256
MOST_ADAPTERS = 64  # of a model at the same time


class LowRank(NamedTuple):
    """A part of an adapter: it adds b' a x to results [first, first + n_out) of a layer that reads x.

    Attributes:
        adapter: its number, from 1 on.
        layer: a key of LAYERS.
        a: float32 (rank, n_in); b: float32 (rank, n_out), with the adapter's scale; both contiguous.
    """

    adapter: int
    layer: str
    first: int
    a: np.ndarray
    b: np.ndarray


def check_low_rank(part: LowRank, layer: MdiMatrix, has_experts: bool) -> None:
    """Raises KernelError for what does not fit its layer: the kernels read it unchecked."""
    is_there = bool(layer.data) and not (has_experts and part.layer.startswith("mlp."))
    arrays = all(x.dtype == np.float32 and x.ndim == 2 and x.flags.c_contiguous for x in (part.a, part.b))
    if not (is_there and arrays and not layer.skip and 1 <= part.adapter <= MOST_ADAPTERS):
        raise KernelError(f"an adapter for {part.layer}, which this block does not have so")
    rank, n_in = part.a.shape
    fits = n_in == layer.n_in and len(part.b) == rank and 0 <= part.first <= layer.n_out - part.b.shape[1]
    if not (1 <= rank <= MOST_RANK and part.b.shape[1] and fits):
        raise KernelError(
            f"an adapter for {part.layer} of {part.a.shape} and {part.b.shape} from {part.first} on, where the layer is "
            f"{layer.n_out} x {layer.n_in}, and ranks are at most {MOST_RANK}"
        )


class _Short(NamedTuple):
    """Some rows of a frame: their structure and its memory, the rows themselves, and their places in the frame."""

    frame: MdiFrame
    kept: object
    rows: np.ndarray
    places: np.ndarray


class Blocks:
    """Blocks [start, stop) of a model.

    Args:
        spec: of the whole model, or of a node's share of its blocks (tensor.shares).
        tensors: of block i, by litgpt's names without "transformer.h.<i>.": packed weights of linear layers as Matrix,
            norms and biases as float32 arrays. Their memory is used without copying.
        cache_type: what caches hold, one of model.caches.CACHE_TYPES.
        adapters: what adapters add to the layers of block i, for the rows of their sequences.

    Raises:
        KernelError: a tensor is missing or of another shape, or there are no kernels.
    """

    caches: CachePages  # this and what follows: from `prepare` on
    _tables: list[np.ndarray]
    _pool: np.ndarray
    _page_bytes: np.ndarray
    _pool_address: int
    _page_bytes_address: int
    _stage: MdiStage

    def __init__(
        self, spec: ModelSpec, start: int, stop: int, tensors: Callable[[int], Tensors], cache_type: str,
        context: Context, adapters: Callable[[int], Sequence[LowRank]] = lambda block: (),
    ) -> None:  # fmt: skip
        self.spec, self.start, self.stop = spec, start, stop
        self.context = context
        self.n_embd, self.row_in = spec.width, spec.row_at(start)
        counts, self._places = stage_places(spec, start, stop)
        self._numbers, self.cache_columns = (
            cache_numbers(spec, start, stop),
            CacheColumns(spec, start, stop, cache_type),
        )
        self._kinds = {kind: n for kind, n in counts.items() if isinstance(kind, Paged)}
        self._states = {
            kind: n for kind, n in counts.items() if isinstance(kind, State)
        }  # their classes are the last ones
        self.classes = [kind.of_blocks(n, cache_type) for kind, n in self._kinds.items()]
        self._cache_type = cache_type
        self._kept: list[Any] = []  # keeps alive what the structures refer to
        self._blocks = (MdiBlock * (stop - start))()
        for i in range(start, stop):
            self._blocks[i - start] = self._block(i, tensors(i))
        self._take_adapters([adapters(i) for i in range(start, stop)])
        self.max_length = 0
        self._n_finished = np.zeros(1, dtype=np.int64)

    @property
    def n_finished(self) -> int:
        """Blocks that have been computed so far, also of the frame that is being computed. From any thread."""
        return int(self._n_finished[0])

    def prepare(self, max_length: int, capacities: Sequence[int], limit_bytes: int | None = None) -> None:
        """Build the tables of positions of a run, and its caches.

        Args:
            capacities: pages of each of `classes`.
            limit_bytes: that the states of a class take at most; None is the machine's memory.
        """
        self.max_length = max_length
        self._set_positions(max_length)
        pools = [Pool(c.page_bytes, n) for c, n in zip(self.classes, capacities, strict=True)]
        layouts = [
            KernelLayout(*one, self._cache_type, pool) for one, pool in zip(self._kinds.items(), pools, strict=True)
        ]
        states = [StateStore(kind, n, limit_bytes) for kind, n in self._states.items()]
        self.caches = CachePages(self.classes, pools, layouts, self._places, self._numbers, self._cache_type, states)
        self._pool = np.array([pool.address for pool in pools], dtype=np.uint64)
        self._page_bytes = np.array([pool.page_bytes for pool in pools], dtype=np.int64)
        self._pool_address, self._page_bytes_address = self._pool.ctypes.data, self._page_bytes.ctypes.data
        self._stage = MdiStage(
            self._blocks, len(self._blocks), len(self.classes), self.n_embd, len(self._states), self._n_finished.ctypes.data,
            ctypes.addressof(self._low_rank) if len(self._low_rank) else None, self._low_rank_of_block.ctypes.data,
        )  # fmt: skip

    def _set_positions(self, max_length: int) -> None:
        """Build each table of positions once, and tell its blocks where it is."""
        rotary = functools.cache(lambda positions: rope_tables(positions, max_length))
        biases = functools.cache(lambda mixer: score_bias(mixer, max_length))
        self._tables = []
        for block, spec in zip(self._blocks, self.spec.blocks[self.start : self.stop], strict=True):
            attention, mixer = block.attention, spec.mixer
            if isinstance(mixer, DeltaNet):
                continue
            if isinstance(mixer.positions, Rotary):
                cos, sin = rotary(mixer.positions)
                attention.cos, attention.sin = cos.ctypes.data, sin.ctypes.data
                self._tables += [cos, sin]
            elif isinstance(mixer, Attention) and (bias := biases(mixer)) is not None:
                attention.score_bias, attention.score_bias_floats = bias.ctypes.data, bias.shape[1]
                self._tables.append(bias)

    def _take_adapters(self, of_blocks: Sequence[Sequence[LowRank]]) -> None:
        """Check what adapters add against the layers, and keep its memory."""
        found = []
        for block, own in zip(self._blocks, of_blocks, strict=True):
            fc_1 = "mlp.fc_1" if block.mlp.fc_2.data else "mlp.fc"
            kind, mixer = ("delta", block.delta) if block.delta.n_head else ("attn", block.attention)
            layers = {f"{kind}.{name}": getattr(mixer, name) for name in ("qkv", "proj", "out_gate")}
            layers |= {fc_1: block.mlp.fc_1, "mlp.fc_2": block.mlp.fc_2, "mlp.proj": block.mlp.proj}
            layers["delta.gates"] = block.delta.gates
            for part in own:
                check_low_rank(part, layers.get(part.layer, MdiMatrix()), bool(block.experts.n))
                self._kept.append(part)
                found.append(
                    MdiLowRank(
                        part.a.ctypes.data, part.b.ctypes.data, part.adapter, LAYERS[part.layer], *part.a.shape, part.first,
                        part.b.shape[1],
                    )
                )  # fmt: skip
        self._low_rank = (MdiLowRank * len(found))(*found)
        ends = np.cumsum([0, *(len(own) for own in of_blocks)])
        self._low_rank_of_block = np.ascontiguousarray(ends, dtype=np.int32)

    def forward(
        self, rows: np.ndarray, slices: Slices, taps: Sequence[int] = (), take: Callable[[], None] = lambda: None,
        columns: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Run the blocks, in place.

        Args:
            rows: float32 (N, n_embd), contiguous: the rows of all slices.
            taps: numbers of some blocks in the model, rising: `take` is called after each of them, when `rows` are its outputs.
            columns: float32 (N, those of `row_in` behind hidden), contiguous; None: there are none.

        Raises:
            EngineError: a slice that fits neither the run's length nor its sequence's cache, or memory that has run out.
        """
        frame, kept = self._frame(rows, slices, columns)
        self.context.poll_neighbours()
        begin, skipped = self.start, self._skipped_from(slices)
        for end in sorted({*(tap + 1 for tap in taps), skipped, self.stop}):
            if begin >= end:
                continue
            if begin == skipped < self.stop:
                short = self._of_logits(rows, slices, columns)
                frame = short.frame
            stage = self._stage if end - begin == len(self._blocks) else self._piece_of_stage(begin, end)
            if frame.n_rows and self.context.library.mdi_forward(
                self.context.handle, ctypes.byref(stage), ctypes.byref(frame)
            ):
                raise EngineError(f"no memory is left to compute a frame of {len(rows)} rows", Code.MEMORY)
            if begin >= skipped:
                rows[short.places] = short.rows
            if end - 1 in taps:
                take()
            begin = end
        del kept

    def _skipped_from(self, slices: Slices) -> int:
        """The block of the stage from which on only rows that give logits are computed; `stop` if all are."""
        table = SliceTable.of(slices)
        is_any_skipped = table.n_logits < table.n_rows
        return (
            max(self.start, self.spec.skipped_from)
            if is_any_skipped and self.spec.skipped_from < self.stop
            else self.stop
        )

    def _of_logits(self, rows: np.ndarray, slices: Slices, columns: np.ndarray | None) -> _Short:
        """The rows of a frame that give logits, once `_frame` has made room for all."""
        ends = np.cumsum([one[2] for one in slices])
        own = [np.arange(end - one[3], end) for one, end in zip(slices, ends, strict=True)]
        places = np.concatenate(own)
        chosen = np.ascontiguousarray(rows[places])
        beside = None if columns is None else np.ascontiguousarray(columns[places])
        return _Short(*self._frame(chosen, only_logits(slices), beside, has_room=True), chosen, places)

    def _piece_of_stage(self, begin: int, end: int) -> MdiStage:
        """The structure of the blocks [begin, end) alone."""
        stage = MdiStage.from_buffer_copy(self._stage)
        first = ctypes.addressof(self._blocks) + (begin - self.start) * ctypes.sizeof(MdiBlock)
        stage.blocks, stage.n_blocks = ctypes.cast(first, POINTER(MdiBlock)), end - begin
        stage.low_rank_of_block = self._low_rank_of_block[begin - self.start :].ctypes.data
        return stage

    def forward_last(
        self, rows: np.ndarray, slices: Slices, linear: Linear, columns: np.ndarray | None = None
    ) -> np.ndarray:
        """Run the blocks, in place, and a linear layer over the last row, in one call.

        Args:
            rows, columns: as of `forward`.

        Returns:
            float32 (1, n_out), the same bits as `linear` gives.

        Raises:
            EngineError: as `forward`.
        """
        frame, kept = self._frame(rows, slices, columns)
        y = np.empty((1, linear.n_out), dtype=np.float32)
        self.context.poll_neighbours()
        if self.context.library.mdi_last(
            self.context.handle, ctypes.byref(self._stage), ctypes.byref(frame), *linear.arguments,
            ctypes.c_void_p(y.ctypes.data),
        ):  # fmt: skip
            raise EngineError(f"no memory is left to compute a frame of {len(rows)} rows", Code.MEMORY)
        del kept
        return y

    def forward_in_halves(
        self, rows: np.ndarray, slices: Slices,
        ready: Callable[[int, int], contextlib.AbstractContextManager[None]],
        taps: Sequence[int] = (), take: Callable[[], None] = lambda: None, columns: np.ndarray | None = None,
        experts: ExpertReader | None = None,
    ) -> None:  # fmt: skip
        """Run the blocks half by half, to the same bits as `forward`.

        Args:
            ready: called with a block's number in the model and 0 for attention or 1 for the MLP: within what it gives, the
                weights of that half are in memory.
            taps, take, columns: as of `forward`.
            experts: reads those of the second half, which `ready` does not; None: it does.

        Raises:
            EngineError: as `forward`; or whatever `ready` and `experts` raise.
        """
        frame, kept = self._frame(rows, slices, columns)
        self.context.poll_neighbours()
        library, handle = self.context.library, self.context.handle
        skipped = self._skipped_from(slices)
        for block in range(len(self._blocks)):
            if self.start + block == skipped:
                short = self._of_logits(rows, slices, columns)
                frame = short.frame
            for half in (0, 1):
                with ready(self.start + block, half):
                    if half and experts is not None and self._blocks[block].experts.n:
                        done = frame.n_rows and self._step_of_experts(block, frame, experts)
                    else:
                        done = frame.n_rows and library.mdi_step(
                            handle, ctypes.byref(self._stage), block, half, ctypes.byref(frame)
                        )
                if done:
                    raise EngineError(f"no memory is left to compute a frame of {len(rows)} rows", Code.MEMORY)
            self._n_finished += 1
            if self.start + block >= skipped:
                rows[short.places] = short.rows
            if self.start + block in taps:
                take()
        del kept

    def _step_of_experts(self, block: int, frame: MdiFrame, reader: ExpertReader) -> bool:
        """The second half of a block, with experts as they come; whether memory has run out."""
        library, of = self.context.library, self._blocks[block].experts
        where = self.context.handle, ctypes.byref(self._stage), block
        choice = np.empty((frame.n_rows, of.n_used), dtype=np.int32)
        failed = library.mdi_route(*where, ctypes.byref(frame), ctypes.c_void_p(choice.ctypes.data))
        chosen: list[int] = [] if failed else np.unique(choice).tolist()
        first = 0
        with contextlib.closing(reader.ready(self.start + block, chosen)) as pieces:
            for n_ready, moves in pieces:
                for expert, by in moves:
                    _move(of.experts[expert], by)
                end = chosen[n_ready] if n_ready < len(chosen) else of.n
                failed = failed or library.mdi_experts(*where, first, end, ctypes.byref(frame))
                first = end
        return bool(failed)

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
        """Compute one piece of a block (PIECES) for a frame that `_frame` made."""
        done = self.context.library.mdi_half(
            self.context.handle, ctypes.byref(self._stage), block - self.start, piece, ctypes.byref(frame),
            ctypes.c_void_p(y.ctypes.data),
        )  # fmt: skip
        if done:
            raise EngineError(f"no memory is left to compute a frame of {frame.n_rows} rows", Code.MEMORY)

    def _frame(
        self, rows: np.ndarray, slices: Slices, columns: np.ndarray | None = None, has_room: bool = False
    ) -> tuple[MdiFrame, object]:
        """The structure of a frame, and the memory that it refers to.

        Args:
            has_room: whether the caches have room for its rows.
        """
        pages, first, states = array("Q"), array("i"), array("Q")  # of each slice and class
        n_rows = 0
        for seq_id, start, n, *_ in slices:
            if start < 0 or n < 1:
                raise EngineError(f"a slice of {n} rows from position {start} of sequence {seq_id} on")
            if start + n > self.max_length:
                raise EngineError(
                    f"position {start + n} of sequence {seq_id}, but sequences of this run end at {self.max_length}"
                )
            for entry in self.caches.entries(seq_id) if has_room else self.caches.extend(seq_id, start, n):
                if isinstance(entry, StateEntry):
                    states.extend(entry.record)
                    continue
                pages.append(entry.address)
                first.append(entry.first)
            n_rows += n
        if rows.shape != (n_rows, self.n_embd) or rows.dtype != np.float32 or not rows.flags.c_contiguous:
            raise EngineError(
                f"rows of shape {rows.shape}, but the slices of this frame have {n_rows} of {self.n_embd}"
            )
        shape = n_rows, self.row_in.width - self.n_embd
        if (np.empty((n_rows, 0), np.float32) if columns is None else columns).shape != shape:
            raise EngineError(f"rows without the {shape[1]} numbers that blocks read beside hidden")
        if self.cache_columns.reads and not has_room:
            assert columns is not None
            self.cache_columns.put(self.caches, slices, columns)
        frame = MdiFrame(
            rows.ctypes.data, SliceTable.of(slices).records, pages.buffer_info()[0], first.buffer_info()[0],
            self._pool_address, self._page_bytes_address, len(slices), n_rows,
            None if columns is None else columns.ctypes.data, shape[1], states.buffer_info()[0],
        )  # fmt: skip
        return frame, (pages, first, states, columns)

    def _block(self, index: int, tensors: Tensors) -> MdiBlock:
        spec, width = self.spec.blocks[index], self.n_embd
        reader = BlockReader(index, tensors, self._kept)
        if (reason := _why_not(spec)) is not None:
            raise KernelError(f"block {index}: the kernels do not compute {reason}")
        block = MdiBlock(
            norm_1=reader.norm("norm_1", width, spec.norm_1),
            post_attention_norm=reader.norm("post_attention_norm", width, spec.post_attention_norm),
            norm_2=reader.norm("norm_2", width, spec.norm_2),
            post_mlp_norm=reader.norm("post_mlp_norm", width, spec.post_mlp_norm),
            residual=RESIDUALS[spec.residual],
            norm_is_shared=spec.norm_is_shared,
        )
        mixer, (cache_class, layer) = spec.mixer, self._places[index - self.start]
        if isinstance(mixer, DeltaNet):
            block.delta = reader.delta(mixer, width)
            block.delta.cache_class, block.delta.cache_layer = cache_class - len(self._kinds), layer
        else:
            if isinstance(mixer, LatentAttention):
                block.attention, block.latent = reader.shared_part(mixer, width), reader.latent(mixer, width)
            else:
                block.attention = reader.mixer(mixer, width)
            block.attention.cache_type = CACHE_TYPES[self._cache_type]
            block.attention.cache_class, block.attention.cache_layer = cache_class, layer
        if spec.gated is not None:
            block.gated = reader.gated(spec.gated, width)
            block.gated.at = self.row_in.place(spec.gated.column).start - width
        if spec.has_scalar:
            block.scalar = reader.scalar()
        if isinstance(spec.mlp, Dense):
            block.mlp = reader.mlp("mlp", width, spec.mlp)
            return block
        block.experts = reader.experts(width, spec.mlp)
        if spec.mlp.shared is not None:
            block.mlp = reader.mlp("mlp.shared_experts", width, spec.mlp.shared)
        return block


def _move(mlp: MdiMlp, by: int) -> None:
    """An MLP's weights lie so many bytes further on."""
    for matrix in (mlp.fc_1, mlp.fc_2, mlp.proj):
        pieces = (MdiMatrix * matrix.n_pieces).from_address(matrix.pieces) if matrix.n_pieces else ()
        for one in (matrix, *pieces):
            one.data = one.data + by if one.data else None


Weights = Mapping[str, Matrix | np.ndarray]


class Head:
    """Rows that went through all blocks -> logits.

    Args:
        spec: of the model.
        weights: of the part "head".
        n_tokens: how many of the vocabulary the weights are for.

    Raises:
        KernelError: a tensor is missing or of another shape.
    """

    def __init__(self, spec: ModelSpec, weights: Weights, n_tokens: int, context: Context) -> None:
        matrix, width, final = weights.get(HEAD), spec.width, spec.ends.final_norm
        if not isinstance(matrix, Matrix) or (matrix.n_out, matrix.n_in) != (n_tokens, width):
            raise KernelError(f"the head is no packed weight of {n_tokens} x {width}")
        norms = None
        if final is not None:
            norms = final, _row(weights, FINAL_NORM, width), _row(weights, "transformer.ln_f.bias", width)
        bias = _row(weights, "lm_head.bias", n_tokens)
        self.linear = Linear(context, matrix, bias, spec.ends.softcap, norms)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """float32 (M, n_embd) -> (M, n_tokens)"""
        return self.linear(np.ascontiguousarray(x, dtype=np.float32))


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
