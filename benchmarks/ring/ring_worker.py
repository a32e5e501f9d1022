"""Our ring as a system: real processes, one per node, that stay up while one case after the other runs.

Options:
    ckpt: directory of the checkpoint.
    nodes: length of the ring.
    flags: of starter.py, e.g. ["--quantize", "int8"].
    cores: node i is pinned to cores[i % len(cores)].
    threads: of each node.
    max_length: tokens that a sequence may reach.
    old_style: one sequence per frame, as the earlier MDI-LLM sent them.
    chunks: secondaries read their chunks in the weight format, not the checkpoint.
    quota: share of a core that each node gets once it is loaded; null is all of it.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

import mdi.node.starter
from mdi import cli_starter
from mdi.checkpoint.chunks import find_chunk
from mdi.engine.scheduler import Scheduler
from mdi.engine.sequence import SamplingParams
from mdi.node.device import set_threads
from mdi.node.local import LocalRing
from mdi.node.starter import StarterNode
from peers.protocol import Case, serve
from ring.quota import Quotas


class BenchRing(LocalRing):
    """A local ring whose processes are known, and whose secondaries may have chunks of their own."""

    chunk_of: Callable[[int], Path] | None = None

    def __enter__(self) -> BenchRing:
        self.pids: list[int] = []
        super().__enter__()
        return self

    def _spawn(self, path: Path, index: int) -> Any:
        if self.chunk_of is not None:
            self._ckpt = self.chunk_of(index)
        child = super()._spawn(path, index)
        self.pids.append(child.pid)
        return child


class RingSystem:
    """See the module."""

    def __init__(self, options: dict[str, Any]) -> None:
        ckpt, n_nodes = Path(options["ckpt"]), options["nodes"]
        if options.get("old_style"):
            mdi.node.starter.Scheduler = partial(Scheduler, decode_rows=1)  # type: ignore
        self._quotas = Quotas()
        self._node: StarterNode | None = None
        # A ring of one node must not get both cores.
        cores = options["cores"][:n_nodes]
        self._ring = BenchRing(n_nodes, None, options["threads"], ckpt, False, False, cores=cores)
        if fmt := options.get("chunks"):
            self._ring.chunk_of = lambda index: find_chunk(ckpt, n_nodes, f"secondary{index}", fmt)
        self._ring.__enter__()
        try:
            self._start(options, ckpt)
        except BaseException:
            self._ring.__exit__(None, None, None)  # the process ends now, and what it holds with it
            raise

    def _start(self, options: dict[str, Any], ckpt: Path) -> None:
        threads = str(options["threads"])
        # Eight nodes that start at once on two cores take their time.
        flags = ["--ckpt", str(ckpt), "--wait", "180", "--prompt-style", "none", "--threads", threads]
        args = parse([*flags, *options["flags"]])
        set_threads(args.threads, self._ring.cluster.starter.cores)
        self._node = StarterNode(self._ring.cluster, cli_starter.starter_options(args))
        self._node.open()
        self._node.prepare(options["max_length"], self._ring.check)
        self._node.start()
        self._begin = time.perf_counter()
        if options.get("quota"):
            for pid in (os.getpid(), *self._ring.pids):
                self._quotas.limit(pid, options["quota"])

    def run(self, case: Case) -> dict[str, Any]:
        node = self._node
        assert node is not None
        params = SamplingParams(n_tokens=case.n_new, temperature=0)
        sent = node._ring.bytes_sent if node._ring is not None else 0
        begin = time.perf_counter()
        samples = [node.submit("", case.prompt(i), params) for i in range(case.n_sequences)]
        node.generate()
        shift = begin - self._begin
        found: dict[str, Any] = {
            "times_s": [[t - shift for t in sample.token_times_s] for sample in samples],
            "ids": [sample.token_ids for sample in samples],
        }
        if self._ring.pids and node._ring is not None:
            # Each link carries a row for each position that was computed; the last token of a sequence is not sent.
            rows = case.n_sequences * (case.n_positions - 1)
            found["link_bytes_per_row"] = (node._ring.bytes_sent - sent) / rows
        return found

    def end(self) -> dict[str, Any]:
        self._quotas.close()
        found: dict[str, Any] = {}
        node, self._node = self._node, None
        try:
            if node is not None:
                node.end()
                found["nodes"] = [one.to_json() for one in node.metrics().nodes]
                node.close()
        finally:
            self._ring.__exit__(None, None, None)
        return found


def parse(flags: list[str]) -> argparse.Namespace:
    """The starter's flags; ValueError says which one this version does not know."""

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ValueError(message)

    parser = Parser(allow_abbrev=False)
    cli_starter.add_arguments(parser)
    return parser.parse_args(flags)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    serve(RingSystem)
