"""What a node must know about its group: its rank, the others' addresses, the shares, and how to sum.

It travels in the extensions of `POST /init`, and is checked field by field: it came from another node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mdi.checkpoint.packing import Packing
from mdi.config import N_NODES_LIMIT
from mdi.errors import ControlError
from mdi.spec.options import SUM_CHOICES
from mdi.tensor.numbers import REDUCE_DTYPES
from mdi.tensor.shares import Share, Shares, why_not_shared_out
from mdi.weight_formats import LAYOUTS

EXTENSION = "tensor"
N_RANKS_LIMIT = 256


@dataclass(frozen=True)
class Member:
    """How to reach a node of the group: its ring port."""

    name: str
    addr: str
    port: int


@dataclass(frozen=True)
class Group:
    """A group, as one of its nodes sees it.

    Attributes:
        rank: of the node.
        members: all nodes of the group, by rank; neighbours in the ring, in any order.
        packing: the formats of all shards.
        algorithm: one of spec.options.SUM_CHOICES; `reduce_dtype` one of numbers.REDUCE_DTYPES.
        name: of the group, for people.
        n_here: nodes of the ring, in this group or in others, at the address of each member.
        is_last: whether the node is the last of the group that a frame goes through.
    """

    rank: int
    members: tuple[Member, ...]
    shares: Shares
    packing: Packing
    algorithm: str = "auto"
    reduce_dtype: str = "float32"
    n_here: tuple[int, ...] = ()
    name: str = ""
    is_last: bool = False

    @property
    def n_neighbours(self) -> int:
        """Nodes of the ring that share this node's machine, itself among them, as far as addresses say."""
        return self.n_here[self.rank] if self.n_here else 1

    @property
    def size(self) -> int:
        return len(self.members)

    def share(self, config: Mapping[str, Any]) -> Share:
        """`config` is litgpt's Config of the whole model."""
        return Share(self.shares, self.rank, config)

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "members": [[m.name, m.addr, m.port] for m in self.members],
            "heads": list(self.shares.heads),
            "columns": list(self.shares.columns),
            "vocabulary": None if self.shares.vocabulary is None else list(self.shares.vocabulary),
            "packing": [self.packing.blocks, self.packing.head],
            "algorithm": self.algorithm,
            "reduce_dtype": self.reduce_dtype,
            "n_here": list(self.n_here),
            "name": self.name,
            "is_last": self.is_last,
        }


def group_of(extensions: Mapping[str, Any], config: Mapping[str, Any]) -> Group | None:
    """The group that an /init tells of; None if the node computes its blocks alone.

    Raises:
        ControlError: it cannot be read, or does not fit the model.
    """
    data = extensions.get(EXTENSION)
    if data is None:
        return None
    try:
        members = tuple(Member(_text(name), _text(addr), _count(port, 65535)) for name, addr, port in data["members"])
        vocabulary = data["vocabulary"]
        shares = Shares(
            _bounds(data["heads"]), _bounds(data["columns"]), None if vocabulary is None else _bounds(vocabulary)
        )
        blocks, head = data["packing"]
        group = Group(
            _count(data["rank"], len(members) - 1), members, shares, Packing(blocks, head), data["algorithm"],
            data["reduce_dtype"], tuple(_count(n, N_NODES_LIMIT) for n in data["n_here"]), _text(data["name"]),
            data.get("is_last", data["rank"] == len(members) - 1),  # earlier versions do not say it
        )  # fmt: skip
        if blocks not in LAYOUTS or head not in LAYOUTS:
            raise ValueError(f"weights in {_text(blocks)[:20]} and {_text(head)[:20]}")
        if type(group.is_last) is not bool:
            raise ValueError("is_last that is neither true nor false")
        if len(group.n_here) != group.size:
            raise ValueError(f"n_here of {len(group.n_here)} nodes")
        if (
            shares.n_nodes != group.size
            or group.algorithm not in SUM_CHOICES
            or group.reduce_dtype not in REDUCE_DTYPES
        ):
            raise ValueError("fields that contradict each other")
        if (reason := why_not_shared_out(config)) is not None:
            raise ValueError(f"a model with {reason}")
        shares.check(config)
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise ControlError(f"extensions.{EXTENSION}: {str(e)[:200]}", 400) from None
    return group


def _bounds(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not 2 <= len(values) <= N_RANKS_LIMIT + 1:
        raise ValueError("bounds of no group")
    return tuple(_count(value, 1 << 31) for value in values)


def _count(value: Any, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"expected a whole number from 0 to {most}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 1000:
        raise ValueError("expected a string")
    return value
