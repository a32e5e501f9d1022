#!/usr/bin/env python3
"""Cycles of the kernels' inner loops on processors that are not here, as llvm-mca's models of their ports predict them.

    benchmarks/cycles.py                       # a Raspberry Pi 4 and 5
    benchmarks/cycles.py --cpu neoverse-n2      # a core with the matrix instructions of i8mm
    benchmarks/cycles.py --cpu znver3 --set avx2
    benchmarks/cycles.py --measure --cpu znver4  # this x86-64 processor: measured beside a model of its kind
    benchmarks/cycles.py --csrc OTHER/csrc     # of other sources

It compiles the kernels of an instruction set, finds the innermost loop of each tile, and asks llvm-mca (19 or newer; Debian:
llvm-19) for its cycles. A table has, for each loop: cycles per line of 64 bytes of weights, products per cycle, those that the
ports allow, the share of these that is reached, and which ports are in the way. The ports' bound is of every set of ports: the
work that only these can do, divided by their number. llvm-mca's own bound, which is printed beside it, is larger: it counts
what one port can do apart from what any can. `stack` is how many loads and stores of the stack there are, for which registers
did not suffice. A model knows no memory and no caches: tokens per second are the smaller of two bounds, what memory can bring
and what the loop can multiply. Everything for a board is predicted, not measured.

ARM code needs a compiler for it, such as Debian's g++-aarch64-linux-gnu.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from mdi.kernels import build  # noqa: E402

PROGRAM = Path(__file__).with_name("cycles.cpp")
# What the names of a model's ports begin with. LLVM gives many cores the ports of another one: cortex-a72 and cortex-a76 have
# those of the A57, and are refused.
MODELS = {
    "cortex-a57": ("aarch64", "A57"), "neoverse-n1": ("aarch64", "N1"), "neoverse-n2": ("aarch64", "N2"),
    "neoverse-v1": ("aarch64", "V1"), "znver3": ("x86_64", "Zn3"),
    "znver4": ("x86_64", "Zn4"), "haswell": ("x86_64", "HW"), "skylake": ("x86_64", "SKL"),
    "sapphirerapids": ("x86_64", "SPR"),
}  # fmt: skip
SETS = {"cortex-a57": "neon", "neoverse-n1": "neon_dot", "neoverse-n2": "neon_i8mm", "neoverse-v1": "neon_i8mm"}
# Products of one instruction.
PRODUCTS = {
    "smull": 8, "smull2": 8, "smlal": 8, "smlal2": 8, "sdot": 16, "usdot": 16, "smmla": 32, "usmmla": 32, "fmla": 4,
    "vpmaddubsw": 32, "vfmadd132ps": 8, "vfmadd213ps": 8, "vfmadd231ps": 8, "vpdpbusd": 32,
}  # fmt: skip
BRANCH = re.compile(r"^\t(?:b\.?\w*|cbn?z|tbn?z|j\w+)\t(?:.*, *)?(\.L\w+)$")
# Instructions of the loops, and how many of each a core begins per cycle: of the A72 and of the N1, whose pipelines for
# vectors are the A76's. From Arm's Software Optimization Guides (Cortex-A72: UAN 0016A); some of the A72's were read in a
# model that cites its guide, not in the guide itself.
GUIDES = [
    ("smull v0.8h, v1.8b, v2.8b", 1, 1), ("smull2 v0.8h, v1.16b, v2.16b", 1, 1), ("smlal v0.8h, v1.8b, v2.8b", 1, 1),
    ("smlal2 v0.8h, v1.16b, v2.16b", 1, 1), ("addp v0.8h, v1.8h, v2.8h", 2, 2), ("saddlp v0.4s, v1.8h", 2, 2),
    ("sadalp v0.4s, v1.8h", 1, 1), ("add v0.4s, v1.4s, v2.4s", 2, 2), ("and v0.16b, v1.16b, v2.16b", 2, 2),
    ("eor v0.16b, v1.16b, v2.16b", 2, 2), ("ushr v0.16b, v1.16b, #4", 1, 1), ("sshll v0.8h, v1.8b, #0", 1, 1),
    ("ldr q0, [x0]", 1, 2), ("fmla v0.4s, v1.4s, v2.4s", 1, 2), ("sdot v0.4s, v1.16b, v2.16b", None, 2),
]  # fmt: skip


@dataclass(frozen=True)
class Board:
    """A computer for which tokens are predicted.

    Attributes:
        model: of its processor's ports.
        ghz, n_cores: of its processor.
        read_gb_s: what programs were seen to read from memory, and who saw it.
        others: published rates of other programs.
    """

    name: str
    model: str
    ghz: float
    n_cores: int
    read_gb_s: float
    source: str
    others: str


BOARDS = [
    Board(
        "Raspberry Pi 4 (Cortex-A72)", "cortex-a57", 1.8, 4, 5.56,
        "5.56 GB/s (STREAM, one core: sci-pi.org.uk/bench/stream.html)",
        "llama.cpp of 2024-03: TinyLlama Q8_0 3 tokens/s, prompts 10 (justine.lol/matmul); distributed-llama: Llama 2 7B "
        "Q40 (4.2 GB) 0.8 tokens/s (its issue 8)",
    ),
    Board(
        "Raspberry Pi 5 (Cortex-A76)", "neoverse-n1", 2.4, 4, 11.4,
        "11.4 GB/s (while distributed-llama decodes: hellomatik.com/research, 2026)",
        "llama.cpp of 2024-03: TinyLlama Q8_0 9 tokens/s, prompts 35 (justine.lol/matmul); distributed-llama 0.7: TinyLlama "
        "Q40 on two boards 15.2 to 16.9 tokens/s (its pull request 64); Llama 2 7B Q40 (4.2 GB) on one 2.3 (its issue 8)",
    ),
]  # fmt: skip
# TinyLlama's shape: weights of its matrices, each read and multiplied once per token; bytes of each with its scales.
N_WEIGHTS = 1_034_000_000
FORMATS = {"int8": 1.03125, "int4": 0.5625, "bf16": 2.0, "float32": 4.0}
READ_SHARE = 0.8  # of the published speed, that decoding is expected to reach
LINE_WEIGHTS = {"float32": 16, "bf16": 32, "fp16": 32, "int8": 64, "int4": 128, "mxfp4": 128}
FORMAT_NAMES = {"0": "float32", "1": "bf16", "2": "fp16", "3": "int8", "4": "int4", "5": "mxfp4"}


@dataclass(frozen=True)
class Loop:
    """The innermost loop of a tile, per iteration.

    Attributes:
        lines: of 64 bytes of weights.
        bound: cycles that the ports need at least.
        mca_bound: the same as llvm-mca counts it.
        in_the_way: the ports that set the bound.
    """

    tile: str
    products: float
    lines: float
    cycles: float
    bound: float
    mca_bound: float
    n_stack: int
    in_the_way: str


def fail(words: str) -> None:
    sys.exit(f"cycles.py: {words}")


def find_mca() -> str:
    for name in ("llvm-mca", *(f"llvm-mca-{n}" for n in range(30, 18, -1))):
        if (path := shutil.which(name)) is None:
            continue
        version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
        found = re.search(r"LLVM version (\d+)", version)
        if found and int(found[1]) >= 19:
            return path
    fail(
        "llvm-mca 19 or newer is not installed (Debian: apt install llvm-19); older ones have one model for most ARM cores"
    )
    raise AssertionError


def ask(mca: str, cpu: str, lines: list[str], n: int = 100) -> dict[str, Any]:
    """What llvm-mca says of `n` iterations of some instructions."""
    command = [mca, f"-mtriple={MODELS[cpu][0]}-linux-gnu", f"-mcpu={cpu}", "-json", f"-iterations={n}"]
    if MODELS[cpu][0] == "aarch64":
        command.append("-mattr=+dotprod,+i8mm")
    done = subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True, check=False)
    if done.returncode:
        fail(done.stderr.strip().splitlines()[-1])
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def check_model(mca: str, cpu: str) -> None:
    """Print whose ports a name stands for; refuse it if they are another core's."""
    if cpu not in MODELS:
        command = [mca, "-mtriple=aarch64-linux-gnu", f"-mcpu={cpu}", "-json"]
        done = subprocess.run(command, input="nop\n", capture_output=True, text=True, check=False)
        ports = json.loads(done.stdout)["TargetInfo"]["Resources"] if done.stdout.startswith("{") else []
        whose = f": its ports are called {ports[0].split('.')[0]}" if ports else ""
        fail(f"{cpu} has no model of its own here{whose}; there are {', '.join(MODELS)}")
    ports = ask(mca, cpu, ["nop"])["TargetInfo"]["Resources"]
    if not ports[0].startswith(MODELS[cpu][1]):
        fail(f"{cpu} stands for another model here: its ports are called {ports[0]}")
    print(f"model {cpu}: ports {', '.join(dict.fromkeys(p.split('.')[0] for p in ports))}")


def check_guides(mca: str, cpu: str) -> None:
    """Print where the model begins other numbers of instructions per cycle than Arm's guides say."""
    column = {"cortex-a57": 1, "neoverse-n1": 2}[cpu]
    n_same = 0
    for row in GUIDES:
        if (guide := row[column]) is None:
            continue
        bound = ask(mca, cpu, [str(row[0])])["CodeRegions"][0]["SummaryView"]["BlockRThroughput"]
        if abs(1 / bound - float(guide)) < 0.01:
            n_same += 1
        else:
            print(f"  {row[0]}: {1 / bound:.2g} per cycle in the model, {guide} in the guide")
    print(f"  {n_same} of {sum(row[column] is not None for row in GUIDES)} instructions as in Arm's guide")


def compiled(csrc: Path, name: str, folder: Path) -> Path:
    """The assembly of an instruction set's kernels."""
    one = next(s for s in build.INSTRUCTION_SETS if s.name == name)
    compiler = "aarch64-linux-gnu-g++" if one.machine == "aarch64" else "g++"
    if shutil.which(compiler) is None:
        fail(f"{compiler} is not installed")
    out = folder / f"{name}.s"
    flags = [*build.COMMON, *build.OPTIMIZED, *one.flags]
    subprocess.run([compiler, *flags, "-S", str(csrc / one.source), "-o", str(out)], check=True)
    return out


def mnemonic(line: str) -> str:
    return line.split("\t")[1] if line.startswith("\t") and "\t" in line[1:] else ""


def functions(path: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    lines: list[str] | None = None
    for line in path.read_text(encoding="utf-8").splitlines():
        if head := re.match(r"^(_Z\w+):", line):
            lines = found[head[1]] = []
        elif line.startswith("\t.size"):
            lines = None
        elif lines is not None:
            lines.append(line)
    return found


def innermost(lines: list[str]) -> list[str]:
    """The instructions of the loop with most products that has no other such loop in it."""
    labels: dict[str, int] = {}
    spans: list[tuple[int, int]] = []
    best: tuple[int, list[str]] = (0, [])
    for end, line in enumerate(lines):
        if label := re.match(r"^(\.L\w+):", line):
            labels[label[1]] = end
        if (jump := BRANCH.match(line)) and (begin := labels.get(jump[1])) is not None:
            body = [one for one in lines[begin + 1 : end + 1] if one.startswith("\t") and not one.startswith("\t.")]
            n = sum(PRODUCTS.get(mnemonic(one), 0) for one in body)
            if n > best[0] and not any(begin < a and b < end for a, b in spans):
                best = n, body
            if n:
                spans.append((begin, end))
    return best[1]


def tile_name(function: str) -> str:
    """`int8, 4 rows` of a mangled name."""
    numbers = re.search(r"_tileI((?:Li\d+E)+)", function)[1]  # type: ignore[index]
    rows, panels, *form = re.findall(r"Li(\d+)E", numbers)
    name = FORMAT_NAMES[form[0]] if form else "int8"
    return f"{name}, {rows} row{'s' * (rows != '1')}" + (f", {panels} panels" if panels != "1" else "")


def groups_of(mca: str, cpu: str, lines: set[str]) -> dict[str, list[tuple[frozenset[str], float]]]:
    """For each instruction: sets of ports any of which can do a part of it, and the cycles that this part takes."""
    each = sorted(lines)
    begin, end = "# LLVM-MCA-BEGIN\n", "\n# LLVM-MCA-END"
    answer = ask(mca, cpu, [begin + line + end for line in each])
    ports = answer["TargetInfo"]["Resources"]
    found = {}
    for line, region in zip(each, answer["CodeRegions"], strict=True):
        used: dict[str, dict[str, float]] = {}
        for one in region["ResourcePressureView"]["ResourcePressureInfo"]:
            if one["InstructionIndex"] == 0:
                port = ports[one["ResourceIndex"]]
                used.setdefault(kind_of(port), {})[port] = one["ResourceUsage"]
        found[line] = [(frozenset(of_kind), sum(of_kind.values())) for of_kind in used.values()]
    return found


def kind_of(port: str) -> str:
    """V of the ports for vectors, which the A57's model calls W and X; L, S and so on of the others."""
    letter = port.split("Unit")[1][0]
    return {"W": "V", "X": "V"}.get(letter, letter)


def port_bound(groups: list[tuple[frozenset[str], float]]) -> tuple[float, str]:
    """The fewest cycles that ports allow: of every set of ports, the work that only these can do, divided by their number."""
    work: dict[frozenset[str], float] = {}
    for ports, cycles in groups:
        work[ports] = work.get(ports, 0.0) + cycles
    best = (0.0, "-")
    for n in range(1, len(work) + 1):
        for chosen in itertools.combinations(work, n):
            together = frozenset().union(*chosen)
            if len({kind_of(port) for port in together}) == 1:
                cycles = sum(c for ports, c in work.items() if ports <= together) / len(together)
                names = sorted({port.split("Unit")[1].split(".")[0] for port in together})
                best = max(best, (cycles, "+".join(names)))
    return best


def loops_of(mca: str, cpu: str, path: Path) -> dict[str, Loop]:
    bodies = {}
    for name, lines in functions(path).items():
        if re.search(r"(float|int8|half|byte)_tileI", name) and (body := innermost(lines)):
            bodies[name] = body
    is_arm = MODELS[cpu][0] == "aarch64"  # the names of x86-64's ports do not say which are alike
    groups = groups_of(mca, cpu, {line for body in bodies.values() for line in body}) if is_arm else {}
    found: dict[str, Loop] = {}
    for name, body in bodies.items():
        tile = tile_name(name)
        form, n_rows = tile.split(", ")[0], int(tile.split(", ")[1].split()[0])
        summary = ask(mca, cpu, body)["CodeRegions"][0]["SummaryView"]
        products = sum(PRODUCTS.get(mnemonic(one), 0) for one in body) * 1.0
        if any(mnemonic(one) in ("smmla", "usmmla") for one in body):
            products *= n_rows / (n_rows + n_rows % 2)  # they multiply two rows; an odd one is multiplied twice
        stack = sum(bool(re.search(r"(\[sp|\(%rsp|\(%rbp).*", one)) and mnemonic(one)[0] in "lsv" for one in body)
        cycles, mca_bound = summary["TotalCycles"] / 100, summary["BlockRThroughput"]
        bound, ports = port_bound([one for line in body for one in groups[line]]) if is_arm else (mca_bound, "-")
        dispatch = summary["TotaluOps"] / 100 / summary["DispatchWidth"]
        if dispatch > bound:
            bound, ports = dispatch, "dispatch"
        loop = Loop(tile, products, products / n_rows / LINE_WEIGHTS[form], cycles, bound, mca_bound, stack, ports)
        if tile not in found or loop.products / loop.cycles > found[tile].products / found[tile].cycles:
            found[tile] = loop
    return found


def show(loops: dict[str, Loop]) -> None:
    heads = f"{'cycles/line':>11} {'products/cycle':>14} {'ports allow':>11} {'share':>5} {'llvm-mca':>8} {'stack':>5}  ports"
    print(f"  {'tile':24} {heads}")
    for tile in sorted(loops):
        one = loops[tile]
        print(
            f"  {tile:24} {one.cycles / one.lines:11.2f} {one.products / one.cycles:14.2f} {one.products / one.bound:11.2f} "
            f"{one.bound / one.cycles:5.2f} {one.products / one.mca_bound:8.2f} {one.n_stack:5}  {one.in_the_way}"
        )


def predict(board: Board, loops: dict[str, Loop]) -> None:
    print(f"{board.name}: {board.n_cores} cores of {board.ghz} GHz; reads {board.source}")
    print("  TinyLlama's shape, *predicted* tokens/s: one text, then a prompt or many texts")
    for form, n_bytes in FORMATS.items():
        one = max(
            (loop.products / loop.cycles for t, loop in loops.items() if t.startswith(f"{form}, 1 row")), default=0.0
        )
        many = max((loop.products / loop.cycles for t, loop in loops.items() if t.startswith(f"{form}, ")), default=0.0)
        memory = board.read_gb_s * READ_SHARE * 1e9 / (n_bytes * N_WEIGHTS)
        rate = board.ghz * 1e9 * board.n_cores / N_WEIGHTS
        binds = "memory" if memory < one * rate else "the loop"
        print(
            f"  {form:8} {min(memory, one * rate):6.1f} ({binds} binds: {memory:.1f}, {one * rate:.1f})   {many * rate:6.1f}"
        )
    print(f"  published: {board.others}")


def measure(csrc: Path, folder: Path, name: str, loops: dict[str, Loop]) -> None:
    """Run the same tiles here, from the second cache, and print their products per cycle beside the model's."""
    one = next(s for s in build.INSTRUCTION_SETS if s.name == name)
    program = folder / "cycles"
    flags = [*build.COMMON, *build.OPTIMIZED, *one.flags, f'-DMDI_VECTORS="vec_{name}.h"', f"-I{csrc}"]
    subprocess.run(["g++", *flags, str(PROGRAM), "-o", str(program)], check=True)
    print("  measured here, from the second cache, and the model's share of error")
    for line in subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.splitlines():
        form, rows, rate = line.split()
        n_panels = {"1": 4, "2": 2}.get(rows, 1) if form in ("bf16", "float32") else 1  # as float_panels has it
        tile = f"{form}, {rows} row{'s' * (rows != '1')}" + (f", {n_panels} panels" if n_panels > 1 else "")
        if (loop := loops.get(tile)) is not None:
            model = loop.products / loop.cycles
            print(f"  {tile:24} {float(rate):6.2f} measured, {model:6.2f} predicted ({model / float(rate) - 1:+.0%})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="append", help=f"a model: {', '.join(MODELS)} (of the boards)")
    parser.add_argument("--set", help="instruction set of the kernels (neon, neon_dot, or avx2)")
    parser.add_argument("--csrc", type=Path, default=build.CSRC, help="sources of the kernels (the project's)")
    parser.add_argument("--measure", action="store_true", help="run avx2's tiles here as well, and compare")
    args = parser.parse_args()
    mca = find_mca()
    if args.measure and not args.cpu:
        fail("--measure needs the model that comes nearest to this processor: --cpu")
    cpus = args.cpu or [board.model for board in BOARDS]
    with tempfile.TemporaryDirectory() as folder:
        for cpu in cpus:
            check_model(mca, cpu)
            if cpu in ("cortex-a57", "neoverse-n1"):
                check_guides(mca, cpu)
            name = args.set or SETS.get(cpu, "avx2")
            loops = loops_of(mca, cpu, compiled(args.csrc, name, Path(folder)))
            print(f"{name}, innermost loop of each tile:")
            show(loops)
            for board in BOARDS:
                if board.model == cpu:
                    predict(board, loops)
            if args.measure:
                measure(args.csrc, Path(folder), name, loops)


if __name__ == "__main__":
    main()
