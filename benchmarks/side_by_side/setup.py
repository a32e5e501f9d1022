"""What scenarios are built from: systems by name, the cases that they run, and the files that they need."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mdi.block_ranges import default_split
from mdi.kernels.library import FORCED
from mdi.kernels.weight_formats import LAYOUTS, OWN_FORMAT
from mdi.model.plain import ModelConfig, spec_of
from peers.protocol import Case
from random_checkpoint import DEEP, DTYPE, SHAPES, config_of, n_weights
from side_by_side.files import Checkpoint, Chunks, Gguf, Need
from side_by_side.scenario import Run, SystemSpec

GGUF_OF = {"float32": "f32", "bf16": "bf16", "fp16": "f16", "int8": "q8_0", "int4": "q4_0"}
CACHE = "fp16"  # what caches hold on both sides of a comparison
LLAMA_CACHE_OF = {"float32": "f32", "bf16": "bf16", "fp16": "f16", "int8": "q8_0"}  # by the ring's --kv-dtype
READ = Run("read test, huge pages", "read test", Case(0, 0, 0))
LARGE = {"tiny-llama-1.1b": "llama-2-7b"}  # the large shape beside a shape; a tiny one beside the others


def _of_set(instructions: str) -> str:
    return f", {instructions}" if instructions else ""


@dataclass
class Setup:
    """What the scenarios are made for.

    Attributes:
        work: folder of checkpoints and GGUF files.
        cores: node i of a ring gets core i modulo their number; a peer of one thread the first.
        brevity: new tokens are divided by it.
        llama_libs: folder of a libllama.so by the instruction set that it was built for.
        needs: files that the scenarios built so far ask for, in this order.
    """

    shape: str
    work: Path
    cores: tuple[int, ...]
    brevity: int = 1
    llama_libs: dict[str, Path] = field(default_factory=dict)
    needs: dict[Need, None] = field(default_factory=dict)

    @property
    def ckpt(self) -> Path:
        return self.work / self.shape

    @property
    def n_layer(self) -> int:
        return int(SHAPES[self.shape]["n_layer"])

    def large(self) -> Setup:
        """The same for the large shape, with the same needs."""
        return Setup(LARGE.get(self.shape, "tiny-3m"), self.work, self.cores, self.brevity, self.llama_libs,
                     self.needs)  # fmt: skip

    def deep(self) -> Setup:
        """The same for the shape's variant with a long context, with the same needs; of tiny-1m where there is none."""
        shape = self.shape + DEEP if self.shape + DEEP in SHAPES else "tiny-1m" + DEEP
        return Setup(shape, self.work, self.cores, self.brevity, self.llama_libs, self.needs)

    def case(self, n_sequences: int, n_prompt: int, n_new: int) -> Case:
        return Case(n_sequences, n_prompt, n_new if n_new == 1 else max(4, n_new // self.brevity))

    def ring(
        self, fmt: str, nodes: int = 1, max_length: int = 128, flags: tuple[str, ...] = (), threads: int = 1,
        cache: str = "auto", instructions: str = "", group: str = "", **more: Any,
    ) -> SystemSpec:  # fmt: skip
        """Nodes that have their chunks in a weight format on disk.

        Args:
            cache: of --kv-dtype.
            instructions: the instruction set of the kernels; "" is the best that the machine has.
        """
        chunks = self.chunks(fmt, nodes)
        name = f"ring {fmt} x{nodes}" + (f", {threads} threads" if threads > 1 else "") + _of_set(instructions)
        flags = (*flags, "--kv-dtype", cache)
        environment = {FORCED: instructions} if instructions else {}
        options = {
            "chunks": str(chunks.starter.parent),
            **self._ring_options(nodes, max_length, flags, threads),
            **more,
        }
        # It pins its nodes itself.
        return SystemSpec(name, "ring", options, self.cores, environment, instructions, group)

    def ring_of_checkpoint(self, fmt: str, max_length: int = 128) -> SystemSpec:
        """One node that brings the plain weights into the format while it loads them."""
        self.needs[Checkpoint(self.ckpt, self.shape)] = None
        flags = () if fmt == OWN_FORMAT[DTYPE] else ("--quantize", fmt)
        options = {"ckpt": str(self.ckpt), **self._ring_options(1, max_length, flags, 1)}
        return SystemSpec(f"ring {fmt} x1, of the checkpoint", "ring", options, self.cores)

    def _ring_options(self, nodes: int, max_length: int, flags: tuple[str, ...], threads: int) -> dict[str, Any]:
        return {"nodes": nodes, "flags": list(flags), "cores": list(self.cores), "threads": threads,
                "max_length": max_length}  # fmt: skip

    def chunks(self, fmt: str, nodes: int, counts: tuple[int, ...] | None = None) -> Chunks:
        chunks = Chunks(self.ckpt, self.shape, fmt, nodes, counts)
        self.needs[chunks] = None
        return chunks

    def llama(
        self, fmt: str, threads: int = 1, cache: str = CACHE, instructions: str = "", group: str = ""
    ) -> SystemSpec:
        """llama.cpp in the format that answers to ours.

        Args:
            cache: as the ring calls it, a key of LLAMA_CACHE_OF.
            instructions: a key of `llama_libs`; "" is the library that its package came with.
        """
        gguf = Gguf(self.ckpt, self.shape, GGUF_OF[fmt])
        self.needs[gguf] = None
        of_file = {"gguf": str(gguf.path), "instructions": instructions}
        options = {**of_file, "threads": threads, "cache": LLAMA_CACHE_OF[cache]}
        environment = {"LLAMA_CPP_LIB_PATH": str(self.llama_libs[instructions])} if instructions else {}
        name = f"llama.cpp {gguf.kind} x{threads}" + _of_set(instructions)
        return SystemSpec(name, "llama.cpp", options, self.cores[:threads], environment, instructions, group)

    def framework(self, kind: str, dtype: str, threads: int = 1, max_length: int = 128) -> SystemSpec:
        self.needs[Checkpoint(self.ckpt, self.shape)] = None
        options = {"ckpt": str(self.ckpt), "dtype": dtype, "max_length": max_length, "threads": threads}
        return SystemSpec(f"{kind} {dtype} x{threads}", kind, options, self.cores[:threads])

    def read(self) -> SystemSpec:
        return SystemSpec(READ.system, "read", {}, self.cores[:1])

    def weight_bytes(self, fmt: str) -> float:
        """What a token reads, scales included."""
        return sum(n_weights(self.shape)) * LAYOUTS[fmt].bits / 8

    def cut_allows(self, n_nodes: int) -> float:
        """How much faster nodes that are alike can be than one of them: all work over that of the busiest."""
        of_blocks, of_head = n_weights(self.shape)
        counts = default_split(spec_of(ModelConfig.from_litgpt(config_of(self.shape))), n_nodes)
        works = [n * of_blocks / self.n_layer for n in counts]
        works[0] += of_head
        return sum(works) / max(works)
