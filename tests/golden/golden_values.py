"""What must not change, of every model that the tests know: one function for each aspect, which gives plain values.

Each goes through as few functions of the package as it can: where one of these moves, only that function follows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from litgpt.config import name_to_config
from safetensors.numpy import save_file

from families import FAMILIES, config_of
from gguf_files import gguf_families, write_gguf
from mdi.checkpoint.adapters import adapted_rows
from mdi.checkpoint.derived import PackedSource
from mdi.checkpoint.ggufsource import GgufSource
from mdi.checkpoint.hfconfig import PUBLISHED, choose_config, derive_config
from mdi.checkpoint.manifest import config_hash
from mdi.checkpoint.packing import Packing
from mdi.checkpoint.shapes import model_shapes
from mdi.checkpoint.source import open_source
from mdi.checkpoint.weights import WeightSource
from mdi.control.messages import PartSpec
from mdi.control.swarm import Announced, ModelFacts, weights_id
from mdi.errors import MdiError
from mdi.families.registry import written
from mdi.kernels.weight_formats import FORMATS, LAYOUTS
from mdi.model.caches import CACHE_TYPES, cache_classes
from mdi.model.plain import ModelConfig, spec_of
from mdi.placement.model import ModelShape, Workload, model_shape
from mdi.placement.plan import plan
from mdi.placement.profile import boards
from mdi.spec.arithmetic import Arithmetic
from mdi.spec.model_id import Formats, ModelId
from mdi.tensor.shares import Share, piece_of, share_out, why_not_shared_out
from mdi_training.lora import add_adapters, peft_settings, peft_tensors
from mdi_training.training_settings import LORA_TARGETS, LoraSettings
from real_configs import OFFICIAL, OWN, REAL, REFUSED
from references import write_latent, write_logits, write_models
from tiny_checkpoint import plain as untupled
from tiny_models import HF_KINDS, hf_config, hf_state, write_hf

HERE = Path(__file__).parent
REFERENCES = HERE / "references.json"  # config.json of each model of `make references`, as transformers wrote it
FOLDERS = {"models": write_models.version, "logits": write_logits.version, "latent": write_latent.version}
WRITTEN = HERE.parents[1] / ".venv-references"

Json = Any
# Modules of transformers' models, which adapters name.
MODULES = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.qkv_proj", "self_attn.o_proj", "self_attn.dense",
    "self_attn.out_proj", "attention.query_key_value", "attention.dense", "self_attention.query_key_value",
    "self_attention.dense", "attn.c_attn", "attn.c_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj", "mlp.down_proj",
    "mlp.fc1", "mlp.fc2", "fc1", "fc2", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", "mlp.c_fc", "mlp.c_proj", "mlp.gate",
    "mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj",
)  # fmt: skip


def hash_of(value: Json) -> str:
    """Short: it only has to differ."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


# Models


def reference_configs() -> dict[str, Json]:
    return dict(json.loads(REFERENCES.read_text(encoding="utf-8")))


def written_references() -> dict[str, Path]:
    """The folders that transformers has written here, if they are those of today."""
    found = {}
    for kind, version in FOLDERS.items():
        stamp = WRITTEN / kind / "version.txt"
        if stamp.is_file() and stamp.read_text(encoding="utf-8") == version():
            found |= {path.parent.name: path.parent for path in sorted((WRITTEN / kind).glob("*/config.json"))}
    return found


def large_models() -> Iterator[tuple[str, Callable[[], ModelConfig]]]:
    """By a name that says where they come from; nothing is computed with them."""

    def derived(hf: Json) -> Callable[[], ModelConfig]:
        return lambda: derive_config(hf, "my-model", Path("config.json"))

    for name, fields in name_to_config.items():
        yield f"litgpt/{name}", lambda fields=fields: ModelConfig.of(fields)  # type: ignore[misc]
    for form, (_, hf) in {**REAL, **OFFICIAL, **OWN, **REFUSED}.items():
        yield f"real/{form}", derived(hf)
    for name, hf in PUBLISHED.items():
        yield f"published/{name}", derived(hf)


def small_models(folder: Path) -> Iterator[tuple[str, Callable[[], ModelConfig]]]:
    for family in FAMILIES:
        yield f"tiny/{family}", lambda family=family: ModelConfig.from_litgpt(config_of(family))  # type: ignore[misc]
    for name, hf in reference_configs().items():
        path = folder / "references" / name
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(hf), encoding="utf-8")
        yield f"reference/{name}", lambda path=path: choose_config(path)  # type: ignore[misc]


# Aspects


def names(config: ModelConfig) -> Json:
    return sorted([name, *shape] for name, shape in model_shapes(config, "golden").items())


def plain_form(config: ModelConfig) -> Json:
    return untupled(config.plain())


def hash_of_config(config: ModelConfig) -> Json:
    return config_hash(config)


def caches(config: ModelConfig) -> Json:
    """Bytes of a text of some lengths, of each node of an even split as far as it is allowed, by the type of caches."""
    found, allowed = {}, spec_of(config).allowed_cuts()
    for n_nodes in (1, 2, 3):
        bounds = [cut for i in range(n_nodes + 1) if (cut := config.n_layer * i // n_nodes) in allowed]
        for cache_type in CACHE_TYPES:
            for start, stop in zip(bounds, bounds[1:], strict=False):
                classes, _ = cache_classes(spec_of(config), start, stop, cache_type)
                sizes = [sum(one.n_bytes(length) for one in classes) for length in (1, 100, 5000)]
                found[f"{cache_type} {start}-{stop} of {n_nodes}"] = sizes
    return found


def shares(config: ModelConfig) -> Json:
    """Bounds, and the shape of each tensor of the first and the last block and of the head, on each node."""
    if (reason := why_not_shared_out(config)) is not None:
        return reason
    ends = (f"transformer.h.{config.n_layer - 1}.", "transformer.h.0.", "lm_head.", "transformer.ln_f")
    some = {name: shape for name, shape in model_shapes(config, "golden").items() if name.startswith(ends)}
    some = {name: shape for name, shape in some.items() if ".experts." not in name or ".experts.1." in name}
    found = []
    for parts, has_head in (((1, 1), True), ((1, 1, 1), True), ((2, 1, 1), False)):
        bounds = share_out(config, parts, is_head_shared=has_head)
        found.append([bounds.heads, bounds.columns, bounds.vocabulary])
        for rank in range(len(parts)):
            share = Share(bounds, rank, config)
            pieces = [(name, piece_of(name, share), shape) for name, shape in some.items()]
            for form in (None, "int4"):
                found.append(sorted([n, *p.shape(s, form)] for n, p, s in pieces if p is not None))  # type: ignore[arg-type]
    return found


def plans(config: ModelConfig) -> Json:
    """Over three boards with more memory and unequal speeds; numbers rounded, words left out."""
    profile = boards()
    speeds = (5e9, 9e9, 3e9)
    nodes = (
        replace(node, memory_bytes=10**11 * (i + 1), read_bytes_s=speed)
        for i, (node, speed) in enumerate(zip(profile.nodes, speeds, strict=True))
    )
    profile = replace(profile, nodes=tuple(nodes))
    shape = replace(model_shape(config, "int8"), name="", config_hash="")
    try:
        told = plan(profile, shape, Workload(4, 1500)).to_json()
    except MdiError as e:
        return type(e).__name__
    told = {
        key: told[key]
        for key in set(told) - {"model", "limit", "advice", "notes", "parallel", "first_token", "clients"}
    }
    for node in told["nodes"]:
        del node["read_bytes"], node["read_s"], node["expert_hits"]  # of windows
    return _rounded([told, _sizes(shape)])


def sizes(config: ModelConfig) -> Json:
    """Bytes and multiplications of a model in each format."""
    return {form: _rounded(_sizes(model_shape(config, form))) for form in FORMATS}


def _sizes(shape: ModelShape) -> Json:
    blocks = [(b.weight_bytes, b.load_bytes, b.macs, b.cache_bytes(5000), b.read_bytes(5000)) for b in shape.blocks]
    return [shape.weight_bytes, shape.head_macs, shape.row_bytes, shape.work_row_bytes, shape.table_bytes, blocks]


def _rounded(value: Json) -> Json:
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(entry) for entry in value]
    return f"{value:.6g}" if isinstance(value, float) else value


def adapter_names(config: ModelConfig) -> Json:
    """Of the layers of the first and last block that adapters of PEFT name: our names, and their rows there."""
    found = []
    for block in sorted({0, config.n_layer - 1}):
        experts = [
            f"{path}.0.{m}" for path in ("mlp.experts", "block_sparse_moe.experts") for m in ("gate_proj", "w1", "w2")
        ]
        for module in (*MODULES, *experts):
            pieces, n_out, n_in = adapted_rows(config, "golden", block, module)
            rows = [[piece.name(block, 1), *piece.rows, piece.is_interleaved] for piece in pieces]
            found.append([block, module, rows, n_out, n_in])
    return found


def swarm_id(config: ModelConfig) -> Json:
    """The hash by which nodes of a swarm know that they hold blocks of the same model."""
    return weights_id(_id_of(config), "0" * 64)


def announcement(config: ModelConfig) -> Json:
    """What a node says of the model in a swarm, and what it answers who asks for it."""
    weights, arithmetic = swarm_id(config), Arithmetic("fused", Formats.one("int8"))
    one = Announced(
        name="a", process="1" * 32, version=1, addr="127.0.0.1", port=1, ring_port=2, model="m", weights=weights,
        arithmetic=arithmetic, n_layer=config.n_layer, start=0, stop=1, is_ready=True, speed=1.5, block_s=0.25,
    )  # fmt: skip
    facts = ModelFacts(_id_of(config), (PartSpec("block.0", "0" * 64, 5),))
    told = facts.to_json()
    del told["model"]["is_rounded"]  # which is newer than the golden values
    return [asdict(one), untupled(told)]


def _id_of(config: ModelConfig) -> ModelId:
    return ModelId("m", config, config_hash(config), "bfloat16")


def exported(config: ModelConfig) -> Json:
    """config.json of the model as it is exported."""
    try:
        return untupled(written(config)[1])
    except MdiError as e:
        return type(e).__name__


OF_CONFIG: dict[str, Callable[[ModelConfig], Json]] = {
    "names": names, "caches": caches, "shares": shares, "plans": plans, "adapter names": adapter_names,
}  # fmt: skip
# These see more of a config than `config_hash` does.
OF_NAME: dict[str, Callable[[ModelConfig], Json]] = {
    "plain form": plain_form, "config_hash": hash_of_config, "swarm id": swarm_id,
    "announcement": announcement, "exported": exported,
}  # fmt: skip


# Aspects of weights


def numbers(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 numbers that follow from the name alone, on every machine; those of norms are positive."""
    first = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    n = int(np.prod(shape))
    x = (np.arange(first, first + n, dtype=np.uint64) * np.uint64(2654435761)) & np.uint64(0xFFFFFFFF)
    x ^= x >> np.uint64(15)
    x = (x * np.uint64(2246822519)) & np.uint64(0xFFFFFFFF)
    values = (x >> np.uint64(8)).astype(np.float32) / np.float32(1 << 24) - np.float32(0.5)
    return (values + np.float32(1 if len(shape) == 1 and name.endswith("weight") else 0)).reshape(shape)


def state_of(config: ModelConfig, is_tied: bool = False) -> dict[str, np.ndarray]:
    state = {name: numbers(name, shape) for name, shape in model_shapes(config, "golden").items()}
    if is_tied:
        state["lm_head.weight"] = state["transformer.wte.weight"].copy()
    return state


def lit_folder(folder: Path, config: ModelConfig) -> Path:
    folder.mkdir(parents=True)
    (folder / "model_config.yaml").write_text(yaml.safe_dump(untupled(config.plain())), encoding="utf-8")
    save_file(state_of(config), folder / "lit_model.safetensors")
    return folder


def packed(config: ModelConfig, folder: Path, forms: Iterable[str]) -> dict[str, Json]:
    """Hashes of the last block in these formats, and of the head and the embedding."""
    source = open_source(lit_folder(folder, config))
    block = f"block.{config.n_layer - 1}"
    found = {f"packed {form}": PackedSource(source, Packing(form, form)).info(block).sha256 for form in forms}
    for part in ("embedding", "head"):
        found[f"packed {part}"] = PackedSource(source, Packing("int4", "int8")).info(part).sha256
    found["plain parts"] = _parts(source)
    source.close()
    return {"sizes": hash_of(sizes(config)), **{aspect: hash_of(value) for aspect, value in found.items()}}


def _parts(source: WeightSource) -> Json:
    return [source.config_hash, source.dtype, [[part, source.info(part).sha256] for part in source.part_names()]]


def of_source(path: Path, cache: Path) -> str:
    """Config and parts of a folder in Hugging Face's form, or of a GGUF file; a head that it lacks is the embedding."""
    source = GgufSource(path) if path.suffix == ".gguf" else open_source(path)
    try:
        return hash_of(_parts(source))
    finally:
        source.close()


def of_written(name: str, family: str, folder: Path) -> dict[str, str]:
    """Of a family's files as transformers and llama.cpp write them, once with a head and once without; and of PEFT's names."""
    shape = config_of(family)
    config = ModelConfig.from_litgpt(shape)
    state = {n: torch.from_numpy(array) for n, array in state_of(config, is_tied=True).items()}
    theirs = hf_state(shape, state)
    heads = [n for n in ("lm_head.weight", "embed_out.weight") if n in theirs]
    found = {"hugging face": of_source(write_hf(folder / "hf", hf_config(family, shape), theirs), folder)}
    without = {n: tensor for n, tensor in theirs.items() if n not in heads}
    found["hugging face, tied"] = of_source(write_hf(folder / "tied", hf_config(family, shape), without), folder)
    if family in gguf_families():
        found["gguf"] = of_source(write_gguf(folder / f"{name}.gguf", family, shape, state), folder)
    targets = tuple(target for target in LORA_TARGETS if target != "head")  # PEFT's form has no place for it
    try:
        model = add_adapters(shape, LoraSettings(2, targets=targets), 1)
    except MdiError as e:
        return {**found, "peft": type(e).__name__}
    tensors = peft_tensors(model)
    told = [sorted([n, *tensor.shape] for n, tensor in tensors.items()), peft_settings(model, tensors)]
    return {**found, "peft": hash_of(told)}


# All of a group


def of_large(group: str) -> dict[str, dict[str, str]]:
    """Hash of each aspect of each model; models with equal configs share the work."""
    known: dict[str, dict[str, str]] = {}
    return {
        name: of_config(make, known) for name, make in large_models() if name.startswith(f"{group}/")
    }  # fmt: skip


def of_config(make: Callable[[], ModelConfig], known: dict[str, dict[str, str]]) -> dict[str, str]:
    try:
        config = make()
    except (MdiError, ValueError) as e:
        return {"refused": type(e).__name__}
    found = {aspect: hash_of(value(config)) for aspect, value in OF_NAME.items()}
    key = config_hash(config)
    if key not in known:
        known[key] = {aspect: hash_of(value(config)) for aspect, value in OF_CONFIG.items()}
    return {**found, **known[key]}


def of_small(folder: Path) -> dict[str, dict[str, str]]:
    found = {}
    for i, (name, make) in enumerate(small_models(folder)):
        forms = (
            LAYOUTS if name.startswith("tiny/") else ("int8", "mxfp4")
        )  # of a matrix they are the same in any family
        found[name] = {**of_config(make, {}), **packed(make(), folder / str(i), forms)}
    return found


def of_files(folder: Path) -> dict[str, dict[str, str]]:
    return {family: of_written(f"tiny-{i}", family, folder / str(i)) for i, family in enumerate(HF_KINDS)}
