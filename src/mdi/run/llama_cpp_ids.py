"""A program for an interpreter that has llama-cpp-python: ids of texts, and the best tokens at each of their positions.

It reads an object from stdin (`file`, a GGUF file; `texts`; `n_new`, greedy tokens behind each; `n_best`) and writes one to
stdout: `version`, and for each text its `ids` with the new ones, `n_prompt`, and `best`, for each position lists of an id and
the natural logarithm of its probability. A process of its own, because a build that does not fit the processor ends it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

_FLOAT32 = 0  # of ggml's types


def _best(logits: np.ndarray, n: int) -> list[tuple[int, float]]:
    highest = logits.max()
    total = highest + np.log(np.exp(logits - highest, dtype=np.float64).sum())
    return [(int(i), float(logits[i] - total)) for i in np.argsort(-logits, kind="stable")[:n]]


def found(asked: dict[str, Any]) -> dict[str, Any]:
    import llama_cpp

    room = (
        max(len(text.encode()) for text in asked["texts"]) + asked["n_new"] + 2
    )  # a token has a byte, but for marks of ends
    model = llama_cpp.Llama(
        asked["file"], n_ctx=room, n_batch=room, n_ubatch=room, logits_all=True, verbose=False, n_gpu_layers=0,
        type_k=_FLOAT32, type_v=_FLOAT32,
    )  # fmt: skip
    texts = []
    for text in asked["texts"]:
        ids = list(model.tokenize(text.encode(), add_bos=True, special=False))
        n_prompt = len(ids)
        model.reset()
        model.eval(ids)
        best = [_best(row, asked["n_best"]) for row in model.scores[:n_prompt]]
        for _ in range(asked["n_new"]):
            ids.append(best[-1][0][0])
            model.eval(ids[-1:])
            best.append(_best(model.scores[len(ids) - 1], asked["n_best"]))
        texts.append({"ids": ids, "n_prompt": n_prompt, "best": best})
    return {"version": llama_cpp.__version__, "texts": texts}


if __name__ == "__main__":
    print(json.dumps(found(json.load(sys.stdin))))
