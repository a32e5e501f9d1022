"""Checkpoints of named shapes with random weights: speed does not depend on what the weights say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import on_path  # noqa: F401
from mdi.model.plain import spec_of

LLAMA = {"norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "parallel_residual": False, "bias": False}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny-1m": {"n_layer": 3, "n_embd": 128, "n_head": 8, "n_query_groups": 2, "intermediate_size": 384},
    "small-30m": {"n_layer": 8, "n_embd": 512, "n_head": 8, "n_query_groups": 4, "intermediate_size": 1408},
    "nano-llama-304m": {"n_layer": 12, "n_embd": 1024, "n_head": 16, "n_query_groups": 4, "intermediate_size": 5632},
    "tiny-llama-1.1b": {"n_layer": 22, "n_embd": 2048, "n_head": 32, "n_query_groups": 4, "intermediate_size": 5632},
    "llama-2-7b": {"n_layer": 32, "n_embd": 4096, "n_head": 32, "n_query_groups": 32, "intermediate_size": 11008},
    "tiny-3m": {"n_layer": 4, "n_embd": 256, "n_head": 8, "n_query_groups": 8, "intermediate_size": 704},
}
_LINKS = {  # little to compute, and rows a sixteenth as wide as those of BLOOM 176B
    "n_embd": 896, "n_head": 1, "head_size": 64, "n_query_groups": 1, "intermediate_size": 64, "vocab_size": 512,
    "padded_vocab_size": 512, "block_size": 4096,
}  # fmt: skip
SHAPES |= {f"links-{n}": {"n_layer": n, **_LINKS} for n in (3, 10, 12)}
SHAPES["twelve-blocks"] = {**SHAPES["small-30m"], "n_layer": 12, "block_size": 512, **dict.fromkeys(
    ("vocab_size", "padded_vocab_size"), 2048
)}  # fmt: skip
CONTEXT, DEEP_CONTEXT = 2048, 8448
DEEP = "-deep"  # what names of shapes end with that have a context of DEEP_CONTEXT
SHAPES.update({
    name + DEEP: {**SHAPES[name], "block_size": DEEP_CONTEXT} for name in ("tiny-1m", "small-30m", "tiny-llama-1.1b")
})  # fmt: skip
# As config.json has them. Three of four blocks have a delta net, as in the published models of the family.
HF_SHAPES: dict[str, dict[str, Any]] = {
    "qwen-3.5-small": {
        "model_type": "qwen3_5_text", "head_dim": 64, "hidden_size": 512, "intermediate_size": 1408, "vocab_size": 1024,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
        "linear_value_head_dim": 64, "max_position_embeddings": 32768, "num_attention_heads": 8, "num_hidden_layers": 8,
        "num_key_value_heads": 2, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6, "rope_theta": 10000000,
    },
}  # fmt: skip
PACKED_ONLY = ("llama-2-7b", "tiny-3m")  # made in packed formats, without plain weights: see random_packed
DTYPE = "bfloat16"  # of plain weights
VOCABULARY = 32000
_DONE = "made.json"


def config_of(shape: str) -> Any:
    """litgpt's Config of a shape; of what litgpt lacks our own."""
    if shape in HF_SHAPES:
        from mdi.checkpoint.hfconfig import derive_config

        return derive_config(HF_SHAPES[shape], shape, Path(shape))
    from litgpt.config import Config

    words = {"vocab_size": VOCABULARY, "padded_vocab_size": VOCABULARY, "block_size": CONTEXT}
    return Config(name=shape, rotary_percentage=1.0, padding_multiple=64, **LLAMA, **{**words, **SHAPES[shape]})


def n_weights(shape: str) -> tuple[int, int]:
    """Weights of (all blocks, the head) that a token is multiplied with; of the embedding it reads one row."""
    s = SHAPES[shape]
    n_embd, head_size = s["n_embd"], s["n_embd"] // s["n_head"]
    attention = n_embd * head_size * (2 * s["n_head"] + 2 * s["n_query_groups"])
    return s["n_layer"] * (attention + 3 * n_embd * s["intermediate_size"]), n_embd * VOCABULARY


def make_checkpoint(folder: Path, shape: str) -> None:
    """A LitGPT checkpoint with random bfloat16 weights and a tokenizer of bytes; made once, and kept.

    Every bfloat16 number is a float32 number, so that all systems read the same weights in every format. All of it
    stands in memory while it is made. Shapes in PACKED_ONLY get no weights.
    """
    if (folder / _DONE).is_file():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = config_of(shape)
    if shape not in PACKED_ONLY:
        _make_weights(folder, config)
    _write_rest(folder, shape, config)


def make_chunks(folder: Path, shape: str, form: str, n_nodes: int) -> None:
    """Packed chunks of a shape, an even cut over so many nodes, and what a run needs besides."""
    from mdi.block_ranges import default_split
    from mdi.checkpoint.chunks import write_chunks
    from random_packed import RandomPacked

    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(shape)
    source = RandomPacked(_own(config), form)
    write_chunks(source, folder, default_split(spec_of(source.config), n_nodes))
    _write_rest(folder, shape, config)


def _write_rest(folder: Path, shape: str, config: Any) -> None:
    import yaml

    (folder / "model_config.yaml").write_text(yaml.safe_dump(_own(config).plain()), encoding="utf-8")
    write_tokenizer(folder)
    (folder / _DONE).write_text(json.dumps({"shape": shape}))


def _own(config: Any) -> Any:
    from mdi.model.plain import ModelConfig

    if isinstance(config, ModelConfig):
        return config
    return ModelConfig.from_litgpt(config)


def _make_weights(folder: Path, config: Any) -> None:
    import torch

    from mdi.checkpoint.shapes import model_shapes

    if config.name in SHAPES:
        from litgpt.model import GPT

        with torch.device("meta"):
            names = {name: tuple(t.shape) for name, t in GPT(config).state_dict().items()}
    else:
        names = model_shapes(_own(config), config.name)
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, DTYPE)
    weights = {
        name: torch.ones(shape, dtype=dtype)
        if len(shape) == 1
        else torch.empty(shape, dtype=dtype).normal_(0, 0.02, generator=generator)
        for name, shape in names.items()
    }
    torch.save(weights, folder / "lit_model.pth")


def write_tokenizer(folder: Path) -> None:
    """Bytes, and nothing that ends a text: every run has the length that it is asked for."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
