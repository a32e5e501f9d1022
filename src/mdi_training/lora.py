"""Low-rank adaptation with litgpt's layers: a GPT with adapters, and its weights with the adapters merged in.

Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models (2021), section 4; litgpt/lora.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict

import torch
from litgpt import lora
from litgpt.config import Config
from litgpt.model import GPT

from mdi.errors import CheckpointError, Code, UsageError
from mdi_training.training_settings import LORA_TARGETS, LoraSettings

ADAPTER_NAME = "lit_model.pth.lora"
# Layers of litgpt's block -> modules of transformers' Llama.
MODULES = {
    "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "attn.proj": ("self_attn.o_proj",),
    "mlp.fc_1": ("mlp.gate_proj",), "mlp.fc_2": ("mlp.up_proj",), "mlp.proj": ("mlp.down_proj",),
}  # fmt: skip
_BLOCK = re.compile(r"transformer\.h\.(\d+)\.(.*)")


def add_adapters(config: Config, settings: LoraSettings, seed: int) -> GPT:
    """A GPT whose chosen matrices have adapters, the only weights that are trained; B is zero, so it computes the same.

    The base weights are still random: load them next with `load_base`.

    Raises:
        UsageError: litgpt has no adapters for a model of this shape.
    """
    if config.latent_attention is not None:
        raise UsageError(
            f"--lora-r: litgpt has no adapters for latent attention ({config.name}); train without", code=Code.FLAGS
        )
    flags = {f"lora_{name}": name in settings.targets for name in LORA_TARGETS}
    shape = lora.Config(
        **asdict(config), lora_r=settings.r, lora_alpha=settings.alpha, lora_dropout=settings.dropout, **flags
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = lora.GPT(shape)
    lora.mark_only_lora_as_trainable(model)
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError(f"--lora-targets {','.join(settings.targets)}: this model has none of these matrices")
    return model


def load_base(model: GPT, state: Mapping[str, torch.Tensor]) -> None:
    """Loads the weights of a plain GPT into one with adapters.

    Raises:
        CheckpointError: they are not the weights of such a model.
    """
    try:
        missing, unexpected = model.load_state_dict(dict(state), strict=False)
    except RuntimeError as err:
        raise CheckpointError(f"the weights do not fit a model with adapters: {str(err).splitlines()[-1]}") from err
    absent = [name for name in missing if not lora.lora_filter(name, None)]
    if absent or unexpected:
        raise CheckpointError(f"litgpt's model with adapters has different weights: {[*absent, *unexpected][0]}")


def trained_weights(model: GPT) -> dict[str, torch.Tensor]:
    """The trained weights: only the adapters if there are some, else everything."""
    state: dict[str, torch.Tensor] = model.state_dict()
    if not has_adapters(model):
        return state
    return {name: tensor for name, tensor in state.items() if lora.lora_filter(name, tensor)}


@torch.no_grad()
def merged_weights(model: GPT) -> dict[str, torch.Tensor]:
    """The state dict of a plain GPT, the adapters added to the matrices they belong to; `model` stays as it is."""
    state = {name: tensor for name, tensor in model.state_dict().items() if not lora.lora_filter(name, tensor)}
    for name, module in model.named_modules():
        if isinstance(module, lora.LoRALinear) and module.r > 0 and any(_enabled(module)):
            key = f"{name}.linear.weight"
            state[key] = state[key] + module.get_lora_AB()
    return {_plain_name(name, model): tensor for name, tensor in state.items()}


def peft_tensors(model: GPT) -> dict[str, torch.Tensor]:
    """The adapters under the names of PEFT and transformers' Llama, which `--adapter` and peft read; of blocks only.

    A (rank, inputs) and B (outputs, rank) of each matrix; queries, keys and values apart. {} if one belongs to the head, or
    transformers' names for such blocks are not those of Llama.
    """
    found: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if not isinstance(module, lora.LoRALinear) or module.r <= 0 or not any(_enabled(module)):
            continue
        match = _BLOCK.fullmatch(name)
        modules = MODULES.get(match[2]) if match else None
        if match is None or modules is None:
            return {}
        own = [one for one, is_there in zip(modules, _enabled(module), strict=True) if is_there]
        inputs = module.lora_A.detach().chunk(len(own))
        outputs = module.lora_B.detach().split(getattr(module, "qkv_shapes", [len(module.lora_B)]))
        for one, a, b in zip(own, inputs, outputs, strict=True):
            path = f"base_model.model.model.layers.{match[1]}.{one}"
            found |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
    return found


def peft_settings(model: GPT, tensors: Mapping[str, torch.Tensor]) -> dict[str, object]:
    """adapter_config.json of these tensors."""
    shape = model.config
    names = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors})
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": shape.lora_r, "lora_alpha": shape.lora_alpha,
        "lora_dropout": shape.lora_dropout, "target_modules": names, "bias": "none", "inference_mode": True,
    }  # fmt: skip


def has_adapters(model: GPT) -> bool:
    return isinstance(model, lora.GPT)


def _enabled(module: lora.LoRALinear) -> tuple[bool, ...]:
    return tuple(getattr(module, "enable_lora", (True,)))


def _plain_name(name: str, model: GPT) -> str:
    """litgpt keeps a layer with adapters one level deeper: attn.qkv.linear.weight for attn.qkv.weight."""
    return name.replace(".linear.", ".") if has_adapters(model) else name
