"""Writes tiny random models whose weights the compressed-tensors package has quantized and packed, and what it unpacks.

`make references` runs this in its environment, as it does write_models.py:

    .venv-references/bin/python tests/references/write_packed.py FOLDER

For each case, FOLDER gets a directory with config.json and model.safetensors as they are published, and in `plain` the same
model with the numbers that compressed-tensors unpacks. `logits.npy` has transformers' logits with these numbers behind each of
the ids in `ids.json`, float32 (ids, vocabulary). `version.txt` is the hash of this file.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "vocab_size": 320, "max_position_embeddings": 160, "bos_token_id": None, "eos_token_id": None,
    "tie_word_embeddings": False,
}  # fmt: skip
N_IDS = 60
INT4 = {"num_bits": 4, "type": "int", "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}

# directory -> how weights are quantized, and the type of the model and its scales
CASES: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "int4-groups-of-32": ({**INT4, "strategy": "group", "group_size": 32}, torch.float32),
    "int4-groups-of-32-bfloat16": ({**INT4, "strategy": "group", "group_size": 32}, torch.bfloat16),
    "int4-groups-of-64-bfloat16": ({**INT4, "strategy": "group", "group_size": 64}, torch.bfloat16),
    "int4-rows": ({**INT4, "strategy": "channel"}, torch.float32),
    "fp8-rows": (FP8, torch.float32),
}  # fmt: skip


def version() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def write(name: str, folder: Path) -> None:
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    settings, dtype = CASES[name]
    torch.manual_seed(list(CASES).index(name))
    model = LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="eager")).eval()
    for key, parameter in sorted(model.named_parameters()):
        parameter.normal_(0, 0.3)
        if "norm" in key:
            parameter += 1
    model.to(dtype)
    inputs = QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True) if settings is FP8 else None
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**settings), input_activations=inputs)
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            weight = module.weight
            groups = weight.unflatten(1, (-1, settings.get("group_size", weight.shape[1])))
            scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
            module.weight_scale.data = scale.to(dtype)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: tensor.contiguous() for key, tensor in model.state_dict().items()}, folder / "model.safetensors")
    model.config.save_pretrained(folder)
    compressor.update_config(str(folder))

    compressor.decompress_model(model)
    values = {key: tensor for key, tensor in model.state_dict().items() if key.endswith("weight")}
    plain = LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="eager")).eval()
    plain.load_state_dict({key: tensor.float() for key, tensor in values.items()})
    plain.save_pretrained(folder / "plain")
    ids = torch.randint(1, SIZES["vocab_size"], (N_IDS,), generator=torch.Generator().manual_seed(1))
    logits = plain(ids[None], use_cache=False).logits[0]
    (folder / "ids.json").write_text(json.dumps(ids.tolist()), encoding="utf-8")
    np.save(folder / "logits.npy", logits.numpy())
    print(
        f"{name}: {folder / 'model.safetensors'} of {(folder / 'model.safetensors').stat().st_size} bytes", flush=True
    )


def main() -> None:
    folder = Path(sys.argv[1])
    with torch.no_grad():
        for name in CASES:
            write(name, folder / name)
    (folder / "version.txt").write_text(version(), encoding="utf-8")


if __name__ == "__main__":
    main()
