"""Names of a family's tensors in files of others, by ours (mdi.model.tensors). Each table is read in both directions."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mdi.model.plain import ModelConfig, spec_of
from mdi.model.spec import Attention, LatentAttention, Mixer
from mdi.model.tensors import BLOCKS, HEAD

# Where the language part of a model begins that also sees or hears.
LANGUAGE = ("model.language_model.", "language_model.model.")
_MODEL = ("model.", *LANGUAGE, "")  # models that embed texts often have no prefix
_HEAD = HEAD.removesuffix(".weight")
_IN_BLOCK = re.compile(re.escape(BLOCKS) + r"(\d+)\.(.+)")
_EXPERT = re.compile(r"(?<=^mlp\.experts\.)\d+")


@dataclass(frozen=True)
class Piece:
    """Rows of a tensor of the family, which are rows of one of ours.

    Attributes:
        tensor: its name in the files.
        shape: of the whole tensor there.
        rows: (start, stop, step), or None for all.
        expert: which of the matrices (or rows) that are stacked in the tensor; None if there is one.
        is_interleaved: whether they are query, key and value group by group, and not all queries first.
        is_transposed: whether the tensor has the outputs in its columns.
        n_paired: of so many heads each, row i of the one half and row i of the other lie beside each other; 0: all rows of the
            one half come first.
        plus: what was added to the numbers.
        is_neg_exp: whether they are -e^x of ours.
        of_heads: (first, n, period): of each `period` rows those from `first` on, so many; None: as `rows` says.
    """

    tensor: str
    shape: tuple[int, ...]
    rows: tuple[int, int, int] | None = None
    expert: int | None = None
    is_interleaved: bool = False
    is_transposed: bool = False
    n_paired: int = 0
    plus: float = 0.0
    is_neg_exp: bool = False
    of_heads: tuple[int, int, int] | None = None

    @property
    def row_numbers(self) -> np.ndarray | None:
        """Which rows of the tensor (or of a matrix in it) they are, in our order; None: all, or consecutive halves of it."""
        if self.of_heads is None:
            return None
        first, n, period = self.of_heads
        return (np.arange(0, self.shape[0], period)[:, None] + np.arange(first, first + n)).reshape(-1)


@dataclass(frozen=True)
class Held:
    """Modules of a family's block that hold one of ours.

    Attributes:
        modules: their names, "{i}" for the number of an expert. Three hold query, key and value, one below the other.
        half: which half of the rows ours are (0 or 1); None: all.
        is_in_turn: whether the rows of both halves come in turn.
        n_before: rows before ours, which mean nothing here.
        is_stacked: whether the module has those of all experts, one behind the other.
        is_paired: whether the halves of each head of query and key lie in pairs, as Piece.n_paired says.
        is_interleaved, is_transposed, plus, is_neg_exp: see Piece.
        heads: if the rows of a module are those of heads, which have more: of each module, by the block's mixer, how many heads
            it has, and Piece.of_heads.
        is_by_head: whether two modules hold a matrix of each head of latent attention: rows of ours are in turn the columns of
            a head's in the first, and the rows of it in the second.
        otherwise: what holds it in files of another kind. What is written is never that.
    """

    modules: tuple[str, ...]
    half: int | None = None
    is_in_turn: bool = False
    n_before: int = 0
    is_stacked: bool = False
    is_interleaved: bool = False
    is_transposed: bool = False
    is_paired: bool = False
    plus: float = 0.0
    is_neg_exp: bool = False
    heads: Callable[[Any], tuple[tuple[int, int, int, int], ...]] | None = None
    is_by_head: bool = False
    otherwise: Held | None = None


Where = str | tuple[str, ...] | Held


def held(where: Where) -> Held:
    return where if isinstance(where, Held) else Held((where,) if isinstance(where, str) else where)


def _attention(config: ModelConfig, block: int) -> Attention:
    mixer = spec_of(config).blocks[block].mixer
    assert isinstance(mixer, Attention)  # the only one with query, key and value
    return mixer


def row_counts(config: ModelConfig, block: int) -> tuple[int, int, int]:
    """Rows of query, key and value."""
    return _row_counts(_attention(config, block))


def _row_counts(of: Attention) -> tuple[int, int, int]:
    n_q, n_k, n_v = (n * of.head_size for n in of.made)
    return n_q, n_k, n_v


@dataclass(frozen=True)
class Names:
    """Of one family.

    Attributes:
        block: theirs by ours within a block. A name of ours may have its ending ("mlp.gate.bias"); then theirs has it, too.
        ends: the same of embedding, positions and last norm, behind the prefix.
        head: the head's, without a prefix.
        prefixes: what is before all names but the head's; the first one is written.
        blocks: what is between prefix and number of a block.
        unused: what files may hold besides, behind the prefix, of which nothing is computed; None: nothing.
        predicting: what blocks have besides that predict further tokens, as `block`; None: it is not known.
        predicting_prefix: theirs, if they are numbered from 0 behind it and have what is in `predicting` in common; "": they
            are numbered behind the model's last block.
        first: added to the numbers of our blocks.
    """

    block: Mapping[str, Where]
    ends: Mapping[str, Where]
    head: str = _HEAD
    prefixes: tuple[str, ...] = _MODEL
    blocks: str = "layers"
    unused: re.Pattern[str] | None = None
    predicting: Mapping[str, Where] | None = None
    predicting_prefix: str = ""
    first: int = 0

    def of_predicting(self, n_layer: int, prefix: str) -> Names | None:
        """The names of a model of just the blocks that predict further tokens (`mdi.model.plain.of_predicting`).

        Args:
            n_layer: of the other blocks.
            prefix: of theirs.
        """
        if self.predicting is None:
            return None
        if self.predicting_prefix:
            return replace(self, ends=self.predicting, prefixes=(self.predicting_prefix,))
        return replace(self, block={**self.block, **self.predicting}, prefixes=(prefix,), first=n_layer)

    def prefix(self, tensors: Collection[str]) -> str:
        """The one that these tensors have."""
        starts = {prefix: f"{prefix}{self.blocks}." for prefix in self.prefixes}
        return next(
            (p for p, start in starts.items() if any(name.startswith(start) for name in tensors)), self.prefixes[0]
        )

    def modules(self, ours: str) -> tuple[str, ...]:
        """Theirs that hold one of ours, within a block; none if the family has no such module."""
        return held(self.block[ours]).modules if ours in self.block else ()

    def places(
        self, name: str, shape: tuple[int, ...], config: ModelConfig, prefix: str | None = None
    ) -> list[tuple[Piece, ...]]:
        """Of what a tensor of ours is made: the first form is written, and any of them is read.

        Args:
            name, shape: of ours.
            prefix: None is the one that is written.
        """
        return list(self._places(name, shape, config, self.prefixes[0] if prefix is None else prefix))

    def _places(
        self, name: str, shape: tuple[int, ...], config: ModelConfig, prefix: str
    ) -> Iterator[tuple[Piece, ...]]:
        module, _, ending = name.rpartition(".")
        match = _IN_BLOCK.fullmatch(name)
        if module == _HEAD:
            for start in dict.fromkeys(("", prefix, "language_model.")):
                yield (Piece(f"{start}{self.head}.{ending}", shape),)
            return
        table, path, key, expert = self.ends, prefix, name, None
        if match is not None:
            numbers = _EXPERT.search(match[2])
            expert = int(numbers[0]) if numbers else None
            number = int(match[1]) + self.first
            table, path, key = self.block, f"{prefix}{self.blocks}.{number}.", _EXPERT.sub("{i}", match[2])
        stem, _, ending = key.rpartition(".")
        if stem in self.ends:
            table, path = self.ends, prefix
        where, ending = (table[key], "") if key in table else (table.get(stem), f".{ending}")
        of = None if where is None else held(where)
        while of is not None:
            tensors = [f"{path}{module}{ending}".format(i=expert) for module in of.modules]
            if of.heads is not None and match is not None:
                yield _of_heads(of, tensors, shape, spec_of(config).blocks[int(match[1])].mixer)
                of = of.otherwise
                continue
            if of.is_by_head and match is not None:
                yield _by_head(tensors, spec_of(config).blocks[int(match[1])].mixer)
                of = of.otherwise
                continue
            of_three = None if match is None or len(tensors) == 1 else _attention(config, int(match[1]))
            counts = (shape[0],) if of_three is None else _row_counts(of_three)
            heads = (0,) if of_three is None else (of_three.n_head, of_three.n_groups, 0)
            yield tuple(
                _piece(of, tensor, (n_rows, *shape[1:]), expert, config.n_expert, n_heads * of.is_paired)
                for tensor, n_rows, n_heads in zip(tensors, counts, heads, strict=True)
                if n_rows or of_three is None
            )
            of = of.otherwise


def _of_heads(of: Held, tensors: list[str], shape: tuple[int, ...], mixer: Mixer) -> tuple[Piece, ...]:
    assert of.heads is not None
    found = zip(tensors, of.heads(mixer), strict=True)
    return tuple(
        Piece(tensor, (n_heads * period, *shape[1:]), of_heads=(first, n, period))
        for tensor, (n_heads, first, n, period) in found
    )


def _by_head(tensors: list[str], mixer: Mixer) -> tuple[Piece, ...]:
    assert isinstance(mixer, LatentAttention)
    n, rank = mixer.n_head, mixer.kv_rank
    keys, values = (n, rank, mixer.nope_size), (n, mixer.value_size, rank)
    of_heads = (
        (Piece(tensors[0], keys, expert=i, is_transposed=True), Piece(tensors[1], values, expert=i)) for i in range(n)
    )
    return tuple(piece for both in of_heads for piece in both)


def _piece(
    of: Held, tensor: str, shape: tuple[int, ...], expert: int | None, n_experts: int, n_paired: int
) -> Piece:  # fmt: skip
    n, rows = shape[0], None
    if of.half is not None:
        rows, n = ((of.half, 2 * n, 2) if of.is_in_turn else (of.half * n, (of.half + 1) * n, 1)), 2 * n
    if of.n_before:
        rows, n = (of.n_before, of.n_before + n, 1), of.n_before + n
    shape = (n, *shape[1:])
    is_transposed = of.is_transposed and len(shape) == 2
    whole = ((n_experts,) if of.is_stacked else ()) + (shape[::-1] if is_transposed else shape)
    number = expert if of.is_stacked else None
    return Piece(tensor, whole, rows, number, of.is_interleaved, is_transposed, n_paired, of.plus, of.is_neg_exp)


# Of blocks that predict further tokens, in most families that have them.
PREDICTING: dict[str, Any] = {
    "mtp.proj": "eh_proj", "mtp.norm_token": "enorm", "mtp.norm_hidden": "hnorm", "mtp.norm": "shared_head.norm",
    "mtp.wte": "embed_tokens", "mtp.head": "shared_head.head",
}  # fmt: skip
# Of Llama, which most families follow.
LLAMA_ENDS: dict[str, Any] = {"transformer.wte": "embed_tokens", "transformer.ln_f": "norm"}
ATTENTION: dict[str, Any] = {
    "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.proj": "self_attn.o_proj",
}
QK_NORMS = {"attn.norm_q": "self_attn.q_norm", "attn.norm_k": "self_attn.k_norm"}
GATED = {"fc_1": "gate_proj", "fc_2": "up_proj", "proj": "down_proj"}
GATED_MLP = {f"mlp.{ours}": f"mlp.{theirs}" for ours, theirs in GATED.items()}
NORMS_BEFORE = {"norm_1": "input_layernorm", "norm_2": "post_attention_layernorm"}
LLAMA_BLOCK: dict[str, Any] = {**NORMS_BEFORE, **ATTENTION, **GATED_MLP}
LLAMA = Names(LLAMA_BLOCK, LLAMA_ENDS)
# Where norms are behind attention and MLP, the one before the MLP has a name of its own.
NORMS_BEHIND = {"post_attention_norm": "post_attention_layernorm", "post_mlp_norm": "post_feedforward_layernorm"}
EXPERTS = {"mlp.gate": "mlp.gate"} | {f"mlp.experts.{{i}}.{one}": f"mlp.experts.{{i}}.{GATED[one]}" for one in GATED}
MIXTRAL_EXPERTS = {
    "mlp.gate": "block_sparse_moe.gate",
    "mlp.experts.{i}.fc_1": "block_sparse_moe.experts.{i}.w1",
    "mlp.experts.{i}.fc_2": "block_sparse_moe.experts.{i}.w3",
    "mlp.experts.{i}.proj": "block_sparse_moe.experts.{i}.w2",
}


def fused_qkv(module: str) -> dict[str, Any]:
    """Of families whose query, key and value are in one matrix, group by group, and whose MLPs have two layers."""
    return {
        "attn.qkv": Held((f"{module}.query_key_value",), is_interleaved=True),
        "attn.proj": f"{module}.dense",
        "mlp.fc": "mlp.dense_h_to_4h",
        "mlp.proj": "mlp.dense_4h_to_h",
    }


def gated_qkv(qkv: tuple[str, str, str]) -> dict[str, Any]:
    """Of attention with a gate, whose rows of each head follow those of the head's query in one module."""

    def heads(of: Attention) -> tuple[tuple[int, int, int, int], ...]:
        size = of.head_size
        return (of.n_head, 0, size, 2 * size), *((of.n_groups, 0, size, size),) * 2

    def gates(of: Attention) -> tuple[tuple[int, int, int, int], ...]:
        return ((of.n_head, of.head_size, of.head_size, 2 * of.head_size),)

    return {"attn.qkv": Held(qkv, heads=heads), "attn.out_gate": Held(qkv[:1], heads=gates)}
