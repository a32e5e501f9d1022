#!/usr/bin/env python3
"""accelerate's disk offload, for window.py: greedy tokens of one text, and how long they took. Needs transformers, accelerate.

window_peer.py FOLDER LIMIT_BYTES N_TOKENS N_THREADS
"""

from __future__ import annotations

import json
import sys
import time

PROMPT_LENGTH = 8


def main() -> None:
    folder, limit, n_tokens, n_threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(n_threads)
    begin = time.perf_counter()
    # Embedding and norm stay in memory if the limit is generous; blocks and head are read for every token.
    generous = limit > 1_500_000_000
    device_map = {"model.embed_tokens": "cpu" if generous else "disk", "model.layers": "disk", "model.norm": "cpu",
                  "model.rotary_emb": "cpu", "lm_head": "disk"}  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, device_map=device_map, offload_folder=None, low_cpu_mem_usage=True
    )
    load_s = time.perf_counter() - begin
    ids = torch.arange(1, 1 + PROMPT_LENGTH)[None]
    times, past, found = [], None, []
    with torch.inference_mode():
        for _ in range(n_tokens):
            out = model(ids, past_key_values=past, use_cache=True)
            past, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
            found.append(int(ids))
            times.append(time.perf_counter())
    decode_s = times[-1] - times[0]
    print(json.dumps({"tokens_per_s": (n_tokens - 1) / decode_s, "pass_s": decode_s / (n_tokens - 1), "load_s": load_s,
                      "token_ids": found}))  # fmt: skip


if __name__ == "__main__":
    main()
