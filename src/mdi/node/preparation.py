"""Prepares a ring for a run: configures every node, sends weights, builds stages."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mdi.config import ClusterConfig
from mdi.control.client import ControlClient
from mdi.control.messages import InitRequest, PartSpec
from mdi.engine.cache_memory import CacheMemory
from mdi.engine.sent_rows import COMPUTE
from mdi.engine.starter_part import StarterFrameStage
from mdi.kernels.kernel_stage import KernelStage
from mdi.machine.computing import Computing
from mdi.node.cache_budget import share_extensions, share_out
from mdi.node.model_family import ModelFamily
from mdi.node.own_stage import OwnStage
from mdi.node.part_sending import Holders
from mdi.node.runs import ring_number_extension
from mdi.node.setup import SecondarySetup
from mdi.node.starter_weights import StarterWeights
from mdi.periodic import Periodic
from mdi.replay_memory import ROW_VALUE_BYTES, most_bytes
from mdi.spec.options import Requested, StarterOptions
from mdi.tracing.recorder import extensions_of
from mdi.window.window_options import extensions_of as window_extensions

if TYPE_CHECKING:
    from mdi.node.torch_stage import TorchStage

logger = logging.getLogger("mdi")


class Preparation:
    """Of one run, by its starter.

    Args:
        family, config: of the model.
        cluster: the nodes that take part; `clients` are its secondaries.
        options: the user's choices; `computing` is what follows from them.
        weights: the weights that the starter loads and sends, and the cut.
        ids: of the run and of the ring, each as 16 hex digits.
        ring_port: the one on which the last secondary connects; None in a ring of one node.
        max_length: tokens that a sequence of the run may reach.
        n_sequences: at the same time, at most.
        before: of the ring before.
        own: the starter's own stage; parts of the last ring's stage are used again if they are the same.
        holders: nodes that may have parts already.
        ring_number: counts the rings of the run, so that nodes know which request is the latest.
        replays: where nodes are to keep the caches of the ring before: by name, what they do with replays (see InitRequest).

    Attributes:
        memory: what the caches of all nodes hold, after `run`.
        ring_ports: by name of each secondary, the ring port that it says it has.
        placement: hash of model, cut and ring; "" in a ring of one node.
        sent_rows: of each secondary that still has the caches of the ring before, how many positions of each text it has
            sent on and can send again.
        parts: the parts that each secondary needs, by its name.
        processes: by name of each secondary that was reached, the number that its process drew.
        arithmetic: by name of each secondary that was asked, which nodes give the same bits as it does.
        failed: name of the node that could not get ready; None if it was none of them.
        has_begun: whether secondaries know the run, so that they must also be told its end.
    """

    memory: CacheMemory  # from the end of `run` on

    def __init__(
        self,
        family: ModelFamily,
        config: Any,
        cluster: ClusterConfig,
        clients: Sequence[ControlClient],
        options: StarterOptions,
        computing: Computing,
        weights: StarterWeights,
        ids: tuple[str, str],
        ring_port: int | None,
        max_length: int,
        n_sequences: int,
        before: Preparation | None,
        own: OwnStage,
        replays: Mapping[str, str] | None = None,
        holders: Holders | None = None,
        ring_number: int = 1,
    ) -> None:
        self._ring_number = ring_number
        self._family = family
        self._config = config
        self._cluster = cluster
        self._clients = clients
        self._options = options
        self._computing = computing
        self._weights = weights
        self._run_id, self._epoch = ids
        self._ring_port = ring_port
        self._max_length = max_length
        self._n_sequences = n_sequences
        self._replays = replays
        self._holders = holders or Holders()
        self.parts: dict[str, tuple[PartSpec, ...]] = {}
        self._known = frozenset(() if before is None else before.processes)
        self.own = own
        self.placement = ""
        self.failed: str | None = None
        self.processes: dict[str, str] = {}
        self.arithmetic: dict[str, str] = {}
        self.sent_rows: dict[str, dict[int, int]] = {}
        self.ring_ports: dict[str, Any] = {}
        self.has_begun = False
        self._has_loaded = False

    def run(self, check: Callable[[], None]) -> None:
        """Do it; `check` is called repeatedly meanwhile; its exceptions end the waiting.

        Raises:
            MdiError: a node is not there or cannot.
        """
        self.own.check_memory(self._weights, self._computing, self._cluster.n_nodes)
        setups = self._configure_secondaries()
        try:
            self.load_stage(lambda: self._check(setups, check))
            while not all(setup.wait(0.1) for setup in setups):
                self._check(setups, check)
            self._raise_first(setups)
            self.ring_ports = {setup.name: setup.ring_port for setup in setups}
            if self._replays is None:
                self.own.loaded.caches.clear()
            self.memory = self._reckon_memory(setups)  # last, when all weights are where they stay
            self.sent_rows = {setup.name: setup.sent_rows for setup in setups if setup.sent_rows is not None}
        finally:
            self.processes = {setup.name: setup.process for setup in setups if setup.process}
            self.arithmetic = {setup.name: setup.arithmetic for setup in setups if setup.arithmetic is not None}
            for setup in setups:
                setup.cancel()
        for setup in setups:
            setup.join(1.0)

    def _configure_secondaries(self) -> list[SecondarySetup]:
        """Begin to set every secondary up."""
        if not self._clients:
            return []
        weights, options, nodes = self._weights, self._options, self._cluster.nodes
        names = tuple(node.name for node in nodes)
        parts = self._hash_parts()
        shares = [self.own.extensions(index) for index in range(1, len(nodes))]
        identity = [weights.config_hash, weights.blocks, names, [[p.sha256 for p in node] for node in parts], shares]
        self.placement = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
        self.parts = {client.node.name: tuple(own) for client, own in zip(self._clients, parts, strict=True)}
        self.has_begun = True
        return [
            SecondarySetup(
                client, self._request(index, names, tuple(parts[index - 1]), shares[index - 1]),
                self.own.weights_of(weights, index), options.wait_s, client.node.name in self._known, self._holders,
            )
            for index, client in enumerate(self._clients, 1)
        ]  # fmt: skip

    def _request(
        self, index: int, names: tuple[str, ...], parts: tuple[PartSpec, ...], share: dict[str, Any]
    ) -> InitRequest:
        """What node `index` of the ring is to do."""
        weights, options, nodes = self._weights, self._options, self._cluster.nodes
        node, following = nodes[index], nodes[(index + 1) % len(nodes)]
        port_in = following.port_in
        if index == len(nodes) - 1:
            assert self._ring_port is not None
            port_in = self._ring_port
        asked = replace(
            Requested.of(options), device=node.device, threads=node.threads, quantize=self._computing.quantize,
            quantize_head=None,
        )  # fmt: skip
        return InitRequest(
            run=self._run_id,
            epoch=self._epoch,
            index=index,
            names=names,
            placement=self.placement,
            next_addr=following.addr,
            next_port=port_in,
            model=weights.model,
            config=weights.config,
            config_hash=weights.config_hash,
            stored_dtype=weights.dtype,
            blocks=weights.blocks[index],
            parts=parts,
            max_length=self._max_length,
            n_sequences=self._n_sequences,
            stored_format=weights.stored_format,
            n_frames=options.n_frames,
            silence_s=options.silence_s,
            hand_over=not (options.fixed or self.own.is_shared),
            keep_caches=self._replays is not None,
            replay=(self._replays or {}).get(node.name, COMPUTE),
            replay_bytes=self._replay_bytes,
            extensions={
                **ring_number_extension(self._ring_number),
                **extensions_of(options.n_spans),
                **window_extensions(options.weight_memory),
                **share_extensions(options.cache_share),
                **share,
            },
            **vars(asked),
        )

    def _hash_parts(self) -> list[list[PartSpec]]:
        """What each secondary needs. Hashes of a checkpoint are computed once and remembered, so this may take a while."""
        weights = self._weights
        parts: list[list[PartSpec]] = []
        report = Periodic()
        for index, blocks in enumerate(weights.blocks[1:], 1):
            parts.append([])
            source = self.own.weights_of(weights, index)
            for name in self.own.parts_of(index, self._cluster.n_nodes, blocks):
                parts[-1].append(source.spec(name))
                if report.is_due():
                    logger.info("hashing the model (stored for the next time): %s of %d blocks", name, weights.n_layer)
        return parts

    def load_stage(self, check: Callable[[], None]) -> None:
        """Have the starter's own stage; `check` is called before each part, for loading may take long."""
        n_nodes = self._cluster.n_nodes
        lengths = self._max_length, self._n_sequences, self._kv_memory
        had = self.loaded
        self.own.load(self._weights, self._computing, n_nodes, *lengths, check)
        self._has_loaded = self.loaded is not had

    @property
    def stage(self) -> StarterFrameStage:
        """The starter's own, loaded, after `run`."""
        return self.own.stage

    @property
    def loaded(self) -> TorchStage | KernelStage | None:
        """The same as a node has it; None before."""
        return self.own.loaded if self.own.is_loaded else None

    def _reckon_memory(self, setups: Sequence[SecondarySetup]) -> CacheMemory:
        """What the caches of all nodes can hold. Where weights were loaded, nodes of that machine have less than they said."""
        computing, nodes = self._computing, self._cluster.nodes
        row_bytes = self._weights.config.get("n_embd", 0) * ROW_VALUE_BYTES
        kept = most_bytes(self._replay_bytes, self._n_sequences, self._max_length, row_bytes) if setups else 0
        own = self.own.grant(computing.device, self._kv_memory, kept)
        is_asked = self._has_loaded or not all(setup.is_ready_at_once for setup in setups)
        reports = [own, *(setup.caches(is_asked) for setup in setups)]
        told = [(node.name, node.addr, report) for node, report in zip(nodes, reports, strict=True)]
        memory = CacheMemory(share_out(told))
        n_sequences = memory.n_sequences(self._max_length)
        logger.debug("the caches of all nodes hold %s sequences of %d tokens", n_sequences, self._max_length)
        return memory

    @property
    def _replay_bytes(self) -> int:
        """What each node may keep of the rows that it has sent."""
        return 0 if self.own.is_shared else self._options.replay_bytes

    @property
    def _kv_memory(self) -> int | None:
        """The user's limit for the starter's own caches; None: the free memory."""
        by_hand = self._options.kv_memory
        return self._cluster.starter.kv_memory if by_hand is None else by_hand

    def _check(self, setups: list[SecondarySetup], check: Callable[[], None]) -> None:
        self._raise_first(setups)
        check()

    def _raise_first(self, setups: list[SecondarySetup]) -> None:
        for setup in setups:
            if setup.error is not None:
                self.failed = setup.name
                raise setup.error
