"""The model that a node of a swarm holds blocks of: files on this machine, or what other nodes have told of theirs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from mdi.checkpoint.manifest import config_hash
from mdi.checkpoint.weights import WeightSource
from mdi.control.messages import PartSpec
from mdi.control.swarm import ModelFacts, weights_id
from mdi.errors import CheckpointError, Code, ControlError

# Asks others for the hashes of parts. Raises ControlError.
AskFacts = Callable[[Sequence[str]], ModelFacts]


class SwarmModel:
    """For several threads: others ask for its parts while the node loads some.

    Args:
        facts: of the model, with the hash of its last block.
        source: the whole model on this machine; None: it is not here.

    Attributes:
        weights: see control.swarm.Announced.
    """

    def __init__(self, facts: ModelFacts, source: WeightSource | None = None) -> None:
        if config_hash(facts.model.config) != facts.model.config_hash:
            raise ControlError("a model's config that does not have its hash")
        self.facts = facts
        self._source = source
        self._lock = threading.Lock()
        self._known = {part.name: part for part in facts.parts}
        last = self._known.get(f"block.{self.n_layer - 1}")
        if last is None:
            raise ControlError("a model without the hash of its last block")
        self.weights = weights_id(facts.model, last.sha256)

    @classmethod
    def of(cls, source: WeightSource) -> SwarmModel:
        """Of files on this machine. Raises CheckpointError."""
        last = source.info(f"block.{source.spec.n_layer - 1}")
        parts = (PartSpec(last.name, last.sha256, last.n_bytes),)
        return cls(ModelFacts(source.model_id, parts), source)

    @property
    def n_layer(self) -> int:
        return self.facts.model.spec.n_layer

    @property
    def is_whole(self) -> bool:
        """Whether all of it is on this machine."""
        return self._source is not None

    def parts(self, names: Sequence[str], ask: AskFacts) -> tuple[PartSpec, ...]:
        """Their hashes; those that nobody here knows are asked for. Raises ControlError."""
        lacking = [name for name in names if self._spec(name) is None]
        if lacking:
            told = {part.name: part for part in ask(lacking).parts}
            with self._lock:
                self._known |= {name: told[name] for name in lacking if name in told}
        found = [self._spec(name) for name in names]
        if None in found:
            raise ControlError(f"no node says which weights {names[found.index(None)]} has", code=Code.WEIGHTS)
        return tuple(one for one in found if one is not None)

    def told(self, names: Sequence[str]) -> ModelFacts:
        """The model and these parts, as others are told of them."""
        found = [self._spec(name) for name in names]
        return ModelFacts(self.facts.model, tuple(one for one in found if one is not None))

    def _spec(self, name: str) -> PartSpec | None:
        with self._lock:
            if name not in self._known and self._source is not None:
                try:
                    one = self._source.info(name)
                except CheckpointError:
                    return None
                self._known[name] = PartSpec(one.name, one.sha256, one.n_bytes)
            return self._known.get(name)
