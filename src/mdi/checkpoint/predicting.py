"""Blocks that predict further tokens (multi-token prediction, MTP): they are behind the head, and no cut counts them.

They are a source of their own, a model of just these blocks (`mdi.model.plain.of_predicting`) whose parts are "block.0" and so
on. Nothing computes them yet. A converted folder has them in a file beside its weights.
"""

from __future__ import annotations

import copy
import logging
import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from mdi.checkpoint.parts import serialize, stage_parts
from mdi.checkpoint.safetensors_layout import TensorSpec
from mdi.checkpoint.weights import WeightSource
from mdi.errors import CheckpointError
from mdi.families.names import Names, Piece
from mdi.files import replacing
from mdi.model.plain import of_predicting, spec_of
from mdi.model.tensors import BLOCKS, EMBEDDING, HEAD, Shape, block_tensors, is_optional, predicting_tensors
from mdi.spec.limits import excess

logger = logging.getLogger("mdi")

_BLOCK = re.compile(re.escape(BLOCKS) + r"(\d+)\.")


class NamedSource(WeightSource):
    """A file, or a folder of files, whose tensors have the names of a family.

    Attributes:
        tensor_pieces: of what each tensor of the model is made, by its name.
    """

    tensor_pieces: dict[str, tuple[Piece, ...]]
    _names: Names
    _prefix: str

    def part_names(self) -> list[str]:
        return stage_parts(0, self.spec.n_layer, starter=not self.is_predicting)

    def same_as(self, name: str) -> str:
        is_tied = name == HEAD and self.tensor_pieces[HEAD] == self.tensor_pieces[EMBEDDING]
        return EMBEDDING if is_tied else name

    @abstractmethod
    def _of_predicting(self) -> Collection[str]:
        """Names of all tensors of blocks that predict further tokens."""

    @abstractmethod
    def _pieces_of(self, name: str, shape: Shape) -> tuple[Piece, ...]:
        """Raises CheckpointError: a tensor is missing."""

    @abstractmethod
    def _spec(self, pieces: tuple[Piece, ...]) -> TensorSpec: ...

    def predicting(self) -> WeightSource | None:
        stored = set(self._of_predicting())
        if not stored:
            return None
        return if_whole(self, lambda: self._with_predicting(stored))

    def _with_predicting(self, stored: set[str]) -> WeightSource:
        """Raises CheckpointError: they are not as the family has them."""
        names = self._names.of_predicting(self.spec.n_layer, self._prefix)
        if names is None:
            raise CheckpointError("of this family it is not known what they are")
        found = copy.copy(self)
        found._names, found._prefix = names, names.prefixes[0]
        start = f"{found._prefix}{names.blocks}."
        n = max(block_numbers(stored, start).values(), default=-1) + 1 - names.first
        if n < 1:
            raise CheckpointError(f"there is no {start}{names.first}")
        found.config, found.hashes, found.is_predicting = of_predicting(self.config, n), None, True
        found.tensor_pieces = {}
        shapes = predicting_shapes(found)
        for name, shape in shapes.items():
            try:
                found.tensor_pieces[name] = found._pieces_of(name, shape)
            except CheckpointError:
                if not is_optional(name):
                    raise
        found.specs = {name: found._spec(pieces) for name, pieces in found.tensor_pieces.items()}
        check_predicting(found)
        if unknown := stored - {piece.tensor for pieces in found.tensor_pieces.values() for piece in pieces}:
            raise CheckpointError(f"nothing is known of {min(unknown)}")
        return found


def if_whole(source: WeightSource, read: Callable[[], WeightSource]) -> WeightSource | None:
    """What `read` makes of the blocks of a source that predict further tokens. If it raises CheckpointError, there is a
    warning, for the source is usable without them.
    """
    try:
        return read()
    except CheckpointError as e:
        logger.warning("warning: the layers for multi-token prediction of %s are left out: %s", source, e)
        return None


def block_numbers(names: Iterable[str], start: str) -> dict[str, int]:
    """Of the tensors whose names are a start, the number of a block, and what is in it. One of more than six digits is none."""
    pattern = re.compile(re.escape(start) + r"([0-9]{1,6})\.")
    return {name: int(match[1]) for name in names if (match := pattern.match(name))}


def predicting_shapes(source: WeightSource) -> dict[str, Shape]:
    """Of all tensors that blocks may have which predict further tokens, by our names.

    Raises:
        CheckpointError: they would be too many.
    """
    if too_much := excess(source.config.plain()):  # the number of blocks is what a file says
        raise CheckpointError(too_much)
    spec = spec_of(source.config)
    of_all = predicting_tensors(spec)
    return {
        f"{BLOCKS}{i}.{name}": shape
        for i, block in enumerate(spec.blocks)
        for name, shape in {**block_tensors(block, spec.width), **of_all}.items()
    }


def check_predicting(source: WeightSource) -> None:
    """Raises CheckpointError: a tensor is missing, unknown, or of another shape."""
    shapes = predicting_shapes(source)
    for name, shape in shapes.items():
        found = source.specs.get(name)
        if found is None and is_optional(name):
            continue
        if found is None or found.shape != shape:
            shown = "none" if found is None else f"the shape {list(found.shape)}"
            raise CheckpointError(f"{source}: {name} has {shown}, expected {list(shape)}")
    if unknown := source.specs.keys() - shapes:
        raise CheckpointError(f"{source} holds {min(unknown)}, which is none of their tensors")


def n_predicting_blocks(specs: Collection[str]) -> int:
    """How many blocks tensors with our names are of."""
    return len({match[1] for name in specs if (match := _BLOCK.match(name))})


def write_predicting(source: WeightSource, path: Path) -> None:
    """Write them as one file, with our names. Raises CheckpointError."""
    with replacing(path) as file:
        for piece in serialize(source.specs, source.begun):
            file.write(piece)
    source.release()
