#!/usr/bin/env python3
"""LLaMPS' Table 3 beside what our OPA and GMA place, as a Markdown table; the numbers are those of the test.

placement_llamps.py
"""

from __future__ import annotations

import argparse

import on_path  # noqa: F401
from leftovers import gma_scores, opa_scores
from llamps import FITS, TABLE, Fit, Row
from mdi.placement.methods import filled, ranked
from side_by_side.tables import markdown


def placed(row: Row, fit: Fit, method: str) -> str:
    left_over = [gb - fit.overhead(1) - row.model.cache_gb for gb, _ in row.servers]
    cores = [float(n) for _, n in row.servers]
    scores = opa_scores(left_over, cores) if method == "opa" else gma_scores(left_over, cores)
    counts = filled(ranked(scores), row.most_blocks(fit), row.model.n_layer)
    return " ".join(f"S{i + 1}:{n}" for i, n in counts.items())


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    head = ["model", "servers (GB, cores)", "GMA printed", "GMA here", "OPA printed", "OPA here"]
    rows = []
    for row in TABLE:
        cells = [row.model.name, " ".join(f"({gb:g}, {n})" for gb, n in row.servers)]
        for method in ("gma", "opa"):
            printed = " ".join(f"{s}:{n}" for s, n in zip(getattr(row, method), row.counts, strict=True))
            ours = placed(row, FITS[row.model.name], method)
            cells += [printed, ours if ours == printed else f"**{ours}**"]
        cells += [", ".join(f"{s:g}" for s in times) for times in (row.gma_s, row.opa_s)]
        rows.append(cells)
    print(markdown([*head, "their s for 1, 2, 4 clients: GMA", "OPA"], rows))


if __name__ == "__main__":
    main()
