#!/usr/bin/env python3
"""A litgpt checkpoint of Llama's kind as a GGUF file for llama.cpp, without a vocabulary: token ids in, token ids out.

    gguf_export.py CHECKPOINT OUT.gguf --format f32 | bf16 | f16 | q8_0 | q4_0

In the quantized formats every matrix is quantized alike (llama.cpp's own tool calls that "pure"): embedding and head too.
A checkpoint that is a configuration without weights becomes a file of its size with one random row per matrix, repeated.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from peers.llama_names import gguf_tensors

FORMATS = ("f32", "bf16", "f16", "q8_0", "q4_0")


def export(ckpt: Path, out: Path, fmt: str) -> None:
    """Write `out`; it appears whole or not at all."""
    import gguf
    from litgpt.config import Config

    config = Config.from_file(ckpt / "model_config.yaml")
    weights = _weights(ckpt, config)
    kind = gguf.GGMLQuantizationType[fmt.upper()]
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f"{out.name}.{os.getpid()}.part")
    # Each tensor waits in a file, not in memory, until the header is known.
    writer = gguf.GGUFWriter(unfinished, "llama", use_temp_file=True)
    try:
        if (tokenizer := ckpt / "tokenizer.json").is_file():  # for who reads the file as a model of its own
            writer.add_string("tokenizer.huggingface.json", tokenizer.read_text(encoding="utf-8"))
        _write_header(writer, config, gguf.LlamaFileType[f"{'ALL' if fmt == 'f32' else 'MOSTLY'}_{fmt.upper()}"])
        for name, tensor in gguf_tensors(weights, config).items():
            # Norms are a few numbers, and llama.cpp wants them in full.
            wanted = kind if tensor.dim() > 1 else gguf.GGMLQuantizationType.F32
            data = gguf.quants.quantize(_numbers(tensor), wanted)
            if tensor.is_meta:
                data = np.ascontiguousarray(np.broadcast_to(data, (*tensor.shape[:-1], data.shape[-1])))
            writer.add_tensor(name, data, raw_dtype=wanted)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(unfinished, out)
    finally:
        unfinished.unlink(missing_ok=True)


def _weights(ckpt: Path, config: Any) -> dict[str, torch.Tensor]:
    """The checkpoint's, or tensors without numbers where it has none."""
    from litgpt.model import GPT

    if (ckpt / "lit_model.pth").is_file():
        found: dict[str, torch.Tensor] = torch.load(ckpt / "lit_model.pth", weights_only=True, mmap=True)
        return found
    with torch.device("meta"):
        return GPT(config).state_dict()


def _numbers(tensor: torch.Tensor) -> np.ndarray:
    """float32; of a tensor without numbers a norm of ones, or a single row of chance."""
    if not tensor.is_meta:
        return tensor.float().numpy()
    if tensor.dim() == 1:
        return np.ones(tensor.shape, dtype=np.float32)
    return np.random.default_rng(0).standard_normal((1, tensor.shape[-1]), dtype=np.float32) * np.float32(0.02)


def _write_header(writer: Any, config: Any, file_type: Any) -> None:
    writer.add_name(config.name)
    writer.add_context_length(config.block_size)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.n_head)
    writer.add_head_count_kv(config.n_query_groups)
    writer.add_rope_dimension_count(config.head_size)
    writer.add_rope_freq_base(float(config.rope_base))
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.padded_vocab_size)
    writer.add_tokenizer_model("none")
    writer.add_file_type(file_type)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ckpt", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--format", choices=FORMATS, required=True)
    args = parser.parse_args()
    export(args.ckpt, args.out, args.format)


if __name__ == "__main__":
    main()
