"""What a CUDA graph is, on the CPU: the calls of a step, repeated on the same memory, whatever Python would do by now."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mdi.model.decode_graphs import Step


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, found))
        return found


class CallRecorder:
    """As decode_graphs.CudaRecorder: numbers that a call takes from Python stay those of the recording.

    Attributes:
        n_recorded, n_replayed: so far.
    """

    def __init__(self) -> None:
        self.n_recorded = self.n_replayed = 0

    def __call__(self, step: Step) -> Step:
        mode = _Calls()
        with mode:
            step()
        self.n_recorded += 1

        def replay() -> None:
            self.n_replayed += 1
            for func, args, kwargs, recorded in mode.calls:
                found = func(*args, **kwargs)
                for old, new in zip(tree_leaves(recorded), tree_leaves(found), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return replay
