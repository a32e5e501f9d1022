"""The measurements of a run, as its report has them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mdi.engine.starter import StarterEngine
from mdi.errors import ControlError
from mdi.metrics import NodeMetrics, RunMetrics, peak_rss_bytes
from mdi.run.choice import Choice
from mdi.run.form import Former
from mdi.run.records import Recovery
from mdi.run.texts import Sample
from mdi.stages.group_part import share_metrics

logger = logging.getLogger("mdi")

_ZERO = {"peak_rss_bytes": 0, "compute_s": 0.0, "wait_s": 0.0, "send_s": 0.0, "bytes_sent": 0, "frames": 0}
_NOTHING = (0.0, 0.0, 0.0, 0, 0, 0, 0, 0.0)


def metrics_of_run(
    model: Choice | None, names: Sequence[str], samples: Sequence[Sample], own: NodeMetrics | None,
    secondaries: Sequence[Mapping[str, Any]], duration_s: float, recoveries: Sequence[Recovery],
    may_differ_from: Callable[[Sample], int | None],
) -> RunMetrics:  # fmt: skip
    """All of them, so far or in all.

    Args:
        model: None before it is open; own: of the starter, None before the ring is closed.
        names: of the ring's nodes, starter first.
        secondaries: as they measured themselves; empty where that is not known.
    """
    nodes: list[NodeMetrics] = []
    if model is not None:
        blocks = model.weights.blocks
        own = own or NodeMetrics("starter", blocks[0], peak_rss_bytes(), *_NOTHING)
        nodes = [
            replace(own, name="starter"),
            *metrics_of(names[1:], blocks[1:], secondaries or [{}] * (len(names) - 1)),
        ]
    return RunMetrics.from_parts(
        model.weights.model if model is not None else "",
        [replace(sample.metrics(), may_differ_from=may_differ_from(sample)) for sample in samples],
        nodes,
        duration_s,
        [{**one.to_json(), "may_differ": differing(one.differs, samples)} for one in recoveries],
    )


def differing(differs: Mapping[int, int], samples: Sequence[Sample]) -> list[dict[str, int]]:
    """Of each sample that may differ, its number and that of its first token which may; `differs` as in Recovery."""
    return [
        {"sample": sample.index, "token": differs[sample.request.seq_id] - len(sample.prompt_ids)}
        for sample in samples
        if sample.request is not None and sample.request.seq_id in differs
    ]


def measured_here(name: str, blocks: tuple[int, int], former: Former, engine: StarterEngine) -> NodeMetrics:
    """The starter's own."""
    ring = former.ring
    assert ring is not None and ring.part is not None
    compute_s, use = engine.compute_s + ring.part.compute_s, ring.stage.weight_use
    return NodeMetrics(name, blocks, peak_rss_bytes(), compute_s, *former.measured(), *use, share_metrics(ring.stage))


def metrics_of(
    names: Sequence[str], blocks: Sequence[tuple[int, int]], measured: Sequence[Mapping[str, Any]]
) -> list[NodeMetrics]:
    """Put secondaries' own measurements into the run's report; what cannot be read counts as nothing."""
    nodes = []
    for name, layers, values in zip(names, blocks, measured, strict=True):
        fields = {"name": name, "layers": list(layers)}
        try:
            nodes.append(NodeMetrics.from_json({**_ZERO, **values, **fields}))
        except (ControlError, TypeError) as e:  # wrong metrics of a node must not spoil the run
            logger.warning("the measurements of %s cannot be read: %s", name, e)
            nodes.append(NodeMetrics.from_json({**_ZERO, **fields}))
    return nodes
