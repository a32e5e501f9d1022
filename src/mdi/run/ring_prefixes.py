"""What the nodes of a ring have on their disks of earlier texts: whether this ring may use it, and what its keys depend on."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence

import mdi
from mdi.checkpoint.parts import stage_parts
from mdi.engine.kept_prefixes import KeptFiles, run_pages
from mdi.engine.prefix_tasks import RingPrefixes
from mdi.engine.worker import Backend
from mdi.kernels import LAYOUT_VERSION
from mdi.run.identity import RingArithmetic
from mdi.spec.arithmetic import Arithmetic
from mdi.spec.options import StarterOptions
from mdi.stages.starter_weights import StarterWeights

logger = logging.getLogger("mdi")


class StarterPrefixes:
    """The files of the starter, for all rings of a run."""

    def __init__(self, files: KeptFiles, options: StarterOptions) -> None:
        self._files, self._options = files, options
        self._is_told = False

    def of_ring(
        self,
        weights: StarterWeights,
        stage: Backend,
        names: Sequence[str],
        arithmetics: Sequence[Arithmetic],
        max_length: int,
    ) -> RingPrefixes | None:
        """For a ring of these nodes; None: what was kept could not be used, and nothing is kept.

        Args:
            arithmetics: of its nodes.
            max_length: of the run: positions may be scaled by it.
        """
        options, realm, digests = self._options, self._options.prefix_realm, dict(self._options.prefix_owners)
        now, later = (
            RingArithmetic.of(names, weights.blocks, arithmetics, options.wire_dtype, epoch) for epoch in (0, 1)
        )
        why = (
            "--verify computes rows again, and those of a kept text are not there" if options.verify
            else "the numbers of its nodes are not the same after a restart" if now != later
            else ""
        )  # fmt: skip
        if why:
            if not self._is_told:
                logger.info("no prefixes are kept on disks by this ring: %s", why)
            self._is_told = True
            return None
        first, cache_type = arithmetics[0], stage.caches.cache_type
        known = [
            mdi.__version__, LAYOUT_VERSION, weights.model.config_hash,
            *(weights.spec(part).sha256 for part in stage_parts(0, weights.n_layer, starter=True)), weights.model.dtype,
            first.formats.of_all, cache_type, options.dtype, options.quantize_head, max_length,
            options.wire_dtype if len(names) > 1 else "", now.sha256,
            *((options.parallel.algorithm, options.parallel.reduce_dtype) if weights.is_shared else ()),
        ]  # fmt: skip
        return RingPrefixes(
            lambda task: self._files.answer(task, stage.caches), hashlib.sha256(json.dumps(known).encode()).hexdigest(),
            run_pages(weights.model.spec, cache_type),
            lambda owner: self._files.secrets.owner_folder(realm, f"{digests.get(owner, '')} {owner}"), tuple(digests),
        )  # fmt: skip

    def close(self) -> None:
        self._files.close()
