"""Windows of weights of nodes that are given less memory than their blocks take: what each reads for a frame."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from mdi.checkpoint.packing import Packing
from mdi.checkpoint.parts import part_of
from mdi.checkpoint.shapes import BLOCKS, shapes_of
from mdi.errors import LimitError, PlacementError
from mdi.model.plain import ModelConfig, spec_of
from mdi.model.spec import Experts
from mdi.placement.cost import CostModel
from mdi.placement.model import ModelShape, Workload
from mdi.placement.profile import UNLIMITED, ClusterProfile
from mdi.spec.window import WindowMemory, WindowOptions
from mdi.stages.building import PROMPT_ROWS, prompt_rows
from mdi.stages.window_budget import RunMemory, WindowPlan, absorbed_bytes, choose_window, work_bytes
from mdi.stages.window_files import PAGE_BYTES, StoredMatrix, WeightBytes, block_units, expert_units

_NOWHERE = cast(WeightBytes, None)  # the file of units of which only the sizes matter


def matrices_of(
    config: ModelConfig, form: str, start: int, stop: int, is_starter: bool
) -> tuple[dict[str, dict[str, StoredMatrix]], StoredMatrix | None]:
    """Weights of the blocks [start, stop) and, on a starter, the head, as a chunk in this format would have them."""
    packing, at = Packing(form, form), 0
    parts: dict[str, dict[str, StoredMatrix]] = {f"block.{i}": {} for i in range(start, stop)}
    head = None
    for name, shape in shapes_of(config).items():
        if (packed := packing.format_of(name, shape)) is None:
            continue
        stored = StoredMatrix(name, packed, shape[0], shape[1], _NOWHERE, at)
        part = part_of(name)
        if part in parts:
            parts[part][name] = stored
        elif is_starter and not name.startswith(BLOCKS):
            head = stored
        at += -(-stored.n_bytes // PAGE_BYTES) * PAGE_BYTES
    return parts, head


class NodeWindows:
    """The windows of the nodes of a profile that have a limit (`NodeProfile.window_bytes`).

    Args:
        config: of the model in `shape`.
    """

    def __init__(self, config: ModelConfig, shape: ModelShape, profile: ClusterProfile, workload: Workload) -> None:
        self._config, self._shape, self._profile, self._workload = config, shape, profile, workload
        self._spec = spec_of(config)
        self.prompt_rows = prompt_rows(WindowMemory(), self._spec)
        self._plans: dict[tuple[int, int, int], WindowPlan | None] = {}

    @property
    def without_limits(self) -> ClusterProfile:
        """The cluster as if memory limited none of these nodes: windows are fitted into what there is."""
        nodes = tuple(replace(n, memory_bytes=UNLIMITED) if n.window_bytes else n for n in self._profile.nodes)
        return replace(self._profile, nodes=nodes)

    def reads_s(self, i: int, start: int, stop: int, n_rows: int) -> float:
        n_bytes = self.read_bytes(i, start, stop, n_rows)
        return n_bytes / self._profile.nodes[i].disk_read_bytes_s if n_bytes else 0.0

    def read_bytes(self, i: int, start: int, stop: int, n_rows: int) -> int:
        """What node `i` reads for a frame of so many rows, if they choose experts about equally often."""
        plan = self.plan(i, start, stop)
        if plan is None:
            return 0
        chosen = 0.0
        for unit in plan.experts:
            mlp = self._spec.blocks[int(unit.part.removeprefix("block."))].mlp
            assert isinstance(mlp, Experts)
            chosen += unit.n_bytes * (1 - (1 - mlp.n_used / mlp.n) ** n_rows)
        return plan.pass_bytes + int(chosen * (1 - (self.hits(i, plan) or 0.0)))

    def hits(self, i: int, plan: WindowPlan) -> float | None:
        """Share of chosen experts that are in memory; None: experts are not read one by one."""
        if not plan.experts:
            return None
        return self._profile.nodes[i].expert_hits or plan.n_expert_slots / len(plan.experts)

    def plan(self, i: int, start: int, stop: int) -> WindowPlan | None:
        """The window of node `i` for the blocks [start, stop); None: it has all of them in memory.

        Raises:
            PlacementError: its limit is too low for any window, or nobody knows how fast its disk is.
        """
        node = self._profile.nodes[i]
        if not node.window_bytes:
            return None
        if not node.disk_read_bytes_s:
            raise PlacementError(f"{node.name} has a window of weights, and the profile does not say disk_read_bytes_s")
        key = i, start, stop
        if key not in self._plans:
            cost = CostModel(self._profile, self._shape, self._workload)
            caches = int(cost.caches_bytes(start, stop)) // self._workload.n_sequences
            tables = self._shape.table_bytes * self._workload.sequence_length
            n_rows = self._workload.n_sequences
            work = work_bytes(self._spec, PROMPT_ROWS + n_rows, n_rows)
            run = RunMemory(caches + tables, n_rows, work, promised=absorbed_bytes(self._spec.blocks[start:stop]))
            parts, head = matrices_of(self._config, self._shape.format, start, stop, is_starter=i == 0)
            taken = node.process_bytes + self._shape.runtime_bytes
            try:
                options = WindowOptions(memory=node.window_bytes)
                self._plans[key] = choose_window(
                    node.name, options, block_units(parts), head, run, taken, expert_units(parts)
                )
            except LimitError as e:
                raise PlacementError(str(e)) from None
        return self._plans[key]
