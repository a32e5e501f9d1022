"""The time of a sum over a group in each way, by delay and rate of the links. Pure numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

ALGORITHMS = ("star", "exchange", "ring", "tree")
DEFAULT = (
    "exchange"  # of AUTO: it costs less than a star, by the model at any delay and rate, and adds in the order of ranks
)
AUTO = "auto"
CHOICES = (AUTO, *ALGORITHMS)


@dataclass(frozen=True)
class LinkSpeed:
    """Of the links of a group.

    Attributes:
        delay_s: from one node to another, of a few bytes.
        bytes_s: rate of one node to all others together.
        message_s: of a node's own time for each message, sent and received.
    """

    delay_s: float
    bytes_s: float
    message_s: float = 1e-5


def seconds(algorithm: str, n_nodes: int, n_bytes: int, speed: LinkSpeed) -> float:
    """Of one sum of `n_bytes`, until the last node has it. Nodes send and receive at the same time."""
    if n_nodes < 2:
        return 0.0
    n, d, o, b = n_nodes, speed.delay_s, speed.message_s, n_bytes / speed.bytes_s
    if algorithm == "star":
        return 2 * (d + (n - 1) * (b + o))
    if algorithm == "exchange":
        return d + (n - 1) * (b + 2 * o)
    if algorithm == "ring":
        return 2 * (n - 1) * (d + b / n + 2 * o)
    assert algorithm == "tree", algorithm
    depth, most = (
        math.floor(math.log2(n)),
        math.ceil(math.log2(n)),
    )  # hops from a leaf to the root; what the root receives
    return 2 * (depth * d + most * (b + o))
