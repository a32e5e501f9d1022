"""A starter's reports about itself and its run."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import mdi
from mdi.config import ClusterConfig
from mdi.control.client import ControlClient
from mdi.control.messages import CONTROL_VERSION
from mdi.control.server import StatusOnly
from mdi.engine.starter_engine import StarterEngine
from mdi.errors import ControlError
from mdi.kernels.kernel_stage import WeightUse
from mdi.machine.computing import Computing
from mdi.metrics import NodeMetrics, RunMetrics, peak_rss_bytes
from mdi.node.driver import EngineThread
from mdi.node.identity import identity_of
from mdi.node.ring_recovery import RingRecovery
from mdi.node.run_rings import RunRings
from mdi.node.run_texts import RunTexts
from mdi.node.run_trace import RunTrace
from mdi.node.sample import Sample
from mdi.node.starter_weights import StarterWeights
from mdi.node.teardown import metrics_of
from mdi.spec.options import StarterOptions
from mdi.text import TextCodec
from mdi.tracing.trace import Trace


class OpenModel(NamedTuple):
    """What a run generates with: weights and the cut, litgpt's Config, the folder that it lies in, the tokenizer."""

    weights: StarterWeights
    config: Any
    directory: Path
    codec: TextCodec


class StarterReport(StatusOnly):
    """The side of a StarterNode that is only looked at.

    Attributes:
        secondary_metrics: what each secondary measured, once the run has ended.
        run_trace: None where nothing is recorded.
        max_length: tokens that a text of the run may have; from `prepare` on.
    """

    def __init__(self, cluster: ClusterConfig, options: StarterOptions, device: str) -> None:
        self._cluster = cluster
        self._options = options
        self._device = device
        self._epoch = secrets.randbits(64)
        self._process = secrets.token_hex(8)
        self._state = "IDLE"
        self._model: OpenModel | None = None
        self._computing: Computing | None = None
        self.rings: RunRings | None = None
        self._driver: EngineThread | None = None
        self.recovery: RingRecovery | None = None  # without, a lost node ends the run
        self._texts: RunTexts | None = None
        self.max_length = 0
        self.secondary_metrics: list[dict[str, Any]] = []
        self.run_trace = RunTrace(options.n_spans) if options.n_spans else None

    @property
    def model(self) -> OpenModel:
        """From `open` on."""
        assert self._model is not None
        return self._model

    @property
    def weights(self) -> StarterWeights:
        """Of the model, with the cut; they can be read until `close`."""
        return self.model.weights

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def directory(self) -> Path:
        return self.model.directory

    @property
    def codec(self) -> TextCodec:
        return self.model.codec

    @property
    def computing(self) -> Computing:
        """What this node computes with; from `open` on."""
        assert self._computing is not None
        return self._computing

    @property
    def engine(self) -> StarterEngine:
        """From `start` on."""
        assert self._driver is not None
        return self._driver.engine

    @property
    def cluster(self) -> ClusterConfig:
        """The nodes of the ring, as it is now."""
        return self._cluster if self.rings is None else self.rings.cluster

    @cluster.setter
    def cluster(self, cluster: ClusterConfig) -> None:
        assert self.rings is None
        self._cluster = cluster

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.cluster.nodes)

    @property
    def samples(self) -> list[Sample]:
        """All that were submitted."""
        return [] if self._texts is None else self._texts.samples

    @property
    def identity(self) -> str:
        """See `identity_of`; after `prepare`."""
        return identity_of(self.weights, self.computing, self._options, self.max_length)

    @property
    def numbers(self) -> str:
        """See `numbers_of`: of the present ring."""
        assert self.rings is not None
        return self.rings.numbers

    @property
    def formats(self) -> tuple[str | None, str | None]:
        """Formats of the blocks and of the head: as requested or, with "auto", as chosen."""
        return self._options.quantize, self._options.quantize_head

    def metrics(self) -> RunMetrics:
        """What the run measured, so far or in all."""
        recoveries = [] if self.recovery is None else self.recovery.keeper.recoveries
        samples = [replace(sample.metrics(), may_differ_from=self.may_differ_from(sample)) for sample in self.samples]
        return RunMetrics.from_parts(
            self.weights.model if self._model else "", samples, self._node_metrics(),
            0.0 if self._texts is None else self._texts.duration_s,
            [{**one.to_json(), "may_differ": self._differing(one.differs)} for one in recoveries],
        )  # fmt: skip

    def may_differ_from(self, sample: Sample) -> int | None:
        """See SampleMetrics."""
        differs = {} if self.recovery is None else self.recovery.keeper.differs_from
        known = [sample.may_differ_from, *(one["token"] for one in self._differing(differs, [sample]))]
        return min((n for n in known if n is not None), default=None)

    def _differing(self, differs: Mapping[int, int], samples: Sequence[Sample] | None = None) -> list[dict[str, int]]:
        """Of each sample that may differ, its number and that of its first token which may; `differs` as in Recovery."""
        return [
            {"sample": sample.index, "token": differs[sample.request.seq_id] - len(sample.prompt_ids)}
            for sample in (self.samples if samples is None else samples)
            if sample.request is not None and sample.request.seq_id in differs
        ]

    @property
    def is_shared(self) -> bool:
        """Whether nodes compute blocks together."""
        return self.rings is not None and self.rings.is_shared

    @property
    def clients(self) -> list[ControlClient]:
        """Of the secondaries, in ring order."""
        return [] if self.rings is None else list(self.rings.clients)

    @property
    def run_id(self) -> str:
        return f"{self._epoch:016x}" if self.rings is None else self.rings.run

    @property
    def device(self) -> str:
        return self._device

    @property
    def replay_bytes(self) -> int:
        """What this node may keep of the rows that it has sent; from `prepare` on."""
        return 0 if self.recovery is None or self.is_shared else self._options.replay_bytes

    @property
    def format(self) -> str:
        """What weights are held in, on this node."""
        return self.computing.quantize or self.computing.dtype

    def measured(self) -> NodeMetrics | None:
        """What this node did in the run so far; None before the ring is closed."""
        if self._driver is None:
            return None
        return NodeMetrics(self.names[0], self.weights.blocks[0], peak_rss_bytes(), *self._measured())

    @property
    def n_recoveries(self) -> int:
        """How often the run has moved to another ring."""
        return 0 if self.recovery is None else len(self.recovery.keeper.recoveries)

    @property
    def trouble(self) -> str:
        """Why no text goes on, in words; "" while the ring is closed."""
        return "" if self.recovery is None else self.recovery.keeper.trouble

    def trace(self) -> Trace | None:
        """The frames of the run on all nodes, once it has ended; None if they were not recorded."""
        if self.run_trace is None:
            return None
        n_tokens = 0 if self._driver is None else self.engine.n_tokens
        measured = self.secondary_metrics or [{}] * (self.cluster.n_nodes - 1)
        return self.run_trace.trace(self.weights.model, self.cluster.nodes, self.weights.blocks, measured, n_tokens)

    def status(self, run: str | None) -> dict[str, Any]:
        return {
            "name": self.cluster.starter.name,
            "version": mdi.__version__,
            "control_version": CONTROL_VERSION,
            "process": self._process,
            "state": "RECOVERING" if self._driver is not None and self._driver.is_recovering else self._state,
            "clock_s": time.time(),
            "model": self.weights.model if self._model else None,
            "n_nodes": self.cluster.n_nodes,
            "samples": [{"n_tokens": len(s.token_ids), "finish_reason": s.finish_reason} for s in list(self.samples)],
        }

    def check_echo(self) -> None:
        if self._state == "RUNNING":
            raise ControlError("the starter is in the middle of a run", 409, code="busy")

    def _measured(self) -> tuple[float, float, float, int, int, int, int, float]:
        """compute_s to disk_wait_s of NodeMetrics, of this node."""
        if self._driver is None or self.rings is None:
            return 0.0, 0.0, 0.0, 0, 0, *WeightUse(0, 0, 0.0)
        beside = 0.0 if self.rings.own is None else self.rings.own.compute_s
        return self.engine.compute_s + beside, *self.rings.measured(), *self.rings.weight_use

    def _node_metrics(self) -> list[NodeMetrics]:
        if self._model is None:
            return []
        blocks = self.weights.blocks
        stage = None if self.rings is None else self.rings.own
        share = None if stage is None else stage.share
        own = NodeMetrics("starter", blocks[0], peak_rss_bytes(), *self._measured(), share)
        measured = self.secondary_metrics or [{}] * (self.cluster.n_nodes - 1)
        return [own, *metrics_of(self.names[1:], blocks[1:], measured)]
