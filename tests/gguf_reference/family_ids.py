#!/usr/bin/env python3
"""Greedy ids of llama.cpp behind a prompt of ids, with caches in float32: where the ids in tests of GGUF files come from.

The first command writes the tests' files with their prompts; the second runs in an environment with cyllama, which brings
llama.cpp compiled:

    PYTHONPATH=src:tests:tests/kernels python tests/gguf_reference/family_ids.py --write FOLDER
    python tests/gguf_reference/family_ids.py FOLDER/*.gguf
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

N_TOKENS = 24
F32 = 0  # of ggml's types


def write(folder: Path) -> None:
    import test_gguf_gpt_oss
    import test_own_families

    prompts = {}
    for name in test_own_families.GREEDY:
        source = test_own_families.made(name, folder)
        test_own_families.write_gguf(folder / f"{name}.gguf", source)
        prompts[name] = test_own_families.prompt_of(source)
    test_gguf_gpt_oss.write_whole(folder / "gpt-oss.gguf")
    prompts["gpt-oss"] = test_gguf_gpt_oss.PROMPT
    for name, prompt in prompts.items():
        (folder / f"{name}.json").write_text(json.dumps(prompt), encoding="utf-8")


def greedy(path: Path, prompt: list[int]) -> list[int]:
    from cyllama.llama import llama_cpp

    model_params, params = llama_cpp.LlamaModelParams(), llama_cpp.LlamaContextParams()
    model_params.n_gpu_layers = 0
    model_params.use_extra_bufts = False
    params.n_ctx, params.n_threads, params.n_threads_batch = 256, 1, 1
    params.type_k = params.type_v = F32
    context = llama_cpp.LlamaContext(llama_cpp.LlamaModel(str(path), model_params), params)
    sampler = llama_cpp.LlamaSampler(llama_cpp.LlamaSamplerChainParams())
    sampler.add_greedy()
    ids, rows = list(prompt), list(prompt)
    for _ in range(N_TOKENS):
        batch = llama_cpp.LlamaBatch(n_tokens=len(rows), embd=0, n_seq_max=1)
        batch.set_batch(rows, n_past=len(ids) - len(rows), logits_all=False)
        batch.set_last_logits_to_true()
        context.decode(batch)
        rows = [sampler.sample(context, -1)]
        ids += rows
    return ids[len(prompt) :]


if __name__ == "__main__":
    if sys.argv[1] == "--write":
        write(Path(sys.argv[2]))
    for name in [] if sys.argv[1] == "--write" else sys.argv[1:]:
        path = Path(name)
        print(path.stem, greedy(path, json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))))
