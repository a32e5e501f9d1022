"""litgpt's own generation, one sequence.

Options: {"ckpt": DIR, "dtype": "float32", "max_length": 64, "threads": 1}
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from peers.llama_names import plain_weights
from peers.protocol import Case, serve


class LitgptPeer:
    """See the module."""

    def __init__(self, options: dict[str, Any]) -> None:
        from litgpt.config import Config
        from litgpt.model import GPT

        torch.set_num_threads(options["threads"])
        folder, self._dtype = Path(options["ckpt"]), getattr(torch, options["dtype"])
        with torch.device("meta"):
            self._model = GPT(Config.from_file(folder / "model_config.yaml"))
        self._model.load_state_dict(plain_weights(folder, self._dtype), assign=True)
        self._model.max_seq_length = options["max_length"]
        self._model.cos, self._model.sin = (t.to(self._dtype) for t in self._model.rope_cache())

    def run(self, case: Case) -> dict[str, Any]:
        from litgpt.generate.base import generate_fn

        if case.n_sequences != 1:
            raise ValueError("litgpt generates one sequence at a time")
        times_s, found = [], []
        with torch.inference_mode():
            self._model.set_kv_cache(1, max_seq_length=case.n_positions, dtype=self._dtype)
            begin = time.perf_counter()
            ids = torch.tensor(case.prompt(0))
            for token in generate_fn(
                self._model, ids, case.n_positions, temperature=0.0, top_k=1, top_p=0.0,
                include_prompt=False, include_eos=False,
            ):  # fmt: skip
                times_s.append(time.perf_counter() - begin)
                found.append(int(token))
        return {"times_s": [times_s], "ids": [found]}

    def end(self) -> dict[str, Any]:
        return {}


if __name__ == "__main__":
    serve(LitgptPeer)
