"""The starter node: cuts the model, configures the secondaries, closes the ring and drives the generation.

One `StarterNode` is one run: `open`, `prepare`, `start`, then `submit` and `generate` as often as one likes, `end`, `close`.
A ring of one node goes the same way, only without ports.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from litgpt.config import Config

import mdi
from mdi.checkpoint.parts import stage_parts
from mdi.config import ClusterConfig
from mdi.control.client import ControlClient
from mdi.control.messages import CONTROL_VERSION, InitRequest, PartSpec
from mdi.control.server import ControlServer, StatusOnly
from mdi.engine.memory import CacheMemory
from mdi.engine.sampling import seed_of
from mdi.engine.sequence import SamplingParams
from mdi.engine.starter import StarterEngine
from mdi.engine.tensors import DTYPES, pinned_buffer
from mdi.errors import ControlError, EngineError, MdiError, UsageError
from mdi.metrics import NodeMetrics, RunMetrics, peak_rss_bytes
from mdi.model.formats import check_format, quantizer
from mdi.model.stage import StarterStage
from mdi.net.listener import RingListener, open_socket
from mdi.net.ring import LoopbackRing, Seat, TcpRing, close_starter_ring
from mdi.net.wire import HANDSHAKE_LIMITS, Limits
from mdi.node.device import check_room, choose_device, choose_dtype, choose_kv_dtype, held_bytes
from mdi.node.memory import report_caches, share_out
from mdi.node.planning import Model, Wishes, choose, profile_cluster
from mdi.node.resources import device_free_bytes
from mdi.node.sample import OnText, Sample
from mdi.node.setup import SecondarySetup
from mdi.node.weights import StarterWeights
from mdi.partition.methods import DEFAULT_METHOD
from mdi.partition.placement import size
from mdi.text import TextCodec

METRICS_DEADLINE_S = 5.0

logger = logging.getLogger("mdi")


@dataclass(frozen=True)
class StarterOptions:
    """What the user chose; see the flags of starter.py.

    `placement` None is the default one, unless chunks that lie there have been cut already; `cache_dir` is where this node
    keeps what it measured of itself.
    """

    ckpt: Path | None = None
    chunk: Path | None = None
    layers: str | None = None
    placement: str | None = None
    prefer_memory: float | None = None
    cache_dir: Path | None = None
    device: str | None = None
    dtype: str | None = None
    sequence_length: int | None = None
    compile: bool = False
    quantize: str | None = None
    quantize_head: str | None = None
    prompt_style: str = "auto"
    wait_s: float = 30.0
    wire_dtype: str = "auto"
    kv_dtype: str = "auto"
    kv_memory: int | None = None
    n_frames: int | None = None


class StarterNode(StatusOnly):
    """See the module."""

    def __init__(self, cluster: ClusterConfig, options: StarterOptions) -> None:
        self.cluster = cluster
        self._options = options
        self._device = choose_device(options.device or cluster.starter.device)
        self._wished_dtype = options.dtype or cluster.starter.dtype
        choose_dtype(self._wished_dtype, "float32", self._device)
        check_format(options.quantize, self._device)
        check_format(options.quantize_head, self._device)
        self._epoch = secrets.randbits(64)
        self._clients = [ControlClient(node) for node in cluster.secondaries]
        self._listener: RingListener | None = None
        self._control: ControlServer | None = None
        self._weights: StarterWeights | None = None
        self._ring: TcpRing | LoopbackRing | None = None
        self._configured = False
        self._state = "IDLE"
        self.samples: list[Sample] = []
        self.secondary_metrics: list[dict[str, Any]] = []
        self._failure: MdiError | None = None
        self._memory: CacheMemory | None = None
        self._begin = 0.0
        self._end = 0.0

    @property
    def _run_id(self) -> str:
        return f"{self._epoch:016x}"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.cluster.nodes)

    def open(self) -> None:
        """Bind the ports and find the weights; everything wrong with them is told here.

        A ring of one node has no ring port, and no control port if its number is 0.

        Raises:
            MdiError
        """
        node = self.cluster.starter
        if self.cluster.secondaries or node.port:
            self._control = ControlServer(self, node.listen_addr, node.port, node.name)
        if self.cluster.secondaries:
            sock = open_socket(node.listen_addr, node.port_in, "starter's inference port_in")
            self._listener = RingListener(sock, node.name)
        options = self._options
        will_be_cut = self.cluster.n_nodes > 1 and options.placement not in (None, "even") and options.layers is None
        self._weights = StarterWeights(options.ckpt, options.chunk, self.cluster.n_nodes, options.layers, will_be_cut)
        self.config = Config(**self._weights.config)
        self._dtype = choose_dtype(self._wished_dtype, self._weights.dtype, self._device, options.quantize is not None)
        self._kv_dtype = choose_kv_dtype(options.kv_dtype, self._dtype, self._device)
        self._directory = self._weights.directory
        self.codec = TextCodec.from_checkpoint(self._directory, options.prompt_style)

    @property
    def context_length(self) -> int:
        """Tokens that a sequence may have: what the user asked for, else what the model was made for."""
        wanted = self._options.sequence_length
        if wanted is None:
            return int(self.config.block_size)
        if not 1 <= wanted <= self.config.block_size:
            raise UsageError(
                f"--sequence-length {wanted}: {self.config.name or 'the model'} has a context of {self.config.block_size}"
            )
        return wanted

    def check_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Raises UsageError if the prompt is empty, does not fit the context, or has tokens that the model does not know."""
        if not prompt_ids:
            raise UsageError("a prompt without any token cannot be continued: give it some text")
        if len(prompt_ids) > self.context_length:
            raise UsageError(
                f"a prompt has {len(prompt_ids)} tokens, but the context holds {self.context_length}: shorten it, or choose "
                "a larger --sequence-length if the model allows it"
            )
        if max(prompt_ids) >= self.config.padded_vocab_size:
            raise UsageError(
                f"a prompt has the token {max(prompt_ids)}, but the model knows {self.config.padded_vocab_size} tokens: the "
                f"tokenizer in {self._directory} belongs to another model"
            )

    def place(self, n_sequences: int, max_length: int, check: Callable[[], None] = lambda: None) -> None:
        """Decide who holds which blocks, by what the nodes measure of themselves; between `open` and `prepare`.

        Blocks given by hand, an even placement and chunks that are there stay as they are, and nothing is measured.

        Args:
            n_sequences: of the run, at the same time.
            max_length: tokens that the longest can reach.
            check: called again and again meanwhile; what it raises ends the waiting.

        Raises:
            PlacementError: the model does not fit; MdiError: a node is not there or cannot measure itself.
        """
        weights, options = self._weights, self._options
        assert weights is not None
        method = options.placement or DEFAULT_METHOD
        is_cut = options.layers is not None or (options.placement is None and weights.is_cut_by_chunks)
        if not self._clients or is_cut or method == "even":
            return
        assert self._listener is not None and self._control is not None
        self._state = "PLANNING"
        here = replace(self.cluster.starter, port=self._control.port, port_in=self._listener.port)
        model = Model(weights.model, weights.config, weights.config_hash, weights.dtype)
        wishes = Wishes(self._device, self._dtype, options.dtype, options.quantize, options.quantize_head)
        profile = profile_cluster(
            replace(self.cluster, starter=here), model, wishes, options.cache_dir, options.wait_s, check=check
        )
        length = min(max_length, self.context_length)
        placement = choose(profile, model, method, n_sequences, length, options.prefer_memory)
        weights.cut_anew(placement.counts)
        nodes = self.cluster.nodes
        self.cluster = ClusterConfig(self.cluster.starter, tuple(nodes[i] for i in placement.order[1:]))
        self._clients = [ControlClient(node) for node in self.cluster.secondaries]
        self._state = "IDLE"

    def prepare(self, max_length: int, check: Callable[[], None] = lambda: None) -> None:
        """Get all nodes ready: weights where they belong, stages built.

        Args:
            max_length: tokens that the longest sequence of the run can reach.
            check: called again and again meanwhile; what it raises ends the waiting.

        Raises:
            MdiError: a node is not there or cannot; those that are have been told that the run is off.
        """
        assert self._weights is not None
        self._state = "LOADING"
        self.max_length = min(max_length, self.context_length)
        self._check_memory()
        setups = self._configure_secondaries()
        try:
            self._load_stage(lambda: self._check(setups, check))
            while not all(setup.wait(0.1) for setup in setups):
                self._check(setups, check)
            self._raise_first(setups)
            self._memory = self._reckon_memory(setups)  # last, when all weights are where they stay
        finally:
            for setup in setups:
                setup.cancel()
        for setup in setups:
            setup.join(1.0)
        self._state = "READY"

    def _reckon_memory(self, setups: Sequence[SecondarySetup]) -> CacheMemory:
        """What the caches of all nodes can hold."""
        assert self._weights is not None
        is_mapped = self._dtype == DTYPES.get(self._weights.dtype)
        by_hand = self._options.kv_memory
        by_hand = self.cluster.starter.kv_memory if by_hand is None else by_hand
        own = report_caches(self._stage, self._kv_dtype, self._device, by_hand, is_mapped)
        reports = [own, *(setup.ask_caches() for setup in setups)]
        told = [(node.name, node.addr, report) for node, report in zip(self.cluster.nodes, reports, strict=True)]
        memory = CacheMemory(share_out(told, self.max_length))
        n_sequences = memory.n_sequences(self.max_length)
        logger.debug("the caches of all nodes hold %s sequences of %d tokens", n_sequences, self.max_length)
        return memory

    def start(self) -> None:
        """Close the ring; from here on sequences can be submitted."""
        n_nodes = self.cluster.n_nodes
        n_frames = self._options.n_frames or n_nodes
        if n_frames != n_nodes:
            logger.info(
                "%d frames in flight over %d nodes (--frames): worth it where a transfer takes longer than a stage's share "
                "of a round", *(n_frames, n_nodes),
            )  # fmt: skip
        if self._listener is None or not self.cluster.secondaries:  # none there, or all left out
            self._ring = LoopbackRing(n_frames)
        else:
            first = self.cluster.secondaries[0]
            wire = self._options.wire_dtype
            seat = Seat(self._epoch, 0, self.names, self._placement, first.addr, first.port_in, wire)
            # The text of a STOP or ERROR has a byte per column, and a narrow model must not refuse it.
            limits = Limits(max_cols=max(self.config.n_embd, HANDSHAKE_LIMITS.max_cols))
            pinned = pinned_buffer if self._device.type == "cuda" else None
            self._ring = close_starter_ring(self._listener, seat, n_frames, limits, allocate=pinned)
        self.engine = StarterEngine(
            self._stage, self._ring, self._epoch, n_nodes, self.max_length, self._device, self._dtype,
            memory=self._memory, n_frames=n_frames, wire=self._options.wire_dtype,
        )  # fmt: skip
        self._state = "RUNNING"
        self._begin = time.perf_counter()

    def submit(
        self, prompt: str, prompt_ids: Sequence[int], params: SamplingParams, stop: Sequence[str] = (),
        on_text: OnText | None = None,
    ) -> Sample:  # fmt: skip
        """Queue a sample; its own generator is seeded by params.seed and its number in this run."""
        self.check_prompt(prompt_ids)
        index = len(self.samples)
        sample = Sample(index, prompt, prompt_ids, self.codec, stop, self._begin, on_text)
        params = replace(
            params,
            seed=seed_of(params.seed, index),
            eos_ids=self.codec.eos_ids,
            stop_sequences=tuple(tuple(s) for s in self.codec.stop_sequences),
        )
        seq_id = self.engine.submit(prompt_ids, params, sample.take)
        sample.cancel = lambda reason: self.engine.cancel(seq_id, reason)
        self.samples.append(sample)
        return sample

    def generate(self) -> None:
        """Run until all submitted samples have ended; RingError if the ring breaks before."""
        try:
            self.engine.run()
        except MdiError:
            raise
        except Exception as e:  # out of memory, say: what the samples have reached is still to be told
            raise EngineError(f"starter failed: {type(e).__name__}: {e}") from e
        finally:
            self._end = time.perf_counter()

    def serve(self) -> None:
        """Run until `engine.close()`, whatever comes in between; a failure is kept for `raise_failure`."""
        try:
            self.engine.run(until_idle=False)
        except MdiError as e:
            self._failure = e

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def raise_failure(self) -> None:
        """Raise what ended `serve`, if it was an error."""
        if self._failure is not None:
            self.mark_broken()
            raise self._failure

    def end(self, leave: bool = False) -> None:
        """End the run on all nodes and collect what they measured; with `leave`, end the secondaries' processes too."""
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.stop("the run is over")
            ring.close()
            self._own = (self.engine.compute_s, ring.inbox.wait_s, ring.send_s, ring.bytes_sent, ring.n_frames)
        if self._configured:
            self._configured = False
            broken = self._state == "BROKEN"
            self.secondary_metrics = [{} for _ in self._clients]
            self._for_each_secondary(lambda i: self._dismiss(i, leave, patient=not broken))
        self._state = "IDLE"

    def close(self) -> None:
        """Give everything back; harmless if repeated."""
        if self._ring is not None or self._configured:
            self._state = "BROKEN"
            self.end()
        if self._control is not None:
            self._control.close()
        if self._listener is not None:
            self._listener.close()
        if self._weights is not None:
            self._weights.close()
        self._control = self._listener = self._weights = None

    def mark_broken(self) -> None:
        """A node was lost: do not wait long for any of them."""
        self._state = "BROKEN"

    def metrics(self) -> RunMetrics:
        """What the run measured, so far or in all."""
        end = self._end or time.perf_counter()
        model = self._weights.model if self._weights else ""
        samples = [sample.metrics() for sample in self.samples]
        return RunMetrics.from_parts(model, samples, self._node_metrics(), max(end - self._begin, 1e-9))

    def status(self, run: str | None) -> dict[str, Any]:
        return {
            "name": self.cluster.starter.name,
            "version": mdi.__version__,
            "control_version": CONTROL_VERSION,
            "state": self._state,
            "clock_s": time.time(),
            "model": self._weights.model if self._weights else None,
            "n_nodes": self.cluster.n_nodes,
            "samples": [{"n_tokens": len(s.token_ids), "finish_reason": s.finish_reason} for s in list(self.samples)],
        }

    def check_echo(self) -> None:
        if self._state == "RUNNING":
            raise ControlError("the starter is in the middle of a run", 409)

    def _configure_secondaries(self) -> list[SecondarySetup]:
        weights = self._weights
        assert weights is not None
        if not self._clients:
            self._placement = ""
            return []
        nodes = self.cluster.nodes
        parts = self._hash_parts(weights)
        identity = [weights.config_hash, weights.blocks, self.names, [[p.sha256 for p in node] for node in parts]]
        self._placement = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
        setups = []
        self._configured = True
        for index, (client, blocks) in enumerate(zip(self._clients, weights.blocks[1:], strict=True), 1):
            following = nodes[(index + 1) % len(nodes)]
            port_in = following.port_in
            if index == len(nodes) - 1:
                assert self._listener is not None
                port_in = self._listener.port
            request = InitRequest(
                epoch=self._run_id,
                index=index,
                names=self.names,
                placement=self._placement,
                next_addr=following.addr,
                next_port=port_in,
                model=weights.model,
                config=weights.config,
                config_hash=weights.config_hash,
                stored_dtype=weights.dtype,
                blocks=blocks,
                parts=tuple(parts[index - 1]),
                max_length=self.max_length,
                dtype=self._options.dtype,
                compile=self._options.compile,
                quantize=self._options.quantize,
                wire_dtype=self._options.wire_dtype,
                kv_dtype=self._options.kv_dtype,
                n_frames=self._options.n_frames,
            )
            setups.append(SecondarySetup(client, request, weights, self._options.wait_s))
        return setups

    @staticmethod
    def _hash_parts(weights: StarterWeights) -> list[list[PartSpec]]:
        """What each secondary needs. Hashes of a checkpoint are computed once and remembered, so this may take a while."""
        parts: list[list[PartSpec]] = []
        next_report = time.monotonic() + 2
        for start, stop in weights.blocks[1:]:
            parts.append([])
            for name in stage_parts(start, stop, starter=False):
                parts[-1].append(weights.spec(name))
                if time.monotonic() > next_report:
                    next_report += 2
                    logger.info(
                        "hashing the model (remembered for the next time): %s of %d blocks", name, weights.n_layer
                    )
        return parts

    def _check_memory(self) -> None:
        """Weights that will not fit are not loaded in the first place. Raises UsageError."""
        weights, options = self._weights, self._options
        assert weights is not None
        start, stop = weights.blocks[0]
        needed = 0
        for names, quantize in (
            (["embedding"], None),
            ([f"block.{i}" for i in range(start, stop)], options.quantize),
            (["head"], options.quantize_head),
        ):
            sizes = [weights.part_bytes(name) for name in names]
            needed += held_bytes(sizes, weights.dtype, self._dtype, quantize)
        free = device_free_bytes(self._device)
        if needed > free:
            kind = options.quantize or str(self._dtype).removeprefix("torch.")
            raise UsageError(
                f"the starter has {size(free)} of memory free, but embedding, head and blocks [{start}, {stop}) take "
                f"{size(needed)} in {kind}: give it fewer blocks (--layers, --placement, more nodes), or use a smaller "
                "format (--quantize, --dtype)"
            )

    def _load_stage(self, check: Callable[[], None]) -> None:
        """Load the starter's own stage; `check` is called before each part, for loading may take long."""
        weights = self._weights
        assert weights is not None
        stop = weights.blocks[0][1]
        self._stage = StarterStage(self.config, stop)
        finish = quantizer(self._options.quantize, self._options.quantize_head)
        parts = stage_parts(0, stop, starter=True)

        def tensors(part: str) -> Mapping[str, torch.Tensor]:
            check()
            return weights.verified_tensors(part)

        self._stage.load(parts, tensors, self._device, self._dtype, finish)
        check_room(self._stage, self.max_length, self._device, self._kv_dtype)
        self._stage.prepare(self.max_length, self._device, self._kv_dtype)
        if self._options.compile:
            self._stage.compile()

    def _check(self, setups: list[SecondarySetup], check: Callable[[], None]) -> None:
        self._raise_first(setups)
        check()

    @staticmethod
    def _raise_first(setups: list[SecondarySetup]) -> None:
        for setup in setups:
            if setup.error is not None:
                raise setup.error

    def _for_each_secondary(self, call: Any) -> None:
        threads = [
            threading.Thread(target=call, args=(i,), name=f"dismiss-{client.node.name}", daemon=True)
            for i, client in enumerate(self._clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(METRICS_DEADLINE_S * 3)

    def _dismiss(self, i: int, leave: bool, patient: bool) -> None:
        """Let secondary `i` go, after it has told what it measured."""
        client = self._clients[i]
        timeout_s = METRICS_DEADLINE_S if patient else 1.5
        try:
            deadline = time.monotonic() + timeout_s
            while patient and time.monotonic() < deadline:
                status = client.status(self._run_id, timeout_s)
                if status["state"] != "RUNNING":
                    self.secondary_metrics[i] = status.get("metrics") or {}
                    break
                threading.Event().wait(0.05)
            if leave or not patient:
                client.stop(self._run_id, leave, timeout_s)
        except ControlError as e:
            logger.debug("dismissing %s: %s", client.node.name, e)

    def _node_metrics(self) -> list[NodeMetrics]:
        if self._weights is None:
            return []
        compute_s, wait_s, send_s, bytes_sent, frames = getattr(self, "_own", (0.0, 0.0, 0.0, 0, 0))
        start, stop = self._weights.blocks[0]
        nodes = [NodeMetrics("starter", (start, stop), peak_rss_bytes(), compute_s, wait_s, send_s, bytes_sent, frames)]
        for name, blocks, measured in zip(
            self.names[1:], self._weights.blocks[1:], self.secondary_metrics or [{}] * len(self._clients), strict=True
        ):
            fields = {"name": name, "layers": list(blocks)}
            try:
                nodes.append(NodeMetrics.from_json({**_ZERO, **measured, **fields}))
            except (ControlError, TypeError) as e:  # a run is not lost for what a node says of it
                logger.warning("the measurements of %s cannot be read: %s", name, e)
                nodes.append(NodeMetrics.from_json({**_ZERO, **fields}))
        return nodes


_ZERO = {"peak_rss_bytes": 0, "compute_s": 0.0, "wait_s": 0.0, "send_s": 0.0, "bytes_sent": 0, "frames": 0}
