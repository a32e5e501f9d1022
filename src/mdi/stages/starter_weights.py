"""Where the starter finds every part of the model, how the model is cut, and what each node of the ring gets of it.

Weights come from chunks, or from the checkpoint itself. The starter gives parts to its own store, as to any other node.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mdi.block_ranges import ADAPTER_PREFIX, default_split, parse_layers, ranges, span
from mdi.cancel import Cancel
from mdi.checkpoint.adapters import Adapter, AdapterName, AdapterSource, weights_hash
from mdi.checkpoint.chunks import ChunkFile, find_chunk, siblings
from mdi.checkpoint.derived import PackedSource, own_bits
from mdi.checkpoint.folder import all_weight_files
from mdi.checkpoint.kept_packed import MadeSource
from mdi.checkpoint.mixtures import meant
from mdi.checkpoint.packing import Packing
from mdi.checkpoint.parts import stage_parts
from mdi.checkpoint.records import BELIEVED_S, HashRecord
from mdi.checkpoint.source import open_source
from mdi.checkpoint.virtual_adapters import open_adapter
from mdi.checkpoint.weights import WeightSource, own_packing
from mdi.control.messages import PartSpec
from mdi.errors import CheckpointError, UsageError
from mdi.kernels.format_maps import TIED, shown, with_table
from mdi.kernels.weight_formats import MIXTURES, OWN, OWN_FORMAT, is_made
from mdi.model.plain import ModelConfig
from mdi.spec.model_id import ModelId
from mdi.tensor.group import Group
from mdi.tensor.shard_source import ShardSource
from mdi.tensor.shares import Share

logger = logging.getLogger("mdi")


class ShardWeights:
    """The parts that the starter can send to one node of a group: its shards, cut out of the starter's own weights."""

    def __init__(self, weights: StarterWeights, share: Share, packing: Packing) -> None:
        self._weights, self._share, self._packing = weights, share, packing
        self._sources: dict[int, tuple[WeightSource, ShardSource]] = {}

    def source_of(self, part: str) -> ShardSource:
        """The source of a shard. CheckpointError if its part is in none of the starter's files."""
        whole = self._weights.source_of(part)
        if id(whole) not in self._sources:
            self._sources[id(whole)] = whole, ShardSource(whole, self._share, self._packing)
        return self._sources[id(whole)][1]

    def spec(self, part: str) -> PartSpec:
        info = self.source_of(part).info(part)
        return PartSpec(info.name, info.sha256, info.n_bytes)

    def part_bytes(self, part: str) -> int:
        return self.source_of(part).n_bytes(part)

    def pieces(self, part: str) -> Iterator[bytes | memoryview]:
        """The canonical bytes of a shard, to be sent."""
        return self.source_of(part).pieces(part)


class StarterWeights:
    """All parts that the starter holds or can send, and the cut.

    Args:
        ckpt: directory of a checkpoint, or None.
        chunk: the starter's chunk, or None; the other nodes' chunks must be beside it.
        n_nodes: length of the ring.
        layers: blocks per node by hand, "4,9,9"; None takes the chunks' cut, or an even one.
        quantize: weight format that the run is to have: chunks in it are preferred to the checkpoint.
        will_be_cut: another cut will follow (`cut_anew`), so a checkpoint is opened even if there are chunks.

    Attributes:
        blocks: of each node of the ring.
        native, own_formats: see WeightSource.
        groups: of each node of the ring, as that node sees it; None for one whose stage is its own. Empty: there are none.
        adapters: that texts may be computed with, see `take_adapters`.
        id: stands for the hashes of the starter's own parts, which nobody else needs.

    Raises:
        UsageError, CheckpointError, SplitError: files are missing or do not fit together.
    """

    directory: Path
    model: ModelId
    native: str | None
    own_formats: str | None
    quantize: str | None
    quantize_head: str | None
    is_cut_by_chunks: bool
    blocks: list[tuple[int, int]]
    groups: tuple[Group | None, ...] = ()
    adapters: tuple[Adapter, ...] = ()

    def __init__(
        self, ckpt: Path | None, chunk: Path | None, n_nodes: int, layers: str | None, quantize: str | None = None,
        will_be_cut: bool = False,
    ) -> None:  # fmt: skip
        self._wanted = quantize
        self.sources: list[WeightSource] = []
        self._chunks: dict[str, ChunkFile] = {}
        self.id = secrets.token_hex(8)
        self._shards: dict[int, ShardWeights] = {}
        try:
            self._find(ckpt, chunk, n_nodes, layers, will_be_cut)
        except BaseException:
            self.close()
            raise

    def _find(self, ckpt: Path | None, chunk: Path | None, n_nodes: int, layers: str | None, will_be_cut: bool) -> None:
        if ckpt is not None and ckpt.is_file():
            raise UsageError(
                f"--ckpt {ckpt} is a file: give the directory that it is in (a chunk is given with --chunk)"
            )
        if chunk is not None:
            self._take_chunks(self._starter_chunk(chunk, n_nodes), n_nodes)
            self.directory = ckpt or Path(chunk).absolute().parent.parent.parent
        elif ckpt is not None:
            self.directory = ckpt
            self._try_chunks(ckpt, n_nodes)
        else:
            raise UsageError("give the model: --ckpt DIRECTORY, or --chunk FILE")
        self.is_cut_by_chunks = self._covers(n_nodes, layers)
        if ckpt is not None and (will_be_cut or not self.is_cut_by_chunks):
            self.sources.append(open_source(ckpt))
        if not self.sources:
            raise CheckpointError(f"no weights found for {n_nodes} nodes")
        self._take(self.sources[0])
        first = self.sources[0]
        self.native, self.own_formats = first.native, first.own_formats
        if self._wanted not in (None, OWN) and self.quantize not in (None, meant(self._wanted, self.config)):
            raise UsageError(
                f"--quantize {self._wanted}: the weights in {first} are stored in {shown(self.quantize)} already"
            )
        self.take_blocks(self._cut(n_nodes, layers))

    def _take(self, first: WeightSource) -> None:
        self.model = first.model_id
        packing = first.packing or own_packing(first.dtype)
        lossless = {"float32", "bf16", OWN_FORMAT.get(first.dtype)}  # the run chooses the type to compute in
        lossless |= {with_table(form, TIED) for form in lossless if form}
        self.quantize, self.quantize_head = (
            None if form in lossless else form for form in (packing.blocks, packing.head)
        )

    def take_format(self, form: str | None, folder: Path) -> None:
        """Give parts at the file's own bits from now on if that is the format, or packed here if it is one whose scales are
        searched; else in plain numbers as before.

        Args:
            folder: for what is packed here.
        """
        first = self.sources[0]
        is_packed_here = isinstance(first, PackedSource)
        now = first.packing.blocks if is_packed_here and first.packing else None
        is_plain = is_packed_here or first.packing is None
        is_own = form is not None and form == self.own_formats
        wanted = form if is_plain and form is not None and (is_own or is_made(form)) else None
        if wanted == now:
            return

        def changed(source: WeightSource) -> WeightSource:
            plain = source.source if isinstance(source, PackedSource) else source
            if wanted is None or isinstance(plain, AdapterSource):
                return plain
            if is_own and (found := own_bits(plain)) is not None:
                return found
            return MadeSource(plain, Packing(wanted, wanted).tied(plain.tied_type), folder, self.directory)

        self.sources = [changed(source) for source in self.sources]
        self.id, self._shards = secrets.token_hex(8), {}
        self._take(self.sources[0])

    @property
    def tied_type(self) -> str | None:
        """See WeightSource."""
        return self.sources[0].tied_type

    def take_adapters(self, named: Sequence[AdapterName]) -> None:
        """Read the adapters of a run; they become parts of the nodes. Raises CheckpointError, before anything is sent."""
        self.put_adapters([self.open_adapter(one, number) for number, one in enumerate(named, 1)])

    def open_adapter(self, named: AdapterName, number: int) -> Adapter:
        """Raises CheckpointError."""
        return open_adapter(named, number, self.config, functools.cache(lambda: weights_hash(self.sources[0])))

    def put_adapters(self, adapters: Sequence[Adapter]) -> None:
        """Have these in the place of all others. Raises CheckpointError."""
        model = [source for source in self.sources if not isinstance(source, AdapterSource)]
        found = [AdapterSource(adapters, self._source_of)] if adapters else []
        self.adapters, self.sources = tuple(adapters), [*model, *found]

    def own_id(self, part: str) -> str:
        """Stands for the hash of a part of the starter's own."""
        adapters = [one.sha256 for one in self.adapters] if part.startswith(ADAPTER_PREFIX) else []
        return " ".join([self.id, *adapters, part])

    def with_adapters(self, parts: Sequence[str], start: int, stop: int) -> list[str]:
        """The parts of a node with the blocks [start, stop), and those of adapters."""
        if not self.adapters:
            return [*parts]
        wanted = {f"{ADAPTER_PREFIX}{block}" for block in range(start, stop)}
        return [*parts, *(part for part in self.sources[-1].part_names() if part in wanted)]

    def cut_anew(self, counts: Sequence[int]) -> None:
        """Another cut, for the same or another number of nodes. CheckpointError if some part is not here."""
        self.take_blocks(ranges(counts))

    def take_blocks(self, blocks: Sequence[tuple[int, int]], groups: Sequence[Group | None] = ()) -> None:
        """The blocks of each node, the same for nodes that compute them together. CheckpointError if one is not here."""
        self.blocks, self.groups, self._shards = list(blocks), tuple(groups), {}
        for node, (start, stop) in enumerate(self.blocks):
            for part in stage_parts(start, stop, starter=node == 0):
                self._source_of(part)  # complain now, not in the middle of a transfer

    def _starter_chunk(self, chunk: Path, n_nodes: int) -> ChunkFile:
        source = open_source(chunk)
        self.sources.append(source)
        if not isinstance(source, ChunkFile):
            raise UsageError(f"--chunk {chunk} is a directory; a checkpoint is given with --ckpt")
        manifest = source.manifest
        if manifest.node != "starter":
            raise UsageError(f"{chunk} is the chunk of {manifest.node}; the starter needs model_starter.safetensors")
        if manifest.n_nodes != n_nodes:
            raise UsageError(
                f"{chunk} belongs to a cut over {manifest.n_nodes} nodes, but the nodes file lists {n_nodes} "
                f"(mdi prepare-model MODEL --n-nodes {n_nodes} makes the chunks for it)"
            )
        return source

    def _take_chunks(self, starter: ChunkFile, n_nodes: int) -> None:
        self._chunks = {"starter": starter}
        for node, path in siblings(starter.path).items():
            if node != "starter":
                source = ChunkFile(path)
                self.sources.append(source)
                if source.config_hash == starter.config_hash and source.manifest.n_nodes == n_nodes:
                    self._chunks[node] = source

    def _try_chunks(self, ckpt: Path, n_nodes: int) -> None:
        """Use the chunks of a checkpoint if they are complete and not older than it."""
        wanted = self._wanted
        if wanted in MIXTURES and (ckpt / "chunks").is_dir():  # folders have the names of maps
            with contextlib.closing(open_source(ckpt)) as source:
                wanted = meant(wanted, source.config)
        path = find_chunk(ckpt, n_nodes, "starter", wanted)
        if not path.is_file():
            path = find_chunk(ckpt, n_nodes, "starter")
        if not path.is_file():
            return
        # Check each: if mdi prepare-model was interrupted, new chunks are beside old ones of other weights.
        oldest = min(chunk.stat().st_mtime for chunk in siblings(path).values())
        if any(file.stat().st_mtime > oldest for file in all_weight_files(ckpt) if file.is_file()):
            logger.info("the chunks in %s are older than the checkpoint and are not used", path.parent)
            return
        try:
            source = ChunkFile(path)
            self.sources.append(source)
            self._take_chunks(source, n_nodes)
        except CheckpointError as e:
            logger.warning("the chunks in %s are not used: %s", path.parent, e)
            self.close()
            self._chunks = {}

    def _covers(self, n_nodes: int, layers: str | None) -> bool:
        return len(self._chunks) == n_nodes and layers is None

    def _cut(self, n_nodes: int, layers: str | None) -> list[tuple[int, int]]:
        n_layer = self.n_layer
        if layers is not None:
            return ranges(parse_layers(layers, n_layer, n_nodes, self.model.spec.allowed_cuts()))
        names = ["starter"] + [f"secondary{i}" for i in range(n_nodes - 1)]
        if all(name in self._chunks for name in names):
            blocks = [self._chunks[name].manifest.blocks for name in names]
            if [b for pair in blocks for b in pair] != [0, *(b for _, b in blocks[:-1] for b in (b, b)), n_layer]:
                told = ", ".join(f"{name} {span(*pair)}" for name, pair in zip(names, blocks, strict=True))
                raise CheckpointError(f"the chunks beside {self._chunks['starter'].path} do not fit each other: {told}")
            return blocks
        return ranges(default_split(self.model.spec, n_nodes))

    def _source_of(self, part: str) -> WeightSource:
        for source in self.sources:
            if source.config_hash == self.model.config_hash and part in source.part_names():
                return source
        raise CheckpointError(
            f"the weights of {part} are in none of the starter's files: give the whole checkpoint with --ckpt, or put all "
            "chunks of the cut beside the starter's"
        )

    # The nodes of the ring

    @property
    def is_shared(self) -> bool:
        """Whether nodes compute the same blocks, each a share of them."""
        return bool(self.groups)

    def group_of(self, node: int) -> Group | None:
        return self.groups[node] if self.groups else None

    def of_node(self, node: int) -> StarterWeights | ShardWeights:
        """The source of a node's parts: whole blocks, or its shares of them."""
        group = self.group_of(node)
        if group is None:
            return self
        if node not in self._shards:
            self._shards[node] = ShardWeights(self, group.share(self.config), group.packing)
        return self._shards[node]

    def share_of(self, node: int) -> Any:
        """A node's share of its blocks: rank and shares of its group; None for one that has them whole."""
        group = self.group_of(node)
        return None if group is None else (group.rank, group.shares.heads, group.shares.columns)

    # Parts

    def spec(self, part: str) -> PartSpec:
        info = self._source_of(part).info(part)
        return PartSpec(info.name, info.sha256, info.n_bytes)

    def stage_bytes(self, node: int) -> int:
        """Weights of a node's stage, as they are stored; known without reading them."""
        start, stop = self.blocks[node]
        return sum(self.part_bytes(part) for part in stage_parts(start, stop, starter=node == 0))

    def part_bytes(self, part: str) -> int:
        """A part's bytes, as they are stored; known without reading it."""
        return self._source_of(part).n_bytes(part)

    def pieces(self, part: str) -> Iterator[bytes | memoryview]:
        """The canonical bytes of a part, to be sent."""
        source = self._source_of(part)
        source.release()
        return source.pieces(part)

    def source_of(self, part: str) -> WeightSource:
        """Where a part is read from. CheckpointError if it is in none of the starter's files."""
        source = self._source_of(part)
        source.release()  # mapped pages count as this process's memory; parts are needed one after the other
        return source

    def verify(self, parts: Sequence[str], cancel: Cancel) -> None:
        """Hash what comes from chunks, where it is not known to be whole. CheckpointError if it is damaged."""
        sources = {part: self._source_of(part) for part in parts}
        for chunk in {source for source in sources.values() if isinstance(source, ChunkFile)}:
            record = HashRecord(chunk.path.with_name("checked.json"), believed_s=BELIEVED_S)
            chunk.verify([part for part, source in sources.items() if source is chunk], record, cancel)

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def n_layer(self) -> int:
        return self.model.spec.n_layer

    def close(self) -> None:
        """Harmless if repeated."""
        while self.sources:
            self.sources.pop().close()
