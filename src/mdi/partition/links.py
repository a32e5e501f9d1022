"""Links between any two nodes of a cluster: measured ones, and a cautious guess for the others."""

from __future__ import annotations

from mdi.partition.profile import DEFAULT_BYTES_S, DEFAULT_ROUND_TRIP_S, ClusterProfile

# What a frame costs at each hop beside the network: hand-overs between threads (benchmarks/RESULTS.md, half a round trip).
HOP_S = 150e-6


class Links:
    """Way from node i to node j, by their places in the profile.

    A pair that was not measured is taken for the worst of the measured links that touch either of its nodes, or, without
    any, for a switched gigabit network.
    """

    def __init__(self, profile: ClusterProfile) -> None:
        index = {node.name: i for i, node in enumerate(profile.nodes)}
        self._measured: dict[tuple[int, int], tuple[float, float]] = {}
        for link in profile.links:
            self._measured[index[link.source], index[link.target]] = (link.round_trip_s, link.bytes_s)
        self._worst: dict[int, tuple[float, float]] = {}
        for pair, (round_trip_s, bytes_s) in self._measured.items():
            for node in pair:
                slowest = self._worst.get(node, (0.0, float("inf")))
                self._worst[node] = (max(slowest[0], round_trip_s), min(slowest[1], bytes_s))

    @property
    def are_equal(self) -> bool:
        """Whether all links count as equal, so that the order of the nodes does not matter."""
        return not self._measured

    def of(self, source: int, target: int) -> tuple[float, float]:
        """Round trip in seconds, bytes per second."""
        found = self._measured.get((source, target))
        if found is not None:
            return found
        near = [self._worst[node] for node in (source, target) if node in self._worst]
        if not near:
            return DEFAULT_ROUND_TRIP_S, DEFAULT_BYTES_S
        return max(worst[0] for worst in near), min(worst[1] for worst in near)

    def transmit_s(self, source: int, target: int, n_bytes: float) -> float:
        """How long the link is busy with so many bytes."""
        return n_bytes / self.of(source, target)[1]

    def seconds(self, source: int, target: int, n_bytes: float) -> float:
        """From the last computation on one node to the first on the next."""
        round_trip_s, bytes_s = self.of(source, target)
        return HOP_S + round_trip_s / 2 + n_bytes / bytes_s
