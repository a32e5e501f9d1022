"""The files that scenarios ask for, made once and kept: checkpoints, chunks in each weight format, GGUF files."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from mdi.block_ranges import default_split
from mdi.checkpoint.chunks import find_chunk, write_chunks
from mdi.checkpoint.derived import PackedSource
from mdi.checkpoint.packing import Packing
from mdi.checkpoint.shapes import read_config
from mdi.checkpoint.source import open_source
from mdi.checkpoint.weights import WeightSource
from mdi.errors import MdiError
from mdi.kernels.weight_formats import OWN_FORMAT
from mdi.model.plain import spec_of
from random_checkpoint import DTYPE, make_checkpoint
from random_packed import RandomPacked
from side_by_side.runner import say

EXPORTER = Path(__file__).resolve().parents[1] / "peers" / "gguf_export.py"
MAKE_S = 1800


@dataclass(frozen=True)
class Chunks:
    """A model's chunks in a weight format.

    Attributes:
        counts: blocks per node by hand; None is the even cut.
    """

    ckpt: Path
    shape: str
    form: str
    n_nodes: int
    counts: tuple[int, ...] | None = None

    @property
    def starter(self) -> Path:
        return self.of("starter")

    def of(self, node: str) -> Path:
        """Where a node's chunk is, or will be."""
        label = None if self.form == OWN_FORMAT[DTYPE] else self.form
        return find_chunk(self.folder, self.n_nodes, node, label)

    @property
    def folder(self) -> Path:
        """A cut by hand lies beside the even one, not in its place."""
        return self.ckpt if self.counts is None else self.ckpt / "by-hand" / "-".join(map(str, self.counts))

    def make(self, python: str) -> None:
        if self.starter.is_file():
            return
        make_checkpoint(self.ckpt, self.shape)
        say(f"  making {self.form} chunks of {self.shape} for {self.n_nodes} nodes")
        source = self._source()
        try:
            counts = self.counts or default_split(spec_of(source.config), self.n_nodes)
            if self.folder != self.ckpt:
                self.folder.mkdir(parents=True, exist_ok=True)
                for name in ("model_config.yaml", "tokenizer.json", "tokenizer_config.json"):
                    (self.folder / name).write_bytes((self.ckpt / name).read_bytes())
            write_chunks(source, self.folder, counts)
        finally:
            source.close()

    def _source(self) -> WeightSource:
        """Of several nodes the chunk for one: to pack the weights anew for each cut would take minutes."""
        if not (self.ckpt / "lit_model.pth").is_file():
            return RandomPacked(read_config(self.ckpt / "model_config.yaml"), self.form)
        if self.n_nodes > 1:
            whole = Chunks(self.ckpt, self.shape, self.form, 1)
            whole.make("")
            return open_source(whole.starter)
        return PackedSource(open_source(self.ckpt), Packing(self.form, self.form))


@dataclass(frozen=True)
class Gguf:
    """A model as a GGUF file of a kind, like q8_0."""

    ckpt: Path
    shape: str
    kind: str

    @property
    def path(self) -> Path:
        return self.ckpt.parent / f"{self.shape}-{self.kind}.gguf"

    def make(self, python: str) -> None:
        if self.path.is_file():
            return
        make_checkpoint(self.ckpt, self.shape)
        say(f"  making {self.path.name}")
        command = [python, "-W", "ignore", str(EXPORTER), str(self.ckpt), str(self.path), "--format", self.kind]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=MAKE_S)
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or ["?"])[-1])


@dataclass(frozen=True)
class Checkpoint:
    """The plain weights themselves."""

    ckpt: Path
    shape: str

    def make(self, python: str) -> None:
        make_checkpoint(self.ckpt, self.shape)


Need = Checkpoint | Chunks | Gguf


def make_all(needs: dict[Need, None], python: str) -> int:
    """Make what is not there, and return how many could not be made; a system that lacks its file will say so itself.

    Args:
        python: interpreter that has gguf.
    """
    n_failed = 0
    for need in needs:
        try:
            need.make(python)
        except (MdiError, RuntimeError, OSError, subprocess.TimeoutExpired) as e:
            n_failed += 1
            say(f"  NOT MADE: {e}")
    return n_failed
