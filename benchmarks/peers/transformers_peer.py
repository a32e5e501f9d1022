"""transformers' own generation, one sequence or a batch.

Options: {"ckpt": DIR, "dtype": "float32", "threads": 1}; the checkpoint is litgpt's, of Llama's kind.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from peers.llama_names import hf_tensors, plain_weights
from peers.protocol import Case, serve


class _Clock:
    """What transformers calls a streamer; the first call brings the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class TransformersPeer:
    """See the module."""

    def __init__(self, options: dict[str, Any]) -> None:
        from litgpt.config import Config
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.set_num_threads(options["threads"])
        folder, dtype = Path(options["ckpt"]), getattr(torch, options["dtype"])
        c = Config.from_file(folder / "model_config.yaml")
        config = LlamaConfig(
            vocab_size=c.padded_vocab_size, hidden_size=c.n_embd, intermediate_size=c.intermediate_size,
            num_hidden_layers=c.n_layer, num_attention_heads=c.n_head, num_key_value_heads=c.n_query_groups,
            max_position_embeddings=c.block_size, rms_norm_eps=c.norm_eps, rope_theta=float(c.rope_base),
            tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None, dtype=dtype,
        )  # fmt: skip
        with torch.device("meta"):
            self._model = LlamaForCausalLM(config)
        named = hf_tensors(plain_weights(folder, dtype), c)
        self._model.load_state_dict(named, assign=True, strict=True)
        rotary = self._model.model.rotary_emb
        self._model.model.rotary_emb = type(rotary)(config)  # its tables are no weights, and were made on "meta"
        self._model.eval()

    def run(self, case: Case) -> dict[str, Any]:
        ids = torch.tensor([case.prompt(i) for i in range(case.n_sequences)])
        clock = _Clock()
        begin = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=case.n_new,
                min_new_tokens=case.n_new, streamer=clock, pad_token_id=0,
            )  # fmt: skip
        return {"times_s": [[t - begin for t in clock.times[1:]]] * case.n_sequences}

    def end(self) -> dict[str, Any]:
        return {}


if __name__ == "__main__":
    serve(TransformersPeer)
