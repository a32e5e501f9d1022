"""The report of a run: what each sample and each node did, lost nodes and their recoveries, and the tables at its end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from mdi.block_ranges import span
from mdi.columns import clip, table
from mdi.engine.starter import StarterEngine
from mdi.errors import ControlError
from mdi.kernels.format_maps import shown
from mdi.metrics import NodeMetrics, RunMetrics, peak_rss_bytes
from mdi.run.choice import Choice
from mdi.run.form import Former
from mdi.run.texts import Sample
from mdi.stages.group_part import share_metrics
from mdi.units import counted, duration, size

# How caches were restored: from the token ids, from rows that a node had kept, or not at all, because a hot spare had them.
TOKENS, REPLAY, HOT_SPARE = "tokens", "replay", "hot spare"
NONE: Mapping[int, int] = MappingProxyType({})
MAY_DIFFER = (
    "numbers are summed in other parts, or by other hardware, than before: from here on texts may differ from those of an "
    "undisturbed run"
)


@dataclass(frozen=True)
class Recovery:
    """One lost node.

    Attributes:
        node: that was lost.
        replaced_by: nodes that have its blocks now, starter first.
        restored_by: TOKENS, REPLAY or HOT_SPARE.
        differs: how many ids each text had, prompt included, whose tokens may be others from there on than without the loss.
        seconds: from the last token before to the first one after; None if none came.
    """

    node: str
    replaced_by: tuple[str, ...]
    restored_by: str
    seconds: float | None
    differs: Mapping[int, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        seconds = None if self.seconds is None else round(self.seconds, 3)
        replaced_by = ", ".join(self.replaced_by)
        return {"node": self.node, "replaced_by": replaced_by, "restored_by": self.restored_by, "seconds": seconds}


class Records:
    """Recoveries in order; those after which no token has come yet are open."""

    def __init__(self) -> None:
        self._closed: list[Recovery] = []
        self._open: list[Recovery] = []
        self._last_s = 0.0  # the last token before those that are open

    def begin(self, nodes: Sequence[str], last_s: float) -> None:
        """These nodes were lost; the last token came at `last_s`, in the time of time.perf_counter()."""
        if not self._open:
            self._last_s = last_s
        known = {one.node for one in self._open}
        self._open += [Recovery(node, (), TOKENS, None) for node in nodes if node not in known]

    def replace(
        self, node: str, replaced_by: Sequence[str], restored_by: str = TOKENS, differs: Mapping[int, int] = NONE
    ) -> None:
        """Name the nodes that have the blocks of a lost one."""
        for i, one in enumerate(self._open):
            if one.node == node:
                self._open[i] = Recovery(node, tuple(replaced_by), restored_by, None, {**differs, **one.differs})

    def end(self, first_s: float | None) -> None:
        """The first token afterwards came; None if there was none."""
        self._closed = self.so_far(first_s)
        self._open.clear()

    def so_far(self, first_s: float | None) -> list[Recovery]:
        """All of them, where the first token of the present ring came at `first_s`; one from before the loss is none."""
        seconds = None if first_s is None or first_s <= self._last_s else first_s - self._last_s
        return [*self._closed, *(replace(one, seconds=seconds) for one in self._open)]


logger = logging.getLogger("mdi")

_ZERO = {"peak_rss_bytes": 0, "compute_s": 0.0, "wait_s": 0.0, "send_s": 0.0, "bytes_sent": 0, "frames": 0}
_NOTHING = (0.0, 0.0, 0.0, 0, 0, 0, 0, 0.0)


def metrics_of_run(
    model: Choice | None, names: Sequence[str], samples: Sequence[Sample], own: NodeMetrics | None,
    secondaries: Sequence[Mapping[str, Any]], duration_s: float, recoveries: Sequence[Recovery],
    may_differ_from: Callable[[Sample], int | None], has_inexact_guesses: bool,
) -> RunMetrics:  # fmt: skip
    """All of them, so far or in all.

    Args:
        model: None before it is open; own: of the starter, None before the ring is closed.
        names: of the ring's nodes, starter first.
        secondaries: as they measured themselves; empty where that is not known.
        has_inexact_guesses: see RunMetrics.
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
        model.weights.model.name if model is not None else "",
        [replace(sample.metrics(), may_differ_from=may_differ_from(sample)) for sample in samples],
        nodes,
        duration_s,
        [{**one.to_json(), "may_differ": differing(one.differs, samples)} for one in recoveries],
        has_inexact_guesses,
        shown(model.format) if model is not None else "",
    )


def differing(differs: Mapping[int, int], samples: Sequence[Sample]) -> list[dict[str, int]]:
    """Of each sample that may differ, its number and that of its first token which may; `differs` as in Recovery."""
    return [
        {"sample": sample.index, "token": differs[sample.request.seq_id] - sample.request.n_prompt}
        for sample in samples
        if sample.request is not None and sample.request.seq_id in differs
    ]


def measured_here(name: str, blocks: tuple[int, int], former: Former, engine: StarterEngine) -> NodeMetrics:
    """The starter's own."""
    ring = former.ring
    assert ring is not None and ring.part is not None
    compute_s, use = engine.compute_s + ring.part.compute_s, ring.stage.weight_use
    return NodeMetrics(
        name, blocks, peak_rss_bytes(), compute_s, *former.measured(), use.resident_bytes, use.read_bytes, use.wait_s,
        use.expert_hits, use.expert_misses, share_metrics(ring.stage),
    )  # fmt: skip


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


REPORT_COLUMNS = 100


def format_report(run: RunMetrics) -> str:
    """The tables printed when a run ends, at most 100 columns wide, without a final newline."""
    n_nodes, n_samples = run.n_nodes, len(run.samples)
    title = (
        f"{run.model}: {counted(n_samples, 'sample')} on {counted(n_nodes, 'node')}, {counted(run.n_tokens, 'token')}"
    )
    head = clip(f"{title} in {duration(run.duration_s)}, {run.tokens_per_s:.1f} tokens/s", REPORT_COLUMNS)
    samples = "\n".join(table(_sample_rows(run), left=(4, 5)))
    if run.guesses[0]:
        guessed, confirmed = run.guesses
        samples += f"\n{confirmed} of {guessed} guessed tokens were right: {run.tokens_per_round:.2f} tokens a round"
        if run.has_inexact_guesses:
            samples += "\nA node computes in torch: guesses may have changed tokens (--draft-inexact)."
    if differing := _differing(run):
        samples = f"{samples}\n{differing}"
    if not run.nodes:
        return f"{head}\n\n{samples}"
    nodes = "\n".join(table(_node_rows(run), left=(0,)))
    return f"{head}\n\n{samples}\n\n{nodes}"


def format_comparison(ring: RunMetrics, alone: RunMetrics, n_cores: int) -> str:
    """A ring on one machine compared with a single node, in a few lines.

    Args:
        n_cores: of the machine, which all nodes of the ring share.
    """
    held = max(stop - start for start, stop in (node.layers for node in ring.nodes))
    n_blocks = max(node.layers[1] for node in ring.nodes)
    n_same = sum(a.token_ids == b.token_ids for a, b in zip(ring.samples, alone.samples, strict=True))
    texts = "the same texts, token for token"
    if n_same < len(ring.samples):
        texts = f"{n_same} of {counted(len(ring.samples), 'text')} the same: another order of sums rounds differently"
    return (
        f"{counted(ring.n_nodes, 'node')}: {ring.tokens_per_s:.1f} tokens/s, "
        f"at most {held} of {counted(n_blocks, 'block')} on a node\n"
        f"1 node:  {alone.tokens_per_s:.1f} tokens/s, all blocks on it; {texts}\n"
        f"{_gain(ring, alone, n_cores)}"
    )


def _gain(ring: RunMetrics, alone: RunMetrics, n_cores: int) -> str:
    if not ring.tokens_per_s or not alone.tokens_per_s:
        return "Too few tokens to compare the speed."
    if ring.tokens_per_s >= alone.tokens_per_s:
        return f"The ring was {ring.tokens_per_s / alone.tokens_per_s:.2f} times as fast."
    why = "all nodes share one memory"
    if ring.n_nodes > n_cores:
        why = f"{counted(ring.n_nodes, 'node')} share {counted(n_cores, 'core')}"
    slower = alone.tokens_per_s / ring.tokens_per_s
    return (
        f"The ring was {slower:.1f} times slower: {why}.\n"
        "It pays with a machine for each node: mdi plan predicts how much."
    )


def _sample_rows(run: RunMetrics) -> list[list[str]]:
    rows = [["sample", "tokens", "tokens/s", "first token", "ended by", "prompt"]]
    for i, sample in enumerate(run.samples):
        rows.append(
            [
                str(i),
                str(len(sample.token_ids)),
                f"{sample.tokens_per_s:.1f}",
                duration(sample.ttft_s),
                clip(sample.finish_reason or "unfinished", 16),
                clip(sample.prompt, 36),
            ]
        )
    known = [sample.ttft_s for sample in run.samples if sample.ttft_s is not None]
    mean_ttft_s = sum(known) / len(known) if known else None
    rows.append(
        ["total", str(run.n_tokens), f"{run.tokens_per_s:.1f}", duration(mean_ttft_s), "", "(first token: mean)"]
    )
    return rows


def _differing(run: RunMetrics) -> str:
    """A line for each sample that may differ from an undisturbed run's."""
    return "\n".join(
        f"sample {i} may differ from an undisturbed run from its token {sample.may_differ_from} on"
        for i, sample in enumerate(run.samples)
        if sample.may_differ_from is not None
    )


def _node_rows(run: RunMetrics) -> list[list[str]]:
    rows = [["node", "blocks", "peak mem", "compute", "wait", "send", "sent/token"]]
    for node in run.nodes:
        rows.append(
            [
                clip(node.name, 12),
                span(*node.layers),
                size(node.peak_rss_bytes),
                *(_shared(part_s, run.duration_s) for part_s in (node.compute_s, node.wait_s)),
                duration(node.send_s),
                size(node.bytes_sent / run.n_tokens) if run.n_tokens else "-",
            ]
        )
    return rows


def _shared(part_s: float, whole_s: float) -> str:
    """A time and its share of the run: a node's times overlap, so shares need not add up to 100 %."""
    return duration(part_s) + (f" {100 * part_s / whole_s:3.0f}%" if whole_s > 0 else "")
