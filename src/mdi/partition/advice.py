"""Names what limits a ring, and what would make it faster or make it fit, in words with numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mdi.errors import PlacementError
from mdi.partition.cost import CostModel, Prediction
from mdi.partition.methods import place
from mdi.partition.model import ModelShape, Workload
from mdi.partition.placement import Placement, excess_bytes
from mdi.partition.spread import ring_of, spread
from mdi.units import duration, size

WORTH = 1.05  # what makes less difference is not worth a word
ENOUGH = 4  # pieces of advice
LOOKED_AT = 16  # nodes of a large ring that are tried without


def limit_of(placement: Placement, prediction: Prediction) -> str:
    """Name the limit of a ring."""
    name = placement.names[prediction.slowest]
    count = placement.counts[prediction.slowest]
    if len(placement.names) == 1:
        return f"{name}, which does all the work"
    if prediction.limit == "stage":
        own = " with embedding and head" if prediction.slowest == 0 else ""
        return f"the stage of {name} ({count} blocks{own}, {duration(max(prediction.stage_s))} per frame)"
    if prediction.limit == "link":
        target = placement.names[(prediction.slowest + 1) % len(placement.names)]
        return f"the link from {name} to {target}, busy for {duration(max(prediction.busy_s))} per frame"
    links = sum(prediction.link_s)
    return (
        f"the way round the ring, {duration(prediction.round_s)}: stages {duration(sum(prediction.stage_s))} and links "
        f"{duration(links)} one after the other"
    )


def advice(cost: CostModel, placement: Placement, prediction: Prediction, smaller: Sequence[ModelShape]) -> list[str]:
    """Advice that would help, at most ENOUGH lines."""
    found = [
        *_other_placement(cost, placement, prediction),
        *_without(cost, placement, prediction),
        *_smaller(cost, smaller, prediction),
        *_more_sequences(cost, placement, prediction),
        *_tight(cost, placement),
    ]
    return found[:ENOUGH]


def help_for_misfit(cost: CostModel, smaller: Sequence[ModelShape], method: str | None) -> list[str]:
    """Advice for a model that does not fit."""
    hints = []
    if method not in ("throughput", "latency") and _fits(cost):
        hints.append("--placement throughput fits")
    for shape in smaller:
        if shape.weight_bytes < cost.shape.weight_bytes and _fits(CostModel(cost.profile, shape, cost.workload)):
            hints.append(f"--quantize {shape.format} fits")
            break
    workload = _largest_that_fits(cost)
    if workload is not None:
        which = f"--n-samples {workload.n_sequences}" if workload.n_sequences < cost.workload.n_sequences else ""
        length = f"--sequence-length {workload.sequence_length}"
        shorter = length if workload.sequence_length < cost.workload.sequence_length else ""
        hints.append(f"{' '.join(filter(None, [which, shorter]))} fits")
    return hints


def _fits(cost: CostModel) -> bool:
    try:
        place(cost, "throughput")
    except PlacementError:
        return False
    return True


def _largest_that_fits(cost: CostModel) -> Workload | None:
    """Fewer sequences, else shorter ones, halved until the caches fit; None if even the smallest do not."""
    workload = cost.workload
    while workload.n_sequences > 1 or workload.sequence_length > 64:
        if workload.n_sequences > 1:
            workload = replace(workload, n_sequences=workload.n_sequences // 2)
        else:
            workload = replace(workload, sequence_length=max(64, workload.sequence_length // 2))
        if _fits(CostModel(cost.profile, cost.shape, workload)):
            return workload
    return None


def _other_placement(cost: CostModel, placement: Placement, prediction: Prediction) -> Iterator[str]:
    if placement.method == "throughput":
        return
    best = place(cost, "throughput")
    gain = cost.predict(best.order, best.counts).tokens_s / prediction.tokens_s
    if gain >= WORTH:
        yield f"with --placement throughput the ring is {gain:.1f}x faster"


def _without(cost: CostModel, placement: Placement, prediction: Prediction) -> Iterator[str]:
    """Nodes that only slow the ring down; a placement that looked for the fastest ring has left them out already."""
    if placement.method == "throughput":
        return
    gains = []
    for i in placement.order[1:][:LOOKED_AT]:
        order = [j for j in placement.order if j != i]
        found = spread(cost, ring_of(cost, order, cost.terms(len(order)).n_rows))
        if found is not None:
            gains.append((prediction.round_s / found.round_s, cost.profile.nodes[i].name))
    gain, name = max(gains, default=(0.0, ""))
    if gain >= WORTH:
        yield f"without {name} the ring is {gain:.1f}x faster, if the others share its blocks well"


def _smaller(cost: CostModel, smaller: Sequence[ModelShape], prediction: Prediction) -> Iterator[str]:
    """A format with fewer bytes is faster about as much as it reads less."""
    for shape in smaller:
        ratio = cost.shape.reference.weight_bytes / shape.reference.weight_bytes
        if ratio >= 1.5 and all(node.device == "cpu" for node in cost.profile.nodes):
            text = f"--quantize {shape.format} reads {ratio:.1f}x fewer bytes per token"
            if prediction.limit == "stage" or prediction.n_frames == 1:
                text += ", and the stages are what the ring waits for"
            yield text
            return


def _more_sequences(cost: CostModel, placement: Placement, prediction: Prediction) -> Iterator[str]:
    """More sequences at once fill the ring and share the reading of weights: with this placement, or another one."""
    more = max(2 * len(placement.order), 2 * cost.workload.n_sequences)
    wider = CostModel(cost.profile, cost.shape, replace(cost.workload, n_sequences=more))
    rates = []
    if not excess_bytes(wider, placement):
        rates.append((wider.predict(placement.order, placement.counts).tokens_s, ""))
    if placement.method == "throughput" and cost.n_nodes <= LOOKED_AT:
        with contextlib.suppress(PlacementError):
            other = place(wider, "throughput")
            where = "" if other.names == placement.names else f" over {' and '.join(other.names)}"
            rates.append((wider.predict(other.order, other.counts).tokens_s, where))
    rate, where = max(rates, default=(0.0, ""))
    if rate >= 1.2 * prediction.tokens_s:
        yield f"{more} sequences at once would give {rate / prediction.tokens_s:.1f}x the tokens per second{where}"


def _tight(cost: CostModel, placement: Placement) -> Iterator[str]:
    for i, (start, stop) in zip(placement.order, placement.ranges, strict=True):
        node = cost.profile.nodes[i]
        left = node.memory_bytes - cost.memory(i, start, stop, len(placement.order)).total
        if left < 0.05 * node.memory_bytes:
            yield f"{node.name} will have only {size(left)} of memory left: another program may make it fail"
            return
