"""Flags of prepare_model: it makes one chunk per node from a model on the hub or in a local directory."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdi.cancel import Cancel
from mdi.cli import called
from mdi.errors import UsageError
from mdi.spec.cluster import DTYPES
from mdi.spec.combinations import CHUNKS, facts_of, refuse
from mdi.spec.options import Options, own_or_packed
from mdi.spec.parser import Parser
from mdi.units import size

if TYPE_CHECKING:
    import numpy as np

    from mdi.checkpoint.weights import WeightSource

DESCRIPTION = """\
Download a model, convert it to LitGPT's format, and cut it into one chunk per node.

MODEL is a name on the Hugging Face hub (org/name), a local directory in LitGPT's or Hugging Face's format, or a GGUF
file, whose weights stay in that file. Finished steps are not repeated, and need no connection. Without --n-nodes the
model is only downloaded and converted; a starter with --ckpt then cuts it and sends the other nodes their parts.
"""

EPILOG = """\
examples:
  mdi prepare-model TinyLlama/TinyLlama-1.1B-Chat-v1.0 --n-nodes 3
  mdi prepare-model TinyLlama/TinyLlama-1.1B-Chat-v1.0 --n-nodes 3 --layers 4,9,9     4 blocks on the starter
  mdi prepare-model meta-llama/Llama-3.2-1B --hf-token hf_... --n-nodes 2 --dtype float16
  mdi prepare-model meta-llama/Llama-3.2-1B --n-nodes 2 --quantize int8               a quarter of float32's size
  mdi prepare-model ~/models/tinyllama-1.1b.Q4_K_M.gguf --n-nodes 3                   or: mdi starter --ckpt ....gguf
  mdi prepare-model checkpoints/custom/mine --export hf --out mine-hf                 for transformers and others
  mdi prepare-model checkpoints/custom/mine --export gguf --quantize q4_k --out mine-gguf     for llama.cpp and others
  mdi prepare-model ~/models/my-finetuned-llama --n-nodes 2                           its config.json says what it is

The chunks are written to <model>/chunks/<N>nodes/: model_starter.safetensors, model_secondary0.safetensors, ... A node
needs only its own chunk, or none, if the starter sends it. Each chunk lists its parts with a sha256 each. By
default blocks are spread evenly; the output head counts as work of the starter. N may be from 1 to one more than the
number of blocks, because the starter may have none.
"""


logger = logging.getLogger("mdi")


def add_arguments(parser: Parser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.options(None, "model", model={"nargs": None, "metavar": "MODEL"})
    parser.options(
        "cut", "n_nodes", "layers", "dtype", "quantize", "quantize_head", "calibrate", "allow_clipping",
        layers={"help": "blocks per node, starter first (default: even)"},
        dtype={"help": "number type to store the weights in (default: as they are)", "choices": DTYPES},
        quantize={
            "help": "store the blocks in this weight format; int8 takes a quarter of float32's size, int4 an eighth, at a high "
            "price in real models; q4_k and q6_k, mixtures of 4 to 8 bits, keep more (default: the smallest without loss); "
            "own: a GGUF file at its own bits", "read": own_or_packed,
        },
        quantize_head={"read": own_or_packed},
    )  # fmt: skip
    parser.options("hub", "ckpt_folder", "hf_token", "revision")
    device = {"help": "accepted for compatibility; no step uses a GPU", "read": None}
    parser.options("conversion", "export", "out", "model_name", "device", device=device)
    parser.options(None, "verb", "debug", debug={"help": "write a debug log, and show tracebacks of errors"})


def run(options: Options, cancel: Cancel) -> int:
    options = _checked(options)
    directory = _find(options, cancel)
    _check_cut(directory, options)
    _check_files(directory, options)

    from mdi.checkpoint.derived import CastSource, PackedSource
    from mdi.checkpoint.folder import GGUF_NOTE, TOKENIZERS
    from mdi.checkpoint.mixtures import meant
    from mdi.checkpoint.packing import Packing
    from mdi.checkpoint.source import open_source
    from mdi.checkpoint.weights import own_packing, warn_of_rounding
    from mdi.kernels.weight_formats import MIXTURES, OWN, check_whole

    check_whole(options.quantize, options.quantize_head)
    if options.calibrate is not None and options.quantize not in MIXTURES:
        raise UsageError(f"--calibrate is for --quantize {' and '.join(MIXTURES)}, whose errors it weighs")
    directory, results = _convert(directory, options)
    if not any((directory / name).is_file() for name in (*TOKENIZERS, GGUF_NOTE)):
        logger.warning(
            "warning: %s has no tokenizer: copy %s there before it is run", directory, " or ".join(TOKENIZERS)
        )
    source = open_source(directory)
    if options.dtype is not None and any(
        spec.is_floating and spec.name != options.dtype for spec in source.specs.values()
    ):
        source = CastSource(source, options.dtype, options.allow_clipping)
    if options.n_nodes is not None or options.export == "gguf":
        lossless = own_packing(source.dtype)
        blocks, head = (
            source.own_formats if form == OWN else form for form in (options.quantize, options.quantize_head)
        )
        blocks, head = (form and meant(form, source.config) for form in (blocks, head))
        warn_of_rounding(source.model, source.native, blocks)
        means = None if options.calibrate is None else _means(source, directory, options, cancel)
        packing = Packing(blocks or lossless.blocks, head or blocks or lossless.head, options.allow_clipping, means)
        source = PackedSource(source, packing.tied(source.tied_type))
    try:
        n_bytes = sum(spec.n_bytes for spec in source.specs.values())
        n_layer = source.spec.n_layer
        stored = source.packing.blocks if source.packing else source.dtype
        print(f"{directory}: {source.model}, {n_layer} blocks, {stored}, {size(n_bytes)}")
        if options.export is not None:
            _export(source, directory, options)
        elif options.n_nodes is None:
            print(
                f"run it on this machine: {called('chat')} --ckpt {directory}, or {called('sample')}, or {called('serve')}"
            )
        else:
            _cut(source, results, options)
    finally:
        source.close()
    return 0


def _checked(options: Options) -> Options:
    """The options with the number of nodes that --layers says. Raises UsageError."""
    refuse({**facts_of(options), **({} if options.export == "gguf" else {CHUNKS: CHUNKS})})
    if options.n_nodes is None and options.layers is not None:
        options = replace(options, n_nodes=options.layers.count(",") + 1)
    if options.n_nodes is not None and options.n_nodes < 1:
        raise UsageError(f"--n-nodes {options.n_nodes}: a ring has one node at least")
    return options


def _check_cut(directory: Path, options: Options) -> None:
    """Raises UsageError if there is no model in the directory, or it has too few blocks for the cut."""
    from mdi.block_ranges import check_n_nodes, parse_layers
    from mdi.checkpoint.folder import check_folder, stated_blocks

    if not (directory / "config.json").is_file():
        check_folder(directory)
    n_blocks = stated_blocks(directory)
    if n_blocks is None or options.n_nodes is None:
        return
    if options.layers is not None:
        parse_layers(options.layers, n_blocks, options.n_nodes)
    else:
        check_n_nodes(n_blocks, options.n_nodes)


def _check_files(directory: Path, options: Options) -> None:
    """Report damage in a directory that is to be converted, as far as that is known without importing torch.

    Raises:
        CheckpointError: config.json or the head of a file of weights cannot be read.
    """
    from mdi.checkpoint.folder import is_lit_dir
    from mdi.checkpoint.hfconfig import read_hf_config
    from mdi.checkpoint.model_store import default_store
    from mdi.checkpoint.safetensors_layout import read_header

    target = options.out or (options.ckpt_folder or default_store()) / directory.resolve().name
    if is_lit_dir(directory) or is_lit_dir(target):
        return
    read_hf_config(directory / "config.json")
    for path in sorted(directory.glob("model*.safetensors")):
        read_header(path)


def _find(options: Options, cancel: Cancel) -> Path:
    """The model's directory; downloaded, if MODEL is a name on the hub."""
    from mdi.checkpoint.model_store import ModelStore, is_model_name
    from mdi.spec.cluster import nearest_existing

    store, local = ModelStore(options.ckpt_folder), Path(options.model).expanduser()
    if local.is_dir():
        return local
    if local.suffix == ".gguf":
        from mdi.checkpoint.ggufsource import gguf_directory

        return gguf_directory(local, store.folder)
    if local.exists():
        raise UsageError(f"MODEL {options.model} is a file: give the directory that it is in, or a .gguf file")
    if not options.model.startswith((".", "/", "~")) and (model := store.find(options.model)) is not None:
        return store.folder_of(model)
    if not is_model_name(options.model):
        raise UsageError(
            f"no such directory: {options.model} (the nearest that exists is {nearest_existing(local)}); a model on the hub "
            "is named org/name"
        )
    logger.info("looking for %s in %s", options.model, store.folder)
    return store.fetch(options.model, options.hf_token, options.revision, say=logger.info, cancel=cancel)


def _convert(directory: Path, options: Options) -> tuple[Path, Path]:
    """The folders of the checkpoint and of its chunks."""
    from mdi.checkpoint.folder import is_lit_dir, is_readable_hf
    from mdi.checkpoint.model_store import default_store

    if (
        options.export is not None
        and options.model_name is None
        and is_readable_hf(directory)
        and not is_lit_dir(directory)
    ):
        return directory, directory  # read as it is

    from mdi.checkpoint.convert import ready
    from mdi.checkpoint.shapes import read_config

    out = None if options.export is not None else options.out
    home, clips = options.ckpt_folder or default_store(), options.allow_clipping
    checkpoint, results = ready(directory, home, out, options.model_name, options.dtype, clips)
    if options.model_name is not None:
        held = read_config(checkpoint / "model_config.yaml")
        names = {held.name, held.hf_config.get("name")}
        if options.model_name not in names:
            raise UsageError(
                f"{checkpoint} was converted as {held.name!r}, not {options.model_name!r}: remove its lit_model.pth to "
                "convert it again"
            )
    return checkpoint, results


def _means(source: WeightSource, directory: Path, options: Options, cancel: Cancel) -> dict[str, np.ndarray]:
    """What a text's rows are like before each linear layer. Raises UsageError."""
    from mdi.host.device import load_torch

    load_torch("--calibrate")
    from mdi.stages.calibration import mean_squares, windows_of
    from mdi.text.texts import TextCodec

    assert options.calibrate is not None
    try:
        text = options.calibrate.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"--calibrate {options.calibrate}: {e}: give a file of text in UTF-8") from None
    codec = TextCodec.from_checkpoint(directory, "none")
    try:
        windows = windows_of(codec.encode(text), source.spec.max_length)
    finally:
        codec.close()
    logger.info("calibrating with %d tokens of %s", sum(map(len, windows)), options.calibrate)
    return mean_squares(source, windows, cancel)


def _export(source: WeightSource, directory: Path, options: Options) -> None:
    from mdi.checkpoint.derived import PackedSource
    from mdi.checkpoint.export import export_hf, made_folder
    from mdi.checkpoint.gguf_export import export_gguf

    assert options.out is not None
    if isinstance(source, PackedSource):
        made_folder(options.out)
        path = options.out / f"{source.model}.gguf"
        with progress_bar("exporting") as progress:
            export_gguf(source, directory, path, progress)
        print(f"written as a GGUF file: {path}")
        return
    with progress_bar("exporting") as progress:
        export_hf(source, directory, options.out, progress)
    print(f"written as a Hugging Face model: {options.out}")


def _cut(source: WeightSource, directory: Path, options: Options) -> None:
    from mdi.block_ranges import block_span, default_split, parse_layers, ranges
    from mdi.checkpoint.chunks import node_names, write_chunks

    assert options.n_nodes is not None
    n_layer = source.spec.n_layer
    if options.layers is not None:
        counts = parse_layers(options.layers, n_layer, options.n_nodes, source.spec.allowed_cuts())
    else:
        counts = default_split(source.spec, options.n_nodes)
    with progress_bar("cutting") as progress:
        paths = write_chunks(source, directory, counts, progress)
    rows = zip(node_names(options.n_nodes), ranges(counts), paths, strict=True)
    for node, (start, stop), path in rows:
        extra = "embedding and head, " if node == "starter" else ""
        print(f"  {node:<12} {extra}{block_span(start, stop)}, {size(path.stat().st_size)}: {path}")
    if options.n_nodes == 1:
        print(f"run it on this machine: {called('starter')} --chunk {paths[0]}")
    else:
        print(
            "take each secondary's chunk to its node, or let the starter send it; then, with the addresses in NODES.json:"
        )
        print(f"  on each secondary:  {called('secondary')} --nodes-config NODES.json INDEX --chunk {paths[1].name}")
        print(f"  here:               {called('starter')} --chunk {paths[0]} --nodes-config NODES.json")


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, which appears when the work takes more than two seconds."""
    from tqdm import tqdm

    bar: Any = tqdm(desc=what, unit="B", unit_scale=True, delay=2, file=sys.stderr)

    def progress(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    with bar:
        yield progress
