#!/usr/bin/env python3
"""Write tests/old/gpt2_reference: a tiny random GPT-2 as transformers saves it, and the logits that transformers computes.

Run by hand, where transformers is installed; the suite reads the files. transformers 5.16.1 made the ones that are there.
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

FOLDER = Path(__file__).parent / "gpt2_reference"


def main() -> None:
    torch.manual_seed(11)
    config = transformers.GPT2Config(
        vocab_size=97, n_positions=48, n_embd=32, n_layer=5, n_head=4, layer_norm_epsilon=3e-5, initializer_range=0.3,
        bos_token_id=96, eos_token_id=96,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.dim() == 1:  # norms and biases start as ones and zeros, which would hide a mistake
                tensor.add_(torch.randn_like(tensor) * (0.05 if "ln_f" in name else 0.2))
            elif (
                ".h." in name
            ):  # what the blocks add must outweigh the token itself, or it would be said again and again
                tensor.mul_(2.5)
    model.save_pretrained(FOLDER)
    (FOLDER / "generation_config.json").unlink(missing_ok=True)
    ids = torch.randint(0, 97, (3, 48))
    with torch.no_grad():
        logits = model(ids).logits
    found = {"ids": ids, "logits": logits}
    save_file(found, FOLDER / "expected.safetensors", {"made_by": f"transformers {transformers.__version__}"})


if __name__ == "__main__":
    main()
