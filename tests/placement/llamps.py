"""Table 3 of "Leftovers for LLaMA" (Singh et al., ICPE 2024) and what was fitted to it.

The paper prints clusters, chosen servers and block counts, but not the size of a block. Of the overhead of its framework its
table 1 has three formulas, none of which fits table 3 in any unit, and the name of a decision tree that is not printed. Fitted
here, per model: GB of a block, and GB of overhead beside the attention cache, which is the paper's formula
(section 4.3: twice the hidden size, times 4096, times 4 bytes). Two rows cannot come out with any two constants; for their
models a second fit has an overhead that grows in steps with the number of blocks, as the paper's decision tree may.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fit:
    """GB of one block, and GB of overhead for up to so many blocks: ((blocks, GB), ...), the last without end."""

    block_gb: float
    overhead_gb: tuple[tuple[int, float], ...]

    def overhead(self, n_blocks: int) -> float:
        return next(gb for most, gb in self.overhead_gb if n_blocks <= most)

    def most_blocks(self, memory_gb: float, cache_gb: float, n_layer: int) -> int:
        """The most blocks that fit; in closed form `(memory - overhead) / block` where the overhead is constant."""
        needs = (n * self.block_gb + self.overhead(n) + cache_gb for n in range(1, n_layer + 1))
        return sum(1 for need in needs if need <= memory_gb + 1e-9)


MANY = 1_000

FITS = {
    "Bloom 560m": Fit(0.12, ((MANY, 10.59),)),
    "Bloom 3b": Fit(0.40, ((MANY, 10.65),)),
    "Bloom 7b1": Fit(0.91, ((MANY, 16.26),)),
    "Falcon-40b": Fit(2.65, ((MANY, 12.15),)),
    "Llama2-70b": Fit(4.00, ((MANY, 8.73),)),
}
STEPS = {
    "Bloom 560m": Fit(0.0504, ((4, 10.90), (8, 11.19), (12, 11.40), (MANY, 12.735))),
    "Llama2-70b": Fit(3.4226, ((20, 14.70), (25, 27.50), (35, 34.80), (MANY, 35.00))),
}


@dataclass(frozen=True)
class Model:
    name: str
    n_layer: int
    hidden: int

    @property
    def cache_gb(self) -> float:
        return 2 * self.hidden * 4096 * 4 / 1e9


@dataclass(frozen=True)
class Row:
    """One cluster: (GB, cores) of S1, S2, ..., and what the paper prints for both ways of placing.

    Attributes:
        gma_s, opa_s: seconds of 1, 2 and 4 clients.
    """

    model: Model
    servers: tuple[tuple[float, int], ...]
    gma: tuple[str, ...]
    opa: tuple[str, ...]
    counts: tuple[int, ...]
    gma_s: tuple[float, ...]
    opa_s: tuple[float, ...]

    def most_blocks(self, fit: Fit) -> list[int]:
        return [fit.most_blocks(gb, self.model.cache_gb, self.model.n_layer) for gb, _ in self.servers]

    @property
    def label(self) -> str:
        return f"{self.model.name}, {len(self.counts)}"


_B560 = Model("Bloom 560m", 24, 1024)
_B3 = Model("Bloom 3b", 30, 2560)
_B7 = Model("Bloom 7b1", 30, 4096)
_FALCON = Model("Falcon-40b", 60, 8192)
_LLAMA = Model("Llama2-70b", 80, 8192)

_ONE = (("S2",), ("S4",))
_TWO = (("S1", "S2"), ("S1", "S4"))
_THREE = (("S1", "S2", "S3"), ("S1", "S2", "S5"))

TABLE = (
    Row(_B560, ((12, 2), (14, 2), (14, 4), (14, 8)), *_ONE, (24,), (3.89, 4.87, 9.73), (2.02, 3.01, 4.56)),
    Row(_B560, ((13.5, 8), (12, 2), (12, 4), (12, 8)), *_TWO, (14, 10), (3.73, 4.49, 8.82), (2.43, 2.59, 3.65)),
    Row(
        _B560,
        ((12.15, 8), (11.65, 8), (11.15, 2), (11.15, 4), (11.15, 8)),
        *_THREE,
        (12, 8, 4),
        (2.75, 3.01, 3.65),
        (2.68, 2.88, 3.11),
    ),
    Row(_B3, ((23, 8), (23.5, 2), (23.5, 4), (23.5, 8)), *_ONE, (30,), (17.01, 28.43, 59.46), (7.12, 10.12, 20.15)),
    Row(_B3, ((17.5, 8), (16.7, 2), (16.7, 4), (16.7, 8)), *_TWO, (16, 14), (18.11, 28.62, 54.44), (8.6, 9.97, 19.13)),
    Row(
        _B3,
        ((16.7, 8), (15, 2), (13.3, 2), (13.3, 4), (13.3, 8)),
        *_THREE,
        (14, 10, 6),
        (10.93, 12.09, 14.11),
        (10.28, 11.23, 13.91),
    ),
    Row(_B7, ((42, 8), (44, 2), (44, 4), (44, 8)), *_ONE, (30,), (45.02, 83.21, 179.01), (20.1, 34.5, 67.44)),
    Row(_B7, ((31, 8), (30, 2), (30, 4), (30, 8)), *_TWO, (16, 14), (46.78, 70.12, 160.12), (23.08, 24.98, 42.01)),
    Row(
        _B7,
        ((30, 8), (26, 8), (22, 2), (22, 4), (22, 8)),
        *_THREE,
        (14, 10, 6),
        (27.79, 29.12, 38.35),
        (22.12, 23.59, 36.12),
    ),
    Row(
        _FALCON,
        ((98.3, 8), (88, 2), (88, 4), (88, 8)),
        *_TWO,
        (32, 28),
        (491.2, 536.12, 840.02),
        (211.37, 305.12, 682.01),
    ),
    Row(
        _FALCON,
        ((93.2, 2), (67.5, 8), (42, 2), (42, 4), (42, 8)),
        *_THREE,
        (30, 20, 10),
        (260.12, 266.72, 352.12),
        (258.19, 263.89, 345.26),
    ),
    Row(
        _LLAMA,
        ((155, 8), (113.5, 2), (83.5, 2), (83.5, 4), (83.5, 8)),
        *_THREE,
        (35, 25, 20),
        (396.11, 408.12, 798.12),
        (279.13, 304.11, 588.76),
    ),
)
# What two constants per model cannot give, with the counts that they give instead.
MISSED = {("Bloom 560m", 2): (23, 1), ("Llama2-70b", 3): (36, 26, 18)}
