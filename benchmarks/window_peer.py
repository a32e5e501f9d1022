#!/usr/bin/env python3
"""accelerate's disk offload for window.py: greedy tokens of one text, and how long they took.

window_peer.py FOLDER LIMIT_BYTES N_TOKENS N_THREADS
"""

from __future__ import annotations

import json
import sys
import time

PROMPT_LENGTH = 8


def disk_bytes() -> int:
    """What the disk has given to this process so far, pages of mapped files among it."""
    with open("/proc/self/io", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("read_bytes:"))


def main() -> None:
    folder, (limit, n_tokens, n_threads) = sys.argv[1], map(int, sys.argv[2:])
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(n_threads)
    begin = time.perf_counter()
    # Embedding and norm stay in memory if the limit is generous; blocks and head are read for every token.
    generous = limit > 1_500_000_000
    device_map = {"model.embed_tokens": "cpu" if generous else "disk", "model.layers": "disk", "model.norm": "cpu",
                  "model.rotary_emb": "cpu", "lm_head": "disk"}  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, low_cpu_mem_usage=True, device_map=device_map, offload_folder=None
    )
    load_s = time.perf_counter() - begin
    ids = torch.arange(1, 1 + PROMPT_LENGTH)[None]
    times, past, found, read = [], None, [], []
    with torch.inference_mode():
        for _ in range(n_tokens):
            out = model(ids, past_key_values=past, use_cache=True)
            past, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
            found.append(int(ids))
            times.append(time.perf_counter())
            read.append(disk_bytes())
    decode_s, n_passes = times[-1] - times[0], n_tokens - 1
    print(json.dumps({"tokens_per_s": n_passes / decode_s, "pass_s": decode_s / n_passes, "load_s": load_s,
                      "disk_bytes_per_token": (read[-1] - read[0]) / n_passes,
                      "disk_bytes_s": (read[-1] - read[0]) / decode_s, "token_ids": found}))  # fmt: skip


if __name__ == "__main__":
    main()
