"""A node's profile: stored measurements, and the memory that is free now."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

import mdi
from mdi.cancel import Cancel, Periodic
from mdi.checkpoint.store import BlockStore
from mdi.control_groups import n_cores
from mdi.errors import CheckpointError, MdiError
from mdi.files import replacing
from mdi.host.resources import cpu_model, device_free_bytes, machine_free_bytes, private_bytes
from mdi.host.threads import computing_threads, n_threads
from mdi.kernels import LAYOUT_VERSION, library
from mdi.kernels.format_maps import shown
from mdi.placement.profile import NodeProfile
from mdi.placement.profiling import ROWS, SPAN_S, Bench, Speeds, Subject
from mdi.spec.cluster import read_json

FILE = "profiles.json"
N_KEPT = 64

logger = logging.getLogger("mdi")


class Profiler:
    """Measures this process' node, one subject at a time, on the thread that calls it.

    Args:
        name: of the node.
        folder: its cache folder, where measurements are kept.
        span_s: how long one thing is measured.
        in_use_bytes: memory of a device that this process holds or was promised, and will not free.
        spare_bytes: memory that is left to other programs.
    """

    def __init__(
        self, name: str, folder: Path, span_s: float = SPAN_S, in_use_bytes: Callable[[str], int] = lambda device: 0,
        spare_bytes: int = 0,
    ) -> None:  # fmt: skip
        self.name = name
        self._folder = folder
        self.span_s = span_s
        self._in_use_bytes, self._spare_bytes = in_use_bytes, spare_bytes
        self._lock = threading.Lock()
        self._progress: dict[str, Any] | None = None
        self._process_bytes = private_bytes()  # before any weights are here

    @property
    def progress(self) -> dict[str, Any] | None:
        """The thing that is measured now, how many things are done, and how many there are; None if nothing is."""
        with self._lock:
            return self._progress

    def held_bytes_of(self, device: str) -> int:
        """Memory that the process has taken since its beginning: mostly weights, which it can free for others."""
        if device.startswith("cuda"):
            import torch

            return int(torch.cuda.memory_allocated(device))
        return max(0, private_bytes() - self._process_bytes)

    def available_bytes(self, device: str) -> int:
        """Memory of a device for weights and caches: free memory, and memory that this process would free."""
        return max(0, device_free_bytes(device) + self.held_bytes_of(device) - self._in_use_bytes(device))

    def offered_bytes(self, device: str) -> int:
        """The part of it that a run may plan with."""
        return max(0, self.available_bytes(device) - self._spare_bytes)

    def profile(
        self,
        subject: Subject,
        store: BlockStore | None,
        fresh: bool = False,
        cancel: Cancel | None = None,
    ) -> NodeProfile:
        """This node's profile for a subject; earlier measurements come from the stored file.

        Args:
            store: parts that are here already.
            fresh: measure again in any case.
            cancel: its end ends the measuring.

        Raises:
            CheckpointError: the model cannot be built, or not even one of its blocks fits.
        """
        with computing_threads(subject.computing.threads):
            key = self._key(subject)
            speeds = None if fresh else self._kept().get(key)
            if speeds is None:
                speeds = self.measure(subject, cancel or Cancel())
                self._keep(key, speeds)
            threads = n_threads()
        process_bytes = 0 if subject.computing.device.startswith("cuda") else self._process_bytes
        return NodeProfile(
            name=self.name,
            device=subject.computing.device,
            n_cores=n_cores(),
            memory_bytes=self.offered_bytes(subject.computing.device) + process_bytes,
            disk_bytes=(store or BlockStore(self._folder)).free_bytes(),
            process_bytes=process_bytes,
            cached_parts=store.parts() if store is not None else (),
            disk_read_bytes_s=speeds.disk_read_bytes_s,
            read_bytes_s=speeds.read_bytes_s,
            block_s=speeds.block_s,
            head_s=speeds.head_s,
            attention_macs_s=speeds.attention_macs_s,
            shared_bytes=machine_free_bytes(subject.computing.device),
            held_bytes=max(
                0, self.held_bytes_of(subject.computing.device) - self._in_use_bytes(subject.computing.device)
            ),
            n_threads=threads,
            computed_by=subject.computing.path,
        )

    def is_kept(self, subject: Subject) -> bool:
        """Whether a profile of this subject needs no measuring."""
        with computing_threads(subject.computing.threads):
            return self._key(subject) in self._kept()

    def measure(self, subject: Subject, cancel: Cancel) -> Speeds:
        report = Periodic()

        def note(what: str, done: int, total: int) -> None:
            cancel.check()
            with self._lock:
                self._progress = {"what": what, "done": done, "total": total}
            if report.is_due():
                logger.info("%s measures %s (%d of %d)", self.name, what, done, total)

        logger.info(
            "%s measures itself: %s in %s",
            self.name,
            subject.config.name or "a model",
            shown(subject.computing.format),
        )
        try:
            return bench_of(subject, self.span_s, note, cancel).run(self._folder, subject.with_head)
        finally:
            with self._lock:
                self._progress = None

    def _key(self, subject: Subject) -> str:
        """Everything that the times depend on; any change invalidates stored measurements."""
        packing = subject.computing.packing
        parts = {
            "version": mdi.__version__,
            "computed by": _computed_by(subject),
            "cpu": cpu_model(),
            "cores": n_cores(),
            "memory": psutil.virtual_memory().total,
            "device": _device_name(subject.computing.device),
            "threads": n_threads(),
            "rows": ROWS,
            "model": subject.config_hash,
            "dtype": subject.computing.dtype,
            "quantize": subject.computing.quantize,
            "packing": packing and [packing.blocks, packing.head, LAYOUT_VERSION],
            "head": [subject.with_head, subject.computing.quantize_head],
        }
        return json.dumps(parts, sort_keys=True)

    def _kept(self) -> dict[str, Speeds]:
        """Entries of the file; a file that is missing or cannot be read is an empty one."""
        path = self._folder / FILE
        with contextlib.suppress(MdiError):
            if path.is_file():
                return {key: speeds for key, value in read_json(path).items() if (speeds := _speeds(value)) is not None}
        return {}

    def _keep(self, key: str, speeds: Speeds) -> None:
        kept = self._kept()
        kept.pop(key, None)
        kept[key] = speeds
        latest = dict(list(kept.items())[-N_KEPT:])
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with replacing(self._folder / FILE) as file:
                file.write(json.dumps({key: asdict(value) for key, value in latest.items()}, indent=1).encode())
        except (CheckpointError, OSError) as e:
            logger.warning("the measurements cannot be stored: %s", e)


def bench_of(
    subject: Subject, span_s: float, progress: Callable[[str, int, int], None], cancel: Cancel | None = None
) -> Bench:
    """The bench for the blocks of a subject, in the kernels or in torch. CheckpointError if the model cannot be built."""
    if subject.computing.packing is not None:
        from mdi.placement.kernel_bench import KernelBench

        return KernelBench(subject, span_s, progress, cancel)
    from mdi.placement.torch_bench import TorchBench

    return TorchBench(subject, span_s, progress, cancel)


def _computed_by(subject: Subject) -> str:
    if subject.computing.packing is not None:
        return f"kernels {LAYOUT_VERSION} {library.instruction_set()}"
    import torch

    return f"torch {torch.__version__}"


def _device_name(device: str) -> str:
    if not device.startswith("cuda"):
        return device
    import torch

    return f"{device} {torch.cuda.get_device_name(device)}"


def _speeds(value: Any) -> Speeds | None:
    """The kept speeds of one subject; None if they make no sense. `NodeProfile` has the checks."""
    blank = {"name": "x", "device": "x", "n_cores": 1, "memory_bytes": 0, "disk_bytes": 0, "process_bytes": 0}
    if not isinstance(value, Mapping):
        return None
    try:
        checked = NodeProfile.from_json({**blank, **value})
    except MdiError:
        return None
    return Speeds(
        checked.disk_read_bytes_s, checked.read_bytes_s, checked.block_s, checked.head_s, checked.attention_macs_s
    )
