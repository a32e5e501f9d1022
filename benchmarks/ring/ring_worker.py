"""Our ring as a system: real processes, one per node, that stay up while one case after the other runs.

Options:
    chunks: folder with the chunk of each node, in the weight format that they are to compute with; or
    ckpt: directory of a checkpoint, which a single node brings into a format by itself.
    nodes: length of the ring.
    flags: of starter.py, e.g. ["--quantize", "int8"].
    cores: node i is pinned to cores[i % len(cores)]; null pins nothing.
    threads: of each node.
    max_length: tokens that a sequence may reach.
    texts: that a run has at the same time, at most; without it, any number.
    quota: share of a core that each node gets once it is loaded; null is all of it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, NoReturn

import psutil

from mdi.cli import options_of, parser_of
from mdi.cli import starter as cli_starter
from mdi.cli.session import run_options
from mdi.engine.sequence import SamplingParams
from mdi.host.threads import choose_threads
from mdi.kernels.library import instruction_set
from mdi.run.local import LocalRing
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.spec.options import Options
from peers.protocol import Case, serve
from ring.quota import Quotas


class BenchRing(LocalRing):
    """A local ring whose secondaries have their chunks."""

    chunks: Path | None = None

    def command(self, path: Path, index: int) -> list[str]:
        chunk = [] if self.chunks is None else ["--chunk", str(self.chunks / f"model_secondary{index}.safetensors")]
        return [*super().command(path, index), *chunk]


class RingSystem:
    """See the module."""

    def __init__(self, options: dict[str, Any]) -> None:
        n_nodes, n_threads = options["nodes"], options["threads"]
        self._quotas = Quotas()
        self._node: Run | None = None
        # A ring of one node must not get both cores.
        cores = options["cores"] and options["cores"][: n_nodes * n_threads]
        self._ring = BenchRing(n_nodes, None, n_threads, None, False, False, cores=cores)
        weights = ["--ckpt", options["ckpt"]] if "ckpt" in options else []
        if "chunks" in options:
            self._ring.chunks = Path(options["chunks"])
            weights = ["--chunk", str(self._ring.chunks / "model_starter.safetensors")]
        self._ring.__enter__()
        try:
            self._start(options, weights)
        except BaseException:
            self._ring.__exit__(None, None, None)  # the process ends now, and what it holds with it
            raise

    def _start(self, options: dict[str, Any], weights: list[str]) -> None:
        threads = str(options["threads"])
        # Eight nodes that start at once on two cores take their time.
        flags = [*weights, "--wait", "180", "--prompt-style", "none", "--threads", threads, "--draft", "none"]
        args = parse([*flags, *options["flags"]])
        choose_threads(args.threads, self._ring.cluster.starter.cores)
        self._node = Run(
            GivenNodes(self._ring.cluster, look=self._ring.check),
            run_options(args),
            options["max_length"],
            n_texts=options.get("texts"),
        )
        self._node.open()
        self._begin = time.perf_counter()
        if options.get("quota"):
            for pid in (os.getpid(), *self._ring.pids):
                self._quotas.limit(pid, options["quota"])

    def run(self, case: Case) -> dict[str, Any]:
        node = self._node
        assert node is not None
        params = SamplingParams(n_tokens=case.n_new, temperature=0)
        sent = node.metrics().nodes[0].bytes_sent
        begin = time.perf_counter()
        samples = [node.submit("", case.prompt(i), params) for i in range(case.n_sequences)]
        node.read()
        shift = begin - self._begin
        found: dict[str, Any] = {
            "times_s": [[t - shift for t in sample.token_times_s] for sample in samples],
            "ids": [sample.token_ids for sample in samples],
        }
        if self._ring.pids:
            # Each link carries a row for each position that was computed; the last token of a sequence is not sent.
            rows = case.n_sequences * (case.n_positions - 1)
            found["link_bytes_per_row"] = (node.metrics().nodes[0].bytes_sent - sent) / rows
        return found

    def end(self) -> dict[str, Any]:
        self._quotas.close()
        found: dict[str, Any] = {"kernels": instruction_set()}
        node, self._node = self._node, None
        try:
            if node is not None:
                found["secondaries"] = [
                    {"resident_bytes": psutil.Process(pid).memory_info().rss} for pid in self._ring.pids
                ]
                node.close()
                found["nodes"] = [one.to_json() for one in node.metrics().nodes]
                node.close()
        finally:
            self._ring.__exit__(None, None, None)
        return found


def parse(flags: list[str]) -> Options:
    """The starter's flags; ValueError says which one this version does not know."""

    def refuse(message: str) -> NoReturn:
        raise ValueError(message)

    parser = parser_of(cli_starter)
    parser.error = refuse  # type: ignore[method-assign]
    options: Options = options_of(parser, parser.parse_args(flags))
    return options


if __name__ == "__main__":
    import torch  # which a ring of kernels can do without

    torch.set_grad_enabled(False)
    serve(RingSystem)
