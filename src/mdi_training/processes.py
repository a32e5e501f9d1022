"""The processes that train one model together, started by torchrun: this one's rank, and their communication.

Data-parallel: each has all weights and takes its share of every step's windows; gradients are averaged
(torch's DistributedDataParallel). One process alone needs none of it and gets the same class.
"""

from __future__ import annotations

import gc
import inspect
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from mdi.errors import Code, UsageError

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# A process that waits longer than this counts the others as dead. Writing a large checkpoint takes minutes.
TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class Processes:
    """Attributes:
    rank: of this process, from 0.
    count: of all processes.
    local_rank: of this process among those on its machine.
    local_count: of the processes on its machine.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    local_count: int = 1

    @classmethod
    def from_environment(cls) -> Processes:
        """As torchrun says; one process alone if there is no torchrun.

        Raises:
            UsageError: the variables exist but contradict each other.
        """
        if "WORLD_SIZE" not in os.environ:
            return cls()
        try:
            rank, count, local_rank, local_count = (int(os.environ[name]) for name in VARIABLES)
        except (KeyError, ValueError) as err:
            raise UsageError(
                f"torchrun's variables {', '.join(VARIABLES)} are not whole ({err})", code=Code.ENVIRONMENT
            ) from None
        if not (0 <= rank < count and 0 <= local_rank < local_count <= count):
            raise UsageError(
                f"torchrun's variables contradict each other: rank {rank} of {count}, {local_rank} of {local_count}",
                code=Code.ENVIRONMENT,
            )
        return cls(rank, count, local_rank, local_count)

    @property
    def is_first(self) -> bool:
        """Whether this is the one that prints and writes."""
        return self.rank == 0

    def device_for(self, name: str) -> str:
        """This process' own device: cuda becomes cuda:<local rank>.

        Raises:
            UsageError: there are fewer GPUs than processes, or one device was named for all of them.
        """
        if self.count == 1 or name == "cpu":
            return name
        if name != "cuda":
            raise UsageError(
                f"--device {name}: several processes can share the cpu or take a GPU each (cuda)", code=Code.DEVICE
            )
        n_gpus = torch.cuda.device_count()
        if self.local_count > n_gpus:
            raise UsageError(
                f"{self.local_count} processes, but this machine has {n_gpus} GPUs; use --device cpu", code=Code.DEVICE
            )
        return f"cuda:{self.local_rank}"

    def share(self, n_parts: int) -> range:
        """This process's parts of a step of so many equal parts."""
        return range(self.rank, n_parts, self.count)

    def sums(self, values: list[float], device: torch.device) -> list[float]:
        """Each value added up over the processes; the same result in all of them."""
        if self.count == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=device)
        distributed.all_reduce(total)
        result: list[float] = total.tolist()
        return result

    def wrap(self, forward: Any) -> Any:
        """The model as one that averages its gradients over the processes.

        It expects a gradient for each weight; litgpt calls experts that no token chose too, with no rows.
        """
        if self.count == 1:
            return forward
        # litgpt's buffers (RoPE tables) are the same everywhere, there is nothing to send; newer torch has a newer name.
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        options: dict[str, Any] = {name: False}
        return DistributedDataParallel(forward, **options)

    def unwrapped(self, forward: Any) -> Any:
        """The model inside, for passes that are not as many in each process."""
        return forward.module if isinstance(forward, DistributedDataParallel) else forward

    def gathering(self, forward: Any, *, is_last: bool) -> AbstractContextManager[object]:
        """Around a backward pass: gradients travel only with the last pass of a step."""
        if is_last or not isinstance(forward, DistributedDataParallel):
            return nullcontext()
        context: AbstractContextManager[object] = forward.no_sync()
        return context


@contextmanager
def joined(processes: Processes, device: str) -> Iterator[None]:
    """Connects the processes, and takes the connection down again.

    The body must not leave the wrapped model to a caller: it holds on to the connection, whose threads would then be cut off
    by the end of the interpreter ("terminate called without an active exception", now and then).
    """
    if processes.count == 1:
        yield
        return
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo", timeout=TIMEOUT)
    try:
        yield
    finally:
        gc.collect()  # DistributedDataParallel refers to itself
        distributed.destroy_process_group()
