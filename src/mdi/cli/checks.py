"""Checks the flags about the model and computing before anything heavy is imported, so that mistakes are reported at once."""

from __future__ import annotations

import argparse
from pathlib import Path

from mdi.errors import UsageError


def check_model(args: argparse.Namespace, is_litgpt: bool = True) -> None:
    """--ckpt and --chunk; --ckpt becomes the folder that was found.

    Args:
        is_litgpt: whether the checkpoint must be a LitGPT one.

    Raises:
        UsageError: a named file does not exist.
    """
    from mdi.checkpoint.folder import check_folder

    check_chunk(getattr(args, "chunk", None))
    if args.ckpt is None:
        if getattr(args, "chunk", None) is None:
            raise UsageError("give the model: --ckpt DIRECTORY" + (", or --chunk FILE" if is_litgpt else ""))
        return
    args.ckpt = found_ckpt(args.ckpt)
    if is_litgpt and getattr(args, "chunk", None) is None:
        check_folder(args.ckpt)


def check_cut(args: argparse.Namespace, n_nodes: int) -> None:
    """--layers and the model (after `check_model`) for so many nodes. Raises UsageError if the model cannot be cut so."""
    from mdi.checkpoint.folder import stated_blocks
    from mdi.partition.split import check_n_nodes, parse_layers

    n_blocks = None if args.ckpt is None else stated_blocks(args.ckpt)
    layers = getattr(args, "layers", None)
    if getattr(args, "parallel", None) == "tensor":
        if layers is not None:
            raise UsageError("--layers: with --parallel tensor each node has a share of every block: use --shares")
    elif n_blocks is not None and layers is not None:
        parse_layers(layers, n_blocks, n_nodes)
    elif n_blocks is not None:
        check_n_nodes(n_blocks, n_nodes)


def found_ckpt(name: Path) -> Path:
    """The folder that --ckpt means. Raises UsageError."""
    from mdi.checkpoint.folder import find_folder
    from mdi.cli import default_ckpt_folder

    return find_folder(name, default_ckpt_folder())


def check_chunk(chunk: Path | None) -> None:
    """Raises UsageError if --chunk names no file; the name that chunks had before, with .pth, will do."""
    from mdi.config import nearest_existing

    if chunk is None or chunk.is_file() or chunk.with_suffix(".safetensors").is_file():
        return
    if chunk.is_dir():
        raise UsageError(f"--chunk {chunk} is a directory; a checkpoint is given with --ckpt")
    raise UsageError(f"--chunk {chunk}: no such file (the nearest that exists is {nearest_existing(chunk)})")


def check_computing(args: argparse.Namespace) -> None:
    """--device, --dtype, --threads and the weight formats. Raises UsageError. What this machine lacks is reported later."""
    from mdi.config import check_device, check_dtype
    from mdi.weight_formats import AUTO, check_packed

    check_device(args.device)
    check_dtype(args.dtype)
    if args.threads is not None and args.threads < 1:
        raise UsageError(f"--threads must be at least 1, got {args.threads}")
    for form in (args.quantize, getattr(args, "quantize_head", None)):
        if form != AUTO or not hasattr(args, "quantize_head"):  # a secondary does not choose for all
            check_packed(form)
