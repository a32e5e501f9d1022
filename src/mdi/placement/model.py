"""A model and a run of it as numbers: sizes of blocks, embedding, head and caches; made of a litgpt config and a weight format.

No tensors are needed.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from mdi.checkpoint.manifest import config_hash
from mdi.checkpoint.mixtures import meant
from mdi.checkpoint.parts import part_of
from mdi.checkpoint.shapes import Shape, model_shapes, widest
from mdi.errors import UsageError
from mdi.host.device import why_not_kernels
from mdi.kernels.positions import table_bytes
from mdi.kernels.weight_formats import WeightFormat, is_packed_form, tied_form, weight_format
from mdi.model.caches import PAGE, CacheClass, kind_of
from mdi.model.plain import ModelConfig, spec_of
from mdi.model.spec import Attention, BlockSpec, DeltaNet, Experts, LatentAttention, Mixer, Mlp
from mdi.model.tensors import EMBEDDING
from mdi.placement.profile import ClusterProfile, NodeProfile
from mdi.spec.cluster import DTYPES
from mdi.stages.window_budget import absorbed_bytes
from mdi.tensor.shares import WHOLE, Share, piece_of, share_out, why_not_shared_out


@dataclass(frozen=True)
class BlockShape:
    """One transformer block.

    Attributes:
        weight_bytes: in the model's format, as held in memory.
        load_bytes: additional memory while it is loaded and packed.
        macs: multiplications per row with weights; of experts, those that a row is sent to.
        cache: its cache.
        expert_bytes: of the weights, those of experts; n_experts, n_used: how many there are, and how many a row is sent to.
        absorbed_bytes: beside the weights, at most: what the kernels read in place of up-projections of latent attention.
        whole_bytes: of the weights, those that every node of a group has whole.
        is_cache_whole: whether each of them has all of the cache, too.
        look_macs: multiplications of attention per row, for each position that it sees.
        state_macs: ... of a state, per row.
        window: positions that a row sees, itself included; None is all of them.
    """

    weight_bytes: int
    load_bytes: int
    macs: int
    cache: CacheClass
    expert_bytes: int = 0
    n_experts: int = 0
    n_used: int = 0
    absorbed_bytes: int = 0
    whole_bytes: int = 0
    is_cache_whole: bool = False
    look_macs: int = 0
    state_macs: int = 0
    window: int | None = None

    @property
    def held_bytes(self) -> int:
        """In memory, without its cache."""
        return self.weight_bytes + self.absorbed_bytes

    def weights_read(self, n_rows: float) -> float:
        """Bytes of weights that so many rows need, if experts are chosen about equally often."""
        if not self.n_experts:
            return self.weight_bytes
        unread = (1 - self.n_used / self.n_experts) ** n_rows
        return self.weight_bytes - unread * self.expert_bytes

    def attention_macs(self, start: int, n_rows: int) -> float:
        """Multiplications without weights, of the rows of one text from position `start` on."""
        seen = n_rows * start + n_rows * (n_rows + 1) / 2
        if self.window is not None and (over := start + n_rows - self.window) > 0:
            first = max(0, self.window - start)  # rows that see all before them
            seen = first * start + first * (first + 1) / 2 + min(over, n_rows) * self.window
        return self.look_macs * seen + self.state_macs * n_rows

    def cache_bytes(self, length: int) -> int:
        """Most bytes of a sequence of `length` positions, from its first token to its last."""
        return self.cache.n_bytes(length)

    def read_bytes(self, length: int) -> float:
        """Bytes of caches that attention reads for one row at the end."""
        return self.cache.read_bytes(length)


@dataclass(frozen=True)
class ModelShape:
    """A model in one weight format.

    Attributes:
        name, config_hash, format: as in a ClusterProfile.
        context_length: positions that the model was made for.
        row_bytes: one position's activations on the wire, of hidden alone.
        blocks: in order.
        embedding_bytes, head_bytes: what the starter holds besides; head with the final norm.
        head_load_bytes: the same for the larger of the two.
        head_macs: multiplications of the head per row.
        n_head, vocab_size: for what attention scores and logits take.
        work_row_bytes: the widest activations of a block, per row.
        table_bytes: position tables, per position.
        kv_dtype: what caches hold, a name in model.caches.CACHE_TYPES.
        runtime_bytes: memory of a process as soon as it computes: workspace of kernels, and the allocator's reserve.
        cuts: where it may be cut (ModelSpec.allowed_cuts); None is everywhere.
        cut_bytes: one position's activations on the wire at each cut (ModelSpec.row_at); None: `row_bytes` everywhere.
        cached_bytes: of these, those of columns for caches; None: there are none.
        skipped_from: the block from which on only rows that give logits are computed; None: all compute all rows.
        is_tied: whether the embedding is the head's weight, which alone is held.
        copied: at each cut, the blocks in front of it whose caches blocks behind it read (ModelSpec.caches_before); None: none.
    """

    name: str
    config_hash: str
    format: str
    context_length: int
    row_bytes: int
    blocks: tuple[BlockShape, ...]
    embedding_bytes: int
    head_bytes: int
    head_load_bytes: int
    head_macs: int
    n_head: int
    vocab_size: int
    work_row_bytes: int
    table_bytes: int
    runtime_bytes: int = 0
    kv_dtype: str = "float32"
    cuts: tuple[int, ...] | None = None
    cut_bytes: tuple[int, ...] | None = None
    cached_bytes: tuple[int, ...] | None = None
    skipped_from: int | None = None
    copied: tuple[tuple[int, ...], ...] | None = None
    is_tied: bool = False

    def caches_before(self, cut: int) -> tuple[int, ...]:
        return () if self.copied is None else self.copied[cut]

    def row_bytes_at(self, cut: int) -> int:
        return self.row_bytes if self.cut_bytes is None else self.cut_bytes[cut]

    @property
    def widest_row_bytes(self) -> int:
        """One position's activations on the wire, at the cut where they are most."""
        return self.row_bytes if self.cut_bytes is None else max(self.cut_bytes)

    @property
    def n_layer(self) -> int:
        return len(self.blocks)

    @property
    def reference(self) -> BlockShape:
        """The block that a node's `block_s` is measured with: the middle one, which is of the common kind."""
        return self.blocks[self.n_layer // 2]

    @property
    def is_uniform(self) -> bool:
        """Whether a stage is told by how many blocks it has: all are alike, and so are all cuts."""
        return self.cuts is None and self.cut_bytes is None and all(block == self.blocks[0] for block in self.blocks)

    @property
    def most_nodes(self) -> int:
        """Each secondary has a block at least."""
        return self.n_layer + 1 if self.cuts is None else len(self.cuts)

    @property
    def weight_bytes(self) -> int:
        return self.embedding_bytes + self.head_bytes + sum(block.weight_bytes for block in self.blocks)

    def sums(self, value: Callable[[BlockShape], float]) -> list[float]:
        """Running sums over the blocks: entry e minus entry s is what blocks [s, e) have together."""
        return [0.0, *itertools.accumulate(value(block) for block in self.blocks)]


@dataclass(frozen=True)
class Workload:
    """The work of a run: sequences at the same time, and how long each may become, prompt included.

    Attributes:
        more_frames: in flight beyond one per node.
        replay_bytes: that each node may keep of the rows that it has sent.
        draft_bytes: weights of a small model that the starter computes for each token of a text (--draft).
    """

    n_sequences: int = 1
    sequence_length: int = 2048
    more_frames: int = 0
    replay_bytes: int = 0
    draft_bytes: int = 0

    def __post_init__(self) -> None:
        if self.n_sequences < 1 or self.sequence_length < 1:
            raise UsageError(
                f"a plan needs at least one sequence of one token, got {self.n_sequences} of {self.sequence_length}"
            )

    def kept_bytes(self, row_bytes: int, n_nodes: int) -> int:
        """Bytes of sent rows that a node keeps."""
        if n_nodes < 2:
            return 0
        return min(self.replay_bytes, self.n_sequences * self.sequence_length * row_bytes)

    def rows_per_frame(self, n_nodes: int) -> int:
        """A frame goes round for each node, or more, each with an even share of the sequences (engine/scheduler.py)."""
        return -(-self.n_sequences // (n_nodes + self.more_frames))

    def frames(self, n_nodes: int) -> int:
        """Frames in flight: with few sequences some stay away."""
        return -(-self.n_sequences // self.rows_per_frame(n_nodes))


_AS_COMPUTED = {4: "float32", 2: "bf16"}  # what caches hold, by the bytes of a value
RUNTIME_BYTES = 20_000_000  # measured (docs/distributing.md): memory of a computing process

_Shapes = Mapping[str, Shape]
_EXPERT = ".experts."


def model_shape(
    config: ModelConfig, format: str, kv_dtype: str = "auto", tied_type: str | None = None
) -> ModelShape:  # fmt: skip
    """A model's shape.

    Args:
        config: of the model.
        format: a name in `mdi.kernels.weight_formats`; the head is in it as well.
        kv_dtype: number type of caches; "auto" is the computing type.
        tied_type: that of an embedding that is the head as well, where the kernels compute; None: they are two weights.

    Raises:
        CheckpointError: litgpt cannot build such a model.
        UsageError: the format is unknown.
    """
    format = meant(format, config)
    weight_format(format)
    is_tied = tied_type is not None and is_packed_form(format) and tied_form(format, tied_type) != format
    return cached_shape(config, format, kv_dtype, is_tied)


@functools.lru_cache(maxsize=16)
def cached_shape(config: ModelConfig, format: str, kv_dtype: str, is_tied: bool = False) -> ModelShape:
    form = weight_format(format)
    kv_dtype = _AS_COMPUTED[form.value_bytes] if kv_dtype == "auto" else kv_dtype
    tensors, spec = model_shapes(config, config.name or "this model"), spec_of(config)
    of_block: dict[str, dict[str, Shape]] = {}
    for name, shape in tensors.items():
        of_block.setdefault(part_of(name), {})[name] = shape
    head = _bytes({n: s for n, s in tensors.items() if n.startswith(("lm_head.", "transformer.ln_f."))}, form)
    copied = tuple(tuple(spec.caches_before(cut)) for cut in range(spec.n_layer + 1))
    has_latents = any(isinstance(block.mixer, LatentAttention) for block in spec.kinds)
    whole = _whole_in_groups(config, tensors) if has_latents else set()
    layouts = [spec.row_at(cut) for cut in range(spec.n_layer + 1)]
    widths, cached = [one.width for one in layouts], [one.cached.width for one in layouts]
    return ModelShape(
        name=config.name,
        config_hash=config_hash(config),
        format=format,
        context_length=spec.max_length,
        row_bytes=spec.width * form.value_bytes,
        blocks=tuple(_block(one, of_block[f"block.{i}"], form, kv_dtype, whole) for i, one in enumerate(spec.blocks)),
        embedding_bytes=_bytes(
            {n: s for n, s in tensors.items() if part_of(n) == "embedding" and not (is_tied and n == EMBEDDING)}, form
        ),
        head_bytes=head,
        head_load_bytes=form.load_bytes(widest([tensors["lm_head.weight"]])),
        head_macs=math.prod(tensors["lm_head.weight"]),
        n_head=max(block.mixer.n_head for block in spec.kinds),
        vocab_size=spec.n_rows,
        work_row_bytes=_widest(spec.width, tensors) * form.value_bytes,
        table_bytes=table_bytes(spec.blocks, PAGE) // PAGE,
        runtime_bytes=RUNTIME_BYTES,
        kv_dtype=kv_dtype,
        cuts=tuple(cuts) if len(cuts := spec.allowed_cuts()) <= spec.n_layer else None,
        cut_bytes=tuple(n * form.value_bytes for n in widths) if max(widths) > spec.width else None,
        cached_bytes=tuple(n * form.value_bytes for n in cached) if any(cached) else None,
        skipped_from=spec.skipped_from if spec.skipped_from < spec.n_layer else None,
        copied=copied if any(copied) else None,
        is_tied=is_tied,
    )


def _whole_in_groups(config: ModelConfig, tensors: _Shapes) -> set[str]:
    """Names of the tensors of latent attention that every node of a group has whole; none where no group computes the model.
    Those of other blocks are norms and routers, which are small.
    """
    if why_not_shared_out(config) is not None:
        return set()
    share = Share(share_out(config, [1.0]), 0, config)
    return {name for name in tensors if _EXPERT not in name and piece_of(name, share) == WHOLE}


def _block(block: BlockSpec, own: _Shapes, form: WeightFormat, kv_dtype: str, whole: Collection[str]) -> BlockShape:
    experts = block.mlp if isinstance(block.mlp, Experts) else None
    return BlockShape(
        weight_bytes=_bytes(own, form),
        load_bytes=form.load_bytes(widest(own.values())),
        macs=round(sum(math.prod(shape) * _used(block.mlp, name) for name, shape in own.items() if len(shape) == 2)),
        cache=kind_of(block).of_blocks(int(block.cache_of is None), kv_dtype, unit=1),
        expert_bytes=_bytes({name: shape for name, shape in own.items() if _EXPERT in name}, form),
        n_experts=experts.n if experts else 0,
        n_used=experts.n_used if experts else 0,
        absorbed_bytes=absorbed_bytes([block]) if form.value_bytes == 4 else 0,  # the kernels compute in float32
        whole_bytes=_bytes({name: shape for name, shape in own.items() if name in whole}, form),
        is_cache_whole=isinstance(block.mixer, LatentAttention),
        look_macs=_look_macs(block.mixer),
        state_macs=_state_macs(block.mixer),
        window=block.mixer.window,
    )


def _look_macs(mixer: Mixer) -> int:
    """Of a row and a position: products with its key, and with its value."""
    if isinstance(mixer, Attention):
        return 2 * mixer.n_head * mixer.head_size
    if isinstance(mixer, LatentAttention):
        return mixer.n_head * (2 * mixer.kv_rank + mixer.rope_size)
    return 0


def _state_macs(mixer: Mixer) -> int:
    """Of a row: a head's state is weighted, read with the key, changed, and read with the query."""
    return 4 * mixer.n_head * mixer.k_size * mixer.v_size if isinstance(mixer, DeltaNet) else 0


def _bytes(tensors: _Shapes, form: WeightFormat) -> int:
    return round(sum(form.tensor_bytes(name, shape) for name, shape in tensors.items()))


def _used(mlp: Mlp, name: str) -> float:
    """The part of a weight matrix that an average row meets: of experts, as many as a row is sent to."""
    return mlp.n_used / mlp.n if isinstance(mlp, Experts) and _EXPERT in name else 1.0


def _widest(width: int, tensors: _Shapes) -> int:
    """Values that a row has at the same time in a block: in, normed, out, and two of the widest layer."""
    outputs = [shape[0] for name, shape in tensors.items() if name.startswith("transformer.h.") and len(shape) == 2]
    return int(3 * width + 2 * max(outputs))


def with_paths(profile: ClusterProfile, config: ModelConfig, config_hash: str, form: str) -> ClusterProfile:
    """The profile with `computed_by` for this model, as far as it is known.

    Args:
        config: of the model; `config_hash` is its hash.
        form: format of the blocks.
    """

    def path(node: NodeProfile) -> str:
        reason = why_not_kernels(config, node.device, form if form in DTYPES else None)
        is_torch = node.computed_by.startswith("torch")
        if reason is not None:
            return node.computed_by if is_torch else f"torch: {reason}"
        return "" if is_torch and profile.config_hash != config_hash else node.computed_by

    return replace(profile, nodes=tuple(replace(node, computed_by=path(node)) for node in profile.nodes))
