"""Predicts what computes the blocks on each node, if a profile is used for another model or format than its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mdi.config import DTYPES
from mdi.machine.device import why_not_kernels
from mdi.partition.profile import ClusterProfile, NodeProfile


def with_paths(profile: ClusterProfile, config: Mapping[str, Any], config_hash: str, form: str) -> ClusterProfile:
    """The profile with `computed_by` for this model, as far as it is known.

    Args:
        config: litgpt's Config as a plain dict; `config_hash` is its hash.
        form: format of the blocks.
    """

    def path(node: NodeProfile) -> str:
        reason = why_not_kernels(config, node.device, form if form in DTYPES else None)
        is_torch = node.computed_by.startswith("torch")
        if reason is not None:
            return node.computed_by if is_torch else f"torch: {reason}"
        return "" if is_torch and profile.config_hash != config_hash else node.computed_by

    return replace(profile, nodes=tuple(replace(node, computed_by=path(node)) for node in profile.nodes))
