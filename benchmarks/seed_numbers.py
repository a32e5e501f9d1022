#!/usr/bin/env python3
"""Two ideas of the seeds that the program does not have, in numbers: compressed rows (thesis, 5.1), and NF4 (Petals).

Rows are those of a run over a text, between blocks: one as a text decodes, and 64 of a prompt, are brought into the bytes of a
message and back. Byte planes: all first bytes of the numbers, then all second ones, and so on.

NF4 (Dettmers et al. 2023): blocks of 64 weights with a float32 scale each, 4.5 bits a weight as int4 and q4_k have. Error: root
of the mean square of what weights change by, over that of the weights.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import process_time
from timeit import timeit
from typing import Any

import numpy as np
import torch
from numpy.linalg import norm

import on_path  # noqa: F401
from mdi.checkpoint.shapes import read_config
from mdi.engine.rows import BlockInt8, RowFloat16
from mdi.engine.sequence import wait_for_event
from mdi.kernels.layout import pack, unpack
from records import ROOT, add_json_flag, save
from rings import opened

N_TOKENS, ROWS, N_CALLS = 640, (1, 64), 200
NF4 = (-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0,
       0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)  # fmt: skip
Way = tuple[Callable[[np.ndarray], bytes], Callable[[bytes, tuple[int, int]], np.ndarray]]


def rows_of(path: Path) -> np.ndarray:
    """Rows between blocks of a run, float32 (2, N_TOKENS, width)."""
    n_layer = read_config(path / "model_config.yaml").n_layer
    pieces: list[np.ndarray] = []
    with opened(path, N_TOKENS + 1, 1, taps=(n_layer // 3, 2 * n_layer // 3), placement="even") as run:
        ids = run.model.codec.encode_prompt((ROOT / "docs" / "architecture.md").read_text())[:N_TOKENS]
        request = run.submit_rows(ids, 0, lambda first, rows: pieces.append(rows[1:].copy()))
        while wait_for_event(request.events).finish_reason is None:
            pass
    return np.concatenate(pieces, axis=1)


def ways() -> dict[str, Way]:
    def planes(x: np.ndarray, n: int) -> np.ndarray:
        return np.ascontiguousarray(x.view(np.uint8).reshape(-1, n).T)

    plain: Way = np.ndarray.tobytes, lambda b, shape: np.frombuffer(b, np.float32).reshape(shape)
    in_planes: Way = (lambda x: planes(x, 4).tobytes(),
                      lambda b, s: planes(np.frombuffer(b, np.uint8), len(b) // 4).view(np.float32).reshape(s))  # fmt: skip

    def of(encoder: Any) -> Way:
        return (lambda x: encoder.encode(x).tobytes()), lambda b, s: encoder.decode(np.frombuffer(b, np.uint8), *s)

    def zipped(way: Way) -> Way:
        return (lambda x: zlib.compress(way[0](x), 1)), lambda b, shape: way[1](zlib.decompress(b), shape)

    half, eight = of(RowFloat16()), of(BlockInt8())
    return {"float32": plain, "float32, zlib": zipped(plain), "float32, byte planes, zlib": zipped(in_planes),
            "16 bits (`fp16`)": half, "16 bits, zlib": zipped(half),
            "8 bits (`int8`)": eight, "8 bits, zlib": zipped(eight)}  # fmt: skip


def compression(rows: np.ndarray) -> Iterator[dict[str, Any]]:
    for name, (encode, decode) in ways().items():
        for n in ROWS:
            frames = [np.ascontiguousarray(one[i : i + n]) for one in rows for i in range(0, N_TOKENS, max(n, 16))]
            sent = [encode(x) for x in frames]
            off = [decode(b, x.shape) - x for b, x in zip(sent, frames, strict=True)]
            x, b = frames[len(frames) // 3], sent[len(frames) // 3]
            calls = partial(encode, x), partial(decode, b, x.shape)
            spent = [timeit(call, timer=process_time, number=N_CALLS) / N_CALLS for call in calls]
            mean, error = sum(map(len, sent)) / len(sent) / n, float(norm(off) / norm(frames))
            yield {"way": name, "rows": n, "bytes": mean, "encode_s": spent[0], "decode_s": spent[1], "error": error}


def in_nf4(weights: np.ndarray) -> np.ndarray:
    blocks, values = weights.reshape(-1, 64), np.array(NF4, dtype=np.float32)
    scale = np.abs(blocks).max(axis=1, keepdims=True)
    nearest = np.searchsorted((values[1:] + values[:-1]) / 2, blocks / np.maximum(scale, 1e-30))
    return (values[nearest] * scale).reshape(weights.shape)


def errors() -> Iterator[dict[str, Any]]:
    rng, shape = np.random.default_rng(1), (1024, 1024)
    trained = torch.load(ROOT / "assets" / "nano-llama" / "lit_model.pth", weights_only=True)
    matrices = [w.float().numpy().reshape(-1, 256) for name, w in trained.items() if w.dim() == 2 and ".h." in name]
    cases = {"nano-llama, all matrices of blocks": np.concatenate(matrices), "normal": rng.standard_normal(shape),
             "Student's t, 5 degrees": rng.standard_t(5, shape)}  # fmt: skip
    for name, case in cases.items():
        weights = case.astype(np.float32)
        found = {"nf4": in_nf4(weights)} | {form: unpack(pack(form, weights)) for form in ("int4", "q4_k")}
        yield {"weights": name, **{form: float(norm(w - weights) / norm(weights)) for form, w in found.items()}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a folder")
    add_json_flag(parser, "seed_numbers")
    args = parser.parse_args()
    rows = rows_of(args.model)
    save(args.json, {"model": args.model.stem, "width": rows.shape[2], "tokens": N_TOKENS,
                     "compression": list(compression(rows)), "errors": list(errors())})  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
