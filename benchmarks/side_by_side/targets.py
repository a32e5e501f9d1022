"""The named scenarios, one for each thing that the ring is to reach, and what it is to reach there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.protocol import Case
from random_checkpoint import CONTEXT, n_weights
from side_by_side.memory import memory_results
from side_by_side.scenario import Check, Run, Scenario, SystemSpec

FLAGS = {
    "float32": ["--dtype", "float32"],
    "bfloat16": ["--dtype", "bfloat16"],
    "fp16": ["--quantize", "fp16"],
    "int8": ["--quantize", "int8"],
    "int4": ["--quantize", "int4"],
}
# What is read of a weight at least; scales are left out, so that a share of the bandwidth is not flattered by them.
BYTES_PER_WEIGHT = {"float32": 4.0, "bfloat16": 2.0, "fp16": 2.0, "int8": 1.0, "int4": 0.5}
GGUF_OF = {"float32": ("f32",), "bfloat16": ("bf16",), "fp16": ("bf16", "f16"), "int8": ("q8_0",), "int4": ("q4_0",)}
READS = {False: Run("read test", "read", Case(0, 0, 0)), True: Run("read test, huge pages", "read huge", Case(0, 0, 0))}


@dataclass
class Setup:
    """What the scenarios are made for.

    Attributes:
        cores: node i of a ring gets core i modulo their number; a peer of one thread the first.
        brevity: new tokens are divided by it.
    """

    shape: str
    ckpt: Path
    gguf_folder: Path
    cores: tuple[int, ...]
    brevity: int = 1
    files: dict[str, Path] = field(default_factory=dict)

    def case(self, n_sequences: int, n_prompt: int, n_new: int) -> Case:
        return Case(n_sequences, n_prompt, n_new if n_new == 1 else max(4, n_new // self.brevity))

    def ring(
        self, fmt: str, nodes: int = 1, max_length: int = 128, flags: tuple[str, ...] = (), **more: Any
    ) -> SystemSpec:
        name = f"ring {fmt} x{nodes}" + (" old style" if more.get("old_style") else "")
        options = {"ckpt": str(self.ckpt), "nodes": nodes, "flags": [*FLAGS[fmt], *flags], "cores": list(self.cores),
                   "threads": 1, "max_length": max_length, **more}  # fmt: skip
        return SystemSpec(name, "ring", options, self.cores)  # it pins its nodes itself

    def llama(self, kind: str, threads: int = 1) -> SystemSpec:
        self.files[kind] = self.gguf_folder / f"{self.shape}-{kind}.gguf"
        options = {"gguf": str(self.files[kind]), "threads": threads}
        return SystemSpec(f"llama.cpp {kind} x{threads}", "llama.cpp", options, self.cores[:threads])

    def framework(self, kind: str, dtype: str, max_length: int = 128) -> SystemSpec:
        options = {"ckpt": str(self.ckpt), "dtype": dtype, "max_length": max_length}
        return SystemSpec(f"{kind} {dtype}", kind, options, self.cores[:1])

    def read(self, huge_pages: bool) -> SystemSpec:
        return SystemSpec(READS[huge_pages].system, "read", {"huge_pages": huge_pages}, self.cores[:1])

    def weight_bytes(self, fmt: str) -> float:
        return sum(n_weights(self.shape)) * BYTES_PER_WEIGHT[fmt]


def one_stream(setup: Setup) -> Scenario:
    case = setup.case(1, 16, 40)
    systems, runs, checks = [setup.read(huge) for huge in READS], list(READS.values()), []
    for fmt, share, ratio in (("fp16", 0.85, 1.0), ("int8", 0.70, 1.1), ("int4", 0.60, 0.9)):
        ours, theirs = setup.ring(fmt), [setup.llama(kind) for kind in GGUF_OF[fmt]]
        systems += [ours, *theirs]
        runs += [Run(spec.name, spec.name, case) for spec in (ours, *theirs)]
        names = tuple(spec.name for spec in theirs)
        for huge, read in READS.items():
            what = f"{fmt}: weight bytes read per second, against the read bandwidth of one thread"
            checks.append(Check(what + (" on huge pages" if huge else ""), ours.name, (read.label,), share,
                                ("decode_tokens_per_s", "read_bytes_per_s"), factor=setup.weight_bytes(fmt),
                                unit="%"))  # fmt: skip
        checks.append(Check(f"{fmt} against llama.cpp {' or '.join(GGUF_OF[fmt])}", ours.name, names, ratio))
    return Scenario("one-stream", "One stream, one node, one thread", tuple(systems), tuple(runs), tuple(checks))


def batch(setup: Setup) -> Scenario:
    systems, runs, checks = [], [], []
    for fmt, target in (("fp16", 2.5), ("int8", 5.0), ("int4", 2.0)):
        ours = setup.ring(fmt)
        systems.append(ours)
        runs += [Run(f"{ours.name}, {n} seq", ours.name, setup.case(n, 16, 40)) for n in (1, 8)]
        checks.append(Check(f"{fmt}: eight sequences against one", runs[-1].label, (runs[-2].label,), target))
    return Scenario("batch", "Eight sequences against one, one node", tuple(systems), tuple(runs), tuple(checks))


def two_nodes(setup: Setup) -> Scenario:
    systems = [setup.ring("int8", nodes) for nodes in (1, 2)]
    runs = [Run(f"{s.name}, {n} seq", s.name, setup.case(n, 16, 48)) for n in (16, 32) for s in systems]
    checks = [
        Check(
            f"int8, {n} sequences: two nodes against one", f"ring int8 x2, {n} seq", (f"ring int8 x1, {n} seq",), target
        )
        for n, target in ((16, 1.35), (32, 1.5))
    ]
    return Scenario("two-nodes", "Two nodes against one (one memory)", tuple(systems), tuple(runs), tuple(checks))


def quota_scaling(setup: Setup) -> Scenario:
    counts = (1, 2, 4, 8)
    systems = [setup.ring("int8", nodes, quota=0.2) for nodes in counts]
    runs = [Run(s.name, s.name, setup.case(16 * n, 4, 12)) for n, s in zip(counts, systems, strict=True)]
    checks = [
        Check(f"{n} nodes against one", runs[i].label, (runs[0].label,), 0.93 * n)
        for i, n in enumerate(counts)
        if n > 1
    ]
    return Scenario("quota-scaling", "Nodes of a fifth of a core each, sixteen sequences per node, int8", tuple(systems),
                    tuple(runs), tuple(checks), repeats=3)  # fmt: skip


def old_style(setup: Setup) -> Scenario:
    ours, old = setup.ring("int8", 2), setup.ring("float32", 2, old_style=True)
    runs = (Run(ours.name, ours.name, setup.case(16, 8, 32)), Run(old.name, old.name, setup.case(16, 8, 6)))
    what = "sixteen sequences, int8, against one float32 sequence per frame, two in flight"
    return Scenario("old-style", "Two nodes: frames of many sequences in int8 against one float32 sequence per frame",
                    (ours, old), runs, (Check(what, ours.name, (old.name,), 20.0),), repeats=3)  # fmt: skip


def vs_llama_cpp_16(setup: Setup) -> Scenario:
    ours, theirs = setup.ring("int8", 2), setup.llama("q8_0", 2)
    runs = tuple(Run(s.name, s.name, setup.case(16, 16, 48)) for s in (ours, theirs))
    what = "int8 on two nodes of one thread against llama.cpp q8_0 on both cores"
    return Scenario("vs-llamacpp-16", "Sixteen sequences: two nodes against llama.cpp with two threads", (ours, theirs),
                    runs, (Check(what, ours.name, (theirs.name,), 1.8),), files=dict(setup.files))  # fmt: skip


def prefill(setup: Setup) -> Scenario:
    ours, theirs = setup.ring("int8", max_length=520), setup.llama("q8_0")
    runs = tuple(Run(s.name, s.name, setup.case(1, 512, 1)) for s in (ours, theirs))
    metrics = ("prefill_tokens_per_s", "prefill_tokens_per_s")
    check = Check("int8 against llama.cpp q8_0", ours.name, (theirs.name,), 1.5, metrics)
    return Scenario("prefill", "A prompt of 512 tokens, one node, one thread", (ours, theirs), runs, (check,))


def ttft(setup: Setup) -> Scenario:
    systems = tuple(setup.ring("int8", nodes, max_length=1032) for nodes in (2, 1))
    runs = tuple(Run(s.name, s.name, setup.case(1, 1024, 1)) for s in systems)
    check = Check("int8: two nodes' time to first token against one node's", runs[0].label, (runs[1].label,), 0.6,
                  ("ttft_s", "ttft_s"), at_least=False)  # fmt: skip
    return Scenario("ttft", "A prompt of 1,024 tokens: time to first token", systems, runs, (check,))


def long_position(setup: Setup) -> Scenario:
    n_new = setup.case(1, 1, 32).n_new
    ours = setup.ring("int8", 1, CONTEXT, ("--block-size", str(CONTEXT), "--kv-dtype", "bf16"))
    runs = tuple(Run(f"{ours.name} at position {at}", ours.name, Case(1, at - n_new // 2, n_new)) for at in (2000, 100))
    check = Check("speed at position 2,000 against position 100", runs[0].label, (runs[1].label,), 0.75)
    return Scenario("long-position", "Decoding far into a text, one stream, bf16 caches", (ours,), runs, (check,))


def memory(setup: Setup) -> Scenario:
    # A folder of its own, so that other scenarios' rings do not find the chunks.
    ours = setup.ring("int8", 2, chunks="int8", ckpt=str(setup.ckpt.with_name(f"{setup.shape}-int8")))
    runs = (Run(ours.name, ours.name, setup.case(16, 16, 64)),)
    return Scenario("memory", "Peak memory of a secondary, int8, sixteen sequences", (ours,), runs, repeats=1,
                    finish=lambda outcome: memory_results(outcome, ours.name, setup.shape, runs[0].case))  # fmt: skip


def frameworks(dtype: str) -> Callable[[Setup], Scenario]:
    def build(setup: Setup) -> Scenario:
        peers = [
            setup.framework("litgpt", dtype),
            setup.framework("transformers", dtype),
            setup.llama(GGUF_OF[dtype][0]),
        ]
        systems = [setup.ring(dtype), *peers]
        runs = tuple(Run(s.name, s.name, setup.case(1, 16, 12)) for s in systems)
        return Scenario(
            dtype, f"One stream, one thread, {dtype}", tuple(systems), runs, files=dict(setup.files), repeats=3
        )

    return build


def grid(setup: Setup, nodes: list[int], sequences: list[int], fmt: str, prompts: list[int], n_new: int) -> Scenario:
    """Every combination for one weight format, without targets."""
    systems = [setup.ring(fmt, n, max_length=max(prompts) + n_new + 1) for n in nodes]
    runs = [
        Run(f"{s.name}, {n} seq, prompt {p}", s.name, setup.case(n, p, n_new))
        for s in systems for n in sequences for p in prompts
    ]  # fmt: skip
    return Scenario(f"grid-{fmt}", f"Nodes x sequences x prompts, {fmt}", tuple(systems), tuple(runs), repeats=3)


SCENARIOS: dict[str, Callable[[Setup], Scenario]] = {
    "one-stream": one_stream,
    "batch": batch,
    "two-nodes": two_nodes,
    "quota-scaling": quota_scaling,
    "old-style": old_style,
    "vs-llamacpp-16": vs_llama_cpp_16,
    "prefill": prefill,
    "ttft": ttft,
    "long-position": long_position,
    "memory": memory,
    "float32": frameworks("float32"),
    "bfloat16": frameworks("bfloat16"),
}
