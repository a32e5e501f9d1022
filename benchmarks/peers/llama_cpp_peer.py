"""llama.cpp through llama-cpp-python's low-level interface: one sequence, or many in one batch.

Options: {"gguf": FILE, "threads": 1, "cache": "f16", "instructions": "avx2"}. `cache` is a key of CACHE_TYPES, the number type
of keys and values; `instructions` the set for which the library must have been built. Attention is always flash attention.
LLAMA_CPP_LIB_PATH in the environment is the folder of the library to use; at its end the system tells that folder's name and
what the library says of its build.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from peers.protocol import Case, serve

N_BATCH = 2048  # tokens of a call at most; the default of llama.cpp's own tools, as are its pieces of 512
CACHE_TYPES = {
    "f32": llama_cpp.GGML_TYPE_F32,
    "f16": llama_cpp.GGML_TYPE_F16,
    "bf16": 30,  # GGML_TYPE_BF16 of ggml.h, which llama_cpp does not name
    "q8_0": llama_cpp.GGML_TYPE_Q8_0,
}


class LlamaCppPeer:
    """See the module. Everything that is not named here is llama.cpp's default: its own kernels."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._n_threads = int(options["threads"])
        self._cache_type = CACHE_TYPES[options.get("cache", "f16")]
        # The callback must live as long as it may be called.
        self._log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._build = llama_cpp.llama_print_system_info().decode()
        if (named := options.get("instructions")) and ("AVX512 = 1" in self._build) != (named == "avx512"):
            raise ValueError(f"the libllama.so of this process was not built for {named}: {self._build}")
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(options["gguf"].encode(), params)
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {options['gguf']}")
        self._n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(N_BATCH, 0, 1)

    def run(self, case: Case) -> dict[str, Any]:
        context = self._context(case)
        try:
            return self._generate(context, case)
        finally:
            llama_cpp.llama_free(context)

    def _context(self, case: Case) -> Any:
        params = llama_cpp.llama_context_default_params()
        room = -(-case.n_positions // 256) * 256  # what llama.cpp rounds a sequence's share up to
        params.n_ctx = room * case.n_sequences
        params.n_batch = N_BATCH
        params.n_seq_max = case.n_sequences
        params.n_threads = params.n_threads_batch = self._n_threads
        params.type_k = params.type_v = self._cache_type
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.no_perf = True
        context = llama_cpp.llama_init_from_model(self._model, params)
        if not context:
            raise ValueError(f"llama.cpp cannot make a context of {params.n_ctx} tokens")
        return context

    def _generate(self, context: Any, case: Case) -> dict[str, Any]:
        sequences = range(case.n_sequences)
        prompts = [case.prompt(i) for i in sequences]
        ids: list[list[int]] = [[] for _ in sequences]
        times_s: list[list[float]] = [[] for _ in sequences]
        begin = time.perf_counter()

        def step(rows: list[tuple[int, int, int, bool]]) -> None:
            """Rows of (sequence, position, token, whether its logits are wanted), at most N_BATCH of them."""
            batch = self._batch
            batch.n_tokens = len(rows)
            for i, (sequence, position, token, wanted) in enumerate(rows):
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = sequence
            status = llama_cpp.llama_decode(context, batch)
            if status:
                raise ValueError(f"llama_decode failed with status {status}")
            for i, (sequence, _, _, wanted) in enumerate(rows):
                if wanted:
                    ids[sequence].append(self._best(context, i))
            now = time.perf_counter() - begin
            for sequence, _, _, wanted in rows:
                if wanted:
                    times_s[sequence].append(now)

        for rows in _prompt_batches(prompts):
            step(rows)
        for n in range(case.n_new - 1):
            step([(sequence, case.n_prompt + n, ids[sequence][-1], True) for sequence in sequences])
        return {"times_s": times_s, "ids": ids}

    def _best(self, context: Any, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(context, row)
        return int(np.ctypeslib.as_array(logits, (self._n_vocab,)).argmax())

    def end(self) -> dict[str, Any]:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_model_free(self._model)
        folder = os.environ.get("LLAMA_CPP_LIB_PATH")
        return {
            "library": Path(folder).name if folder else f"llama-cpp-python {llama_cpp.__version__}",
            "build": self._build,
        }


def _prompt_batches(prompts: list[list[int]]) -> list[list[tuple[int, int, int, bool]]]:
    """The rows of all prompts, N_BATCH at a time."""
    rows = [
        (sequence, position, token, position == len(prompt) - 1)
        for sequence, prompt in enumerate(prompts)
        for position, token in enumerate(prompt)
    ]
    return [rows[i : i + N_BATCH] for i in range(0, len(rows), N_BATCH)]


if __name__ == "__main__":
    serve(LlamaCppPeer)
