"""The named scenarios.

They stand in the order of their weight: where time is short, the last ones are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from peers.protocol import Case
from random_checkpoint import DEEP_CONTEXT
from side_by_side.memory import load_results, secondary_results
from side_by_side.scenario import Check, Run, Scenario, SystemSpec
from side_by_side.setup import CACHE, GGUF_OF, READ, Setup

DECODE = ("decode_tokens_per_s", "decode_tokens_per_s")
DEPTHS = (100, 1000, 4000, 8000)
SET_FORMATS = ("int8", "int4", "bf16")
PREFILL = ("prefill_tokens_per_s", "prefill_tokens_per_s")


def one_stream(name: str, title: str, formats: tuple[tuple[str, bool, bool], ...]) -> Builder:
    """A scenario of formats: of each, whether its share of the read bandwidth is shown, and its ratio to llama.cpp."""

    def build(setup: Setup) -> Scenario:
        case = setup.case(1, 16, 48)
        systems, runs, checks = [setup.read()], [READ], []
        for fmt, has_share, has_peer in formats:
            ours = setup.ring(fmt, cache=CACHE)
            systems.append(ours)
            runs.append(Run(ours.name, ours.name, case))
            if has_share:
                checks.append(Check(f"{fmt}: weight bytes read per second, against what one thread reads on huge pages",
                                    ours.name, (READ.label,), ("decode_tokens_per_s", "read_bytes_per_s"),
                                    factor=setup.weight_bytes(fmt), unit="%"))  # fmt: skip
            if has_peer:
                theirs = setup.llama(fmt)
                systems.append(theirs)
                runs.append(Run(theirs.name, theirs.name, case))
                checks.append(Check(f"{fmt} against llama.cpp {GGUF_OF[fmt]}", ours.name, (theirs.name,)))
        return Scenario(name, title, tuple(systems), tuple(runs), tuple(checks))

    return build


def sixteen(setup: Setup) -> Scenario:
    what = "{} on two nodes of one thread against llama.cpp {} on both cores"
    return _against_llama(setup, "sixteen", "Sixteen sequences: two nodes against llama.cpp with two threads", what,
                          setup.case(16, 16, 32), 2, ("int8", "int4", "bf16"))  # fmt: skip


def prefill(setup: Setup) -> Scenario:
    return _against_llama(setup, "prefill", "A prompt of 512 tokens, one node, one thread", "{} against llama.cpp {}",
                          setup.case(1, 512, 1), 1, ("int8", "int4", "bf16"), PREFILL)  # fmt: skip


def seven_b(setup: Setup) -> Scenario:
    large = setup.large()
    what = "{} on two nodes of one thread against llama.cpp {} on both cores"
    return _against_llama(large, "seven-b", "Eight sequences, 7 B weights: two nodes against llama.cpp with two threads",
                          what, large.case(8, 16, 16), 2, ("int4",))  # fmt: skip


def _against_llama(
    setup: Setup, name: str, title: str, what: str, case: Case, n: int, formats: tuple[str, ...],
    metrics: tuple[str, str] = DECODE,
) -> Scenario:  # fmt: skip
    """A ring of `n` nodes of one thread beside llama.cpp with `n` threads, in several formats."""
    systems, checks = [], []
    for fmt in formats:
        ours = setup.ring(fmt, n, max_length=case.n_positions + 8, cache=CACHE)
        theirs = setup.llama(fmt, n)
        systems += [ours, theirs]
        checks.append(Check(what.format(fmt, GGUF_OF[fmt]), ours.name, (theirs.name,), metrics))
    runs = tuple(Run(s.name, s.name, case) for s in systems)
    return Scenario(name, title, tuple(systems), runs, tuple(checks))


def per_set(name: str, title: str, case: tuple[int, int, int], n: int, metrics: tuple[str, str] = DECODE) -> Builder:
    """A scenario of all instruction sets that have a llama.cpp: a ring of `n` nodes beside `n` threads, format by format.

    Systems of one format are loaded at a time, for memory.
    """

    def build(setup: Setup) -> Scenario:
        made, systems, checks = setup.case(*case), [], []
        for fmt in SET_FORMATS:
            for instructions in setup.llama_libs:
                more = {"cache": CACHE, "instructions": instructions, "group": fmt}
                ours = setup.ring(fmt, n, max_length=made.n_positions + 8, **more)
                theirs = setup.llama(fmt, n, **more)
                systems += [ours, theirs]
                what = f"{fmt}, {instructions} against llama.cpp {GGUF_OF[fmt]}"
                checks.append(Check(what, ours.name, (theirs.name,), metrics))
        runs = tuple(Run(s.name, s.name, made) for s in systems)
        return Scenario(name, title, tuple(systems), runs, tuple(checks), repeats=3)

    return build


def batch(setup: Setup) -> Scenario:
    systems, runs, checks = [], [], []
    for fmt in ("int8", "int4"):
        ours = setup.ring(fmt)
        systems.append(ours)
        runs += [Run(f"{ours.name}, {n} seq", ours.name, setup.case(n, 16, 32)) for n in (1, 16)]
        checks.append(Check(f"{fmt}: sixteen sequences against one", runs[-1].label, (runs[-2].label,)))
    return Scenario("batch", "Sixteen sequences against one, one node", tuple(systems), tuple(runs), tuple(checks))


def depth(setup: Setup) -> Scenario:
    """With the first of the instruction sets that have a llama.cpp, if there are any."""
    deep, n_new, best = setup.deep(), setup.case(1, 1, 32).n_new, next(iter(setup.llama_libs), "")
    systems, runs, checks = [], [], []
    for cache in ("fp16", "int8"):
        pair = (deep.ring("int8", 1, DEEP_CONTEXT, cache=cache, instructions=best),
                deep.llama("int8", cache=cache, instructions=best))  # fmt: skip
        ours, theirs = (replace(spec, name=f"{spec.name}, {cache} caches") for spec in pair)
        systems += [ours, theirs]
        for at in DEPTHS:
            both = [Run(f"{s.name}, at {at}", s.name, Case(1, at - n_new // 2, n_new)) for s in (ours, theirs)]
            runs += both
            what = f"int8 weights, {cache} caches, at {at:,}: against llama.cpp q8_0"
            checks.append(Check(what, both[0].label, (both[1].label,)))
    return Scenario("depth", "One text at several positions, one thread, beside llama.cpp", tuple(systems), tuple(runs),
                    tuple(checks), repeats=1)  # fmt: skip


def ttft(setup: Setup) -> Scenario:
    systems = tuple(setup.ring("int8", nodes, max_length=1032) for nodes in (2, 1))
    runs = tuple(Run(s.name, s.name, setup.case(1, 1024, 1)) for s in systems)
    check = Check("int8: two nodes' time to first token against one node's", runs[0].label, (runs[1].label,),
                  ("ttft_s", "ttft_s"))  # fmt: skip
    return Scenario("ttft", "A prompt of 1,024 tokens: time to first token", systems, runs, (check,))


def threads(setup: Setup) -> Scenario:
    systems = tuple(setup.ring("int4", threads=n) for n in (2, 1))
    runs = tuple(Run(s.name, s.name, setup.case(8, 16, 48)) for s in systems)
    check = Check("int4, eight sequences: two threads against one", runs[0].label, (runs[1].label,))
    return Scenario("threads", "One node: two threads against one", systems, runs, (check,))


def frameworks(setup: Setup) -> Scenario:
    """For the figure; litgpt generates one sequence at a time."""
    systems, runs = [], []
    for kind in ("litgpt", "transformers"):
        for n_threads, n_sequences in ((1, 1), (2, 1 if kind == "litgpt" else 16)):
            system = setup.framework(kind, "bfloat16", n_threads)
            systems.append(system)
            runs.append(Run(f"{system.name}, {n_sequences} seq", system.name, setup.case(n_sequences, 16, 12)))
    return Scenario("frameworks", "litgpt and transformers in bfloat16", tuple(systems), tuple(runs))


def memory(setup: Setup) -> Scenario:
    ours = setup.ring_of_checkpoint("int8")
    case = setup.case(16, 16, 16)
    return Scenario("memory", "Peak memory of one node that loads a bf16 checkpoint as int8", (ours,),
                    (Run(ours.name, ours.name, case),), repeats=1,
                    finish=lambda outcome: load_results(outcome, ours.name, setup.shape, case))  # fmt: skip


def memory_secondary(setup: Setup) -> Scenario:
    ours = setup.ring("int8", 2)
    case = setup.case(16, 16, 32)
    return Scenario("memory-secondary", "Resident memory of a secondary, int8, sixteen sequences", (ours,),
                    (Run(ours.name, ours.name, case),), repeats=1,
                    finish=lambda outcome: secondary_results(outcome, ours.name, setup.shape, case))  # fmt: skip


def ready(setup: Setup) -> Scenario:
    n_layer = setup.n_layer
    chunks = setup.chunks("int8", 2, (0, n_layer))
    system = SystemSpec("a secondary with all blocks", "ready", {"chunk": str(chunks.of("secondary0"))}, setup.cores)
    run = Run(system.name, system.name, Case(0, 0, 0))
    checks = tuple(
        Check(f"/init to READY, {what}", run.label, (), (metric, ""), unit=" s")
        for what, metric in (("hashed", "hashed_ready_s"), ("known by a kept record", "known_ready_s"))
    )
    return Scenario("ready", "A chunk of 1 GB in the page cache: /init to READY", (system,), (run,), checks)


def quotas(setup: Setup) -> Scenario:
    counts = [n for n in (1, 2, 4, 8) if n <= setup.n_layer]
    systems = [setup.ring("int8", nodes, quota=0.2) for nodes in counts]
    runs = [Run(s.name, s.name, setup.case(16 * n, 4, 12)) for n, s in zip(counts, systems, strict=True)]
    checks = [
        Check(f"{n} nodes against one (the cut allows {setup.cut_allows(n):.2f})", runs[i].label, (runs[0].label,))
        for i, n in enumerate(counts)
        if n > 1
    ]  # fmt: skip
    return Scenario("quotas", "Nodes of a fifth of a core each, sixteen sequences per node, int8", tuple(systems),
                    tuple(runs), tuple(checks))  # fmt: skip


def two_nodes(setup: Setup) -> Scenario:
    systems = [setup.ring("int8", nodes) for nodes in (1, 2)]
    runs = [Run(f"{s.name}, {n} seq", s.name, setup.case(n, 16, 32)) for n in (16, 32) for s in systems]
    checks = [
        Check(f"int8, {n} sequences: two nodes against one", f"ring int8 x2, {n} seq", (f"ring int8 x1, {n} seq",))
        for n in (16, 32)
    ]
    return Scenario("two-nodes", "Two nodes against one (one memory)", tuple(systems), tuple(runs), tuple(checks))


Builder = Callable[[Setup], Scenario]

# Scenarios of several instruction sets: they need a llama.cpp for each.
PER_SET: dict[str, Builder] = {
    "sets-one": per_set("sets-one", "Instruction sets: one text, one thread", (1, 16, 48), 1),
    "sets-sixteen": per_set(
        "sets-sixteen", "Instruction sets: 16 texts, two nodes against two threads", (16, 16, 32), 2
    ),
    "sets-prompt": per_set("sets-prompt", "Instruction sets: a prompt of 512, one thread", (1, 512, 1), 1, PREFILL),
}
SCENARIOS: dict[str, Builder] = {
    "one-stream": one_stream("one-stream", "One stream, one node, one thread: 8 and 4 bits",
                             (("int8", True, True), ("int4", True, True))),
    "sixteen": sixteen,
    "one-stream-16": one_stream("one-stream-16", "One stream, one node, one thread: 16 bits",
                                (("bf16", True, True), ("fp16", True, False))),
    "prefill": prefill,
    "batch": batch,
    "threads": threads,
    "ttft": ttft,
    "frameworks": frameworks,
    "quotas": quotas,
    "memory": memory,
    "memory-secondary": memory_secondary,
    "ready": ready,
    "one-stream-32": one_stream("one-stream-32", "One stream, one node, one thread: float32", (("float32", False, True),)),
    "two-nodes": two_nodes,
    "seven-b": seven_b,
    "depth": depth,
    **PER_SET,
}  # fmt: skip
