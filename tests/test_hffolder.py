"""Hugging Face folders that are read as they are: the same weights and tokens as the converted checkpoint's and litgpt's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from litgpt.config import Config, name_to_config
from litgpt.model import GPT
from litgpt.scripts import convert_hf_checkpoint as litgpts
from safetensors.torch import load_file, save_file

from caches import own_cache
from families import config_of, greedy, prompt
from mdi.checkpoint.convert import convert
from mdi.checkpoint.folder import checkpoints_in, stated_blocks
from mdi.checkpoint.hffolder import HfFolder
from mdi.checkpoint.shapes import full_config
from mdi.checkpoint.source import LitCheckpoint, open_source, settings_of
from mdi.checkpoint.weights import WeightSource
from mdi.cli import launch
from mdi.engine.sequence import SamplingParams
from mdi.errors import CheckpointError
from mdi.families.registry import FAMILIES, written
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.spec.cluster import ClusterConfig, standalone
from mdi.spec.options import StarterOptions
from missing_libraries import without
from secondaries import cluster_of, secondaries, secondary, text_of
from tiny_checkpoint import reference, tiny_gpt, tokenizer
from tiny_models import HF_KINDS, State, hf_config, hf_state, tiny_hf, tiny_state, write_hf

ROOT = Path(__file__).parents[1]
N_TOKENS = 8


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("MDI_CACHE_DIR", own_cache(folder))
    return folder


def assert_holds(source: WeightSource, state: State) -> None:
    assert set(source.specs) == set(state)
    for part in source.part_names():
        for name, tensor in source.tensors(part).items():
            assert torch.equal(tensor, state[name]), name


def generated(cluster: ClusterConfig, folder: Path, ids: list[int]) -> list[int]:
    options = StarterOptions(ckpt=folder, prompt_style="none", device="cpu", dtype="float32", placement="even")
    with Run(GivenNodes(cluster), options, len(ids) + N_TOKENS, n_texts=1) as starter:
        sample = starter.submit("", ids, SamplingParams(N_TOKENS, temperature=0))
        starter.read()
        starter.close()
    return sample.token_ids


@pytest.mark.parametrize("family", HF_KINDS)
def test_tokens_over_one_node_and_three_are_litgpts(tmp_path: Path, family: str) -> None:
    folder, state = tiny_hf(tmp_path / "my-model", family, n_shards=2)
    before = sorted(tmp_path.glob("my-model/*"))
    source = open_source(folder)
    assert isinstance(source, HfFolder)
    assert_holds(source, state)
    gpt = GPT(Config(**source.config.plain())).eval().requires_grad_(False)
    gpt.load_state_dict(state)
    ids = prompt(20, 3)
    expected = greedy(gpt, ids, N_TOKENS)
    assert generated(standalone(), folder, ids) == expected
    with secondaries(2, tmp_path) as nodes:
        assert generated(cluster_of(nodes), folder, ids) == expected
    assert sorted(tmp_path.glob("my-model/*")) == before


def by_litgpt(family: str, weights: State) -> State:
    """The weights of a Hugging Face folder, converted by litgpt itself."""
    config, state, qkv = config_of(family), State(), {}  # type: ignore[var-annotated]
    functions: dict[str, Callable[[State, State], None]] = {
        "falcon": partial(litgpts.copy_weights_falcon, config),
        "Gemma-2-": partial(litgpts.copy_weights_gemma_2, qkv),
        "Gemma-3-": partial(litgpts.copy_weights_gemma_3, qkv, config=config),
        "phi": partial(litgpts.copy_weights_phi, config, qkv),
        "Phi": partial(litgpts.copy_weights_phi, config, qkv),
        "Qwen2.5": partial(litgpts.copy_weights_qwen_2_5, config, qkv),
        "Qwen3": partial(litgpts.copy_weights_qwen_3, config, qkv),
        "OLMo-2-": partial(litgpts.copy_weights_olmo2, config, qkv),
        "pythia": partial(litgpts.copy_weights_gpt_neox, config),
        "": partial(litgpts.copy_weights_hf_llama, config, qkv),
    }
    next(copy for prefix, copy in functions.items() if family.startswith(prefix))(state, weights)
    return state


@pytest.mark.parametrize("family", HF_KINDS)
def test_tensors_are_those_of_litgpts_converter(tmp_path: Path, family: str) -> None:
    folder, _ = tiny_hf(tmp_path / "my-model", family, n_shards=2)
    weights = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    expected = by_litgpt(family, weights)
    assert set(expected) == set(tiny_state(family)[1])
    assert_holds(HfFolder(folder), expected)


def test_all_families_of_litgpt_are_compared() -> None:
    others = {
        "glm4_moe", "glm4v_moe_text", "minimax_m2", "gpt_oss", "bloom", "gpt2", "opt", "ernie4_5", "smollm3", "gemma4_text",
        "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "deepseek_v3", "kimi_k2", "glm4_moe_lite",
        "deepseek_v32", "glm_moe_dsa",
    }  # fmt: skip
    families = {kind for kind, _ in HF_KINDS.values()}
    assert families == set(FAMILIES) - others
    of_table = {written(full_config(asdict(Config.from_name(name)), name))[0].model_type for name in name_to_config}
    assert of_table == families


@pytest.mark.parametrize("family", HF_KINDS)
def test_parts_are_those_of_the_converted_checkpoint(tmp_path: Path, family: str) -> None:
    """So a node that keeps the one needs nothing of the other."""
    folder, state = tiny_hf(tmp_path / "my-model", family)
    source = HfFolder(folder)
    assert_holds(source, state)
    convert(folder, progress=False)
    converted = open_source(folder)
    assert isinstance(converted, LitCheckpoint)
    assert source.config_hash == converted.config_hash and source.model == converted.model
    assert [source.info(part) for part in source.part_names()] == [converted.info(p) for p in converted.part_names()]


@pytest.mark.parametrize("family", ["Llama-3.1-8B", "Gemma-2-9b", "pythia-14m", "Qwen2.5-0.5B", "falcon-7b"])
@pytest.mark.parametrize("missing", ["head", "embedding"])
def test_tied_weights_in_both_directions(tmp_path: Path, family: str, missing: str) -> None:
    config, state = tiny_state(family)
    state["lm_head.weight"] = state["transformer.wte.weight"].clone()
    weights = hf_state(config, state)
    names = {"pythia-14m": ("gpt_neox.embed_in.weight", "embed_out.weight")}
    names["falcon-7b"] = ("transformer.word_embeddings.weight", "lm_head.weight")
    embedding, head = names.get(family, ("model.embed_tokens.weight", "lm_head.weight"))
    weights[head] = state["lm_head.weight"].clone()
    del weights[head if missing == "head" else embedding]
    assert_holds(open_source(write_hf(tmp_path / "m", hf_config(family, config), weights, n_shards=2)), state)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_language_part_of_a_model_that_also_sees(tmp_path: Path, prefix: str) -> None:
    config, state = tiny_state("Gemma-3-1b-it")
    state["lm_head.weight"] = state["transformer.wte.weight"].clone()
    language = hf_state(config, state)
    language.pop("lm_head.weight", None)
    weights = {name.replace("model.", prefix, 1): tensor for name, tensor in language.items()}
    words = weights[f"{prefix}embed_tokens.weight"]
    weights[f"{prefix}embed_tokens.weight"] = torch.cat((words, torch.ones(3, words.shape[1])))  # of images
    eyes = prefix.split("language_model")[0]
    weights[f"{eyes}vision_tower.encoder.layers.0.mlp.fc1.weight"] = torch.ones(2, 2)
    weights[f"{eyes}multi_modal_projector.weight"] = torch.ones(2, 2)
    whole = {"model_type": "gemma3", "text_config": hf_config("Gemma-3-1b-it", config), "vision_config": {}}
    folder = write_hf(tmp_path / "m", whole, weights)
    assert_holds(open_source(folder), state)
    assert stated_blocks(folder) == config.n_layer


def test_a_mixture_of_types_and_half_precision(tmp_path: Path) -> None:
    config, state = tiny_state()
    weights = hf_state(config, state)
    halves = {name: tensor.bfloat16() for name, tensor in weights.items()}
    assert open_source(write_hf(tmp_path / "a", hf_config("Llama-3.1-8B", config), halves)).dtype == "bfloat16"
    assert_holds(open_source(tmp_path / "a"), {name: tensor.bfloat16() for name, tensor in state.items()})
    halves["model.layers.0.self_attn.q_proj.weight"] = weights["model.layers.0.self_attn.q_proj.weight"]
    source = open_source(write_hf(tmp_path / "b", hf_config("Llama-3.1-8B", config), halves))
    qkv = torch.cat([halves[f"model.layers.0.self_attn.{x}_proj.weight"].float() for x in "qkv"])
    assert torch.equal(source.tensors("block.0")["transformer.h.0.attn.qkv.weight"], qkv)
    assert source.dtype == "bfloat16"


def test_tables_that_older_versions_wrote_are_left_out(tmp_path: Path) -> None:
    config, state = tiny_state("pythia-14m")
    weights = hf_state(config, state)
    weights["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    weights["gpt_neox.layers.0.attention.masked_bias"] = torch.ones(())
    weights["gpt_neox.layers.0.attention.rotary_emb.inv_freq"] = torch.ones(2)
    assert_holds(open_source(write_hf(tmp_path / "m", hf_config("pythia-14m", config), weights)), state)


@pytest.mark.parametrize("said", ["num_nextn_predict_layers", "num_mtp_modules"])
def test_blocks_that_predict_further_tokens_are_left_out(tmp_path: Path, said: str) -> None:
    """Two, numbered behind the last one (as GLM and MiniMax have them), or under a name of their own; no others."""
    config, state = tiny_state()
    settings, weights = hf_config("Llama-3.1-8B", config), hf_state(config, state)
    weights["mtp.fc.weight"] = torch.ones(2, 2)
    for number in (config.n_layer, config.n_layer + 1):
        weights[f"model.layers.{number}.eh_proj.weight"] = torch.ones(2, 2)
        weights[f"model.layers.{number}.input_layernorm.weight"] = torch.ones(2)
    assert_holds(open_source(write_hf(tmp_path / "m", {**settings, said: 2}, weights)), state)
    for n, found in ((0, "eh_proj"), (1, "layers.<i>"), (None, "layers.<i>"), ("2", "layers.<i>")):
        with pytest.raises(CheckpointError, match=found):
            open_source(write_hf(tmp_path / f"m{n}", {**settings, said: n}, weights))


def _weights(change: Callable[[State], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return edit


def _settings(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (_settings(model_type="mamba"), "'mamba'"),
        (_settings(intermediate_size=65), "fc_1.weight"),
        (_settings(num_hidden_layers=6), "transformer.h.5."),
        (_settings(num_hidden_layers=4), "model.layers.<i>."),
        (_settings(quantization_config={"quant_method": "gptq"}), "'gptq'"),
        (_weights(lambda w: w.pop("model.norm.weight")), "transformer.ln_f.weight"),
        (_weights(lambda w: w.pop("model.layers.2.self_attn.k_proj.weight")), "self_attn.k_proj"),
        (_weights(lambda w: w.update({"model.layers.1.odd": torch.ones(1)})), "model.layers.<i>.odd"),
        (_weights(lambda w: w.update({"model.layers.1.self_attn.q_proj.weight": torch.ones(48, 7)})), "equally wide"),
        (_weights(lambda w: w.update({"model.norm.weight": torch.ones(())})), "transformer.ln_f.weight"),
        (_weights(lambda w: [w.pop(n) for n in ("lm_head.weight", "model.embed_tokens.weight")]), "embedding"),
        (lambda folder: os.truncate(folder / "model.safetensors", 5000), "model.safetensors"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
    ],
)
def test_a_damaged_folder_is_one_line(tmp_path: Path, damage: Callable[[Path], None], name: str) -> None:
    folder, _ = tiny_hf(tmp_path / "m")
    damage(folder)
    with pytest.raises(CheckpointError) as e:
        open_source(folder)
    assert name in str(e.value) and "\n" not in str(e.value) and str(folder) in str(e.value)


def test_a_missing_shard_and_one_too_many(tmp_path: Path) -> None:
    folder, _ = tiny_hf(tmp_path / "m", n_shards=2)
    (folder / "model-00002-of-00002.safetensors").rename(tmp_path / "away")
    with pytest.raises(CheckpointError) as e:
        open_source(folder)
    assert "model-00002-of-00002.safetensors" in str(e.value)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError) as e:
        open_source(folder)
    assert "model-00002-of-00002.safetensors" in str(e.value), "by the name of the first"
    (tmp_path / "away").rename(folder / "model-00002-of-00002.safetensors")
    open_source(folder).close()
    first = folder / "model-00001-of-00002.safetensors"
    (folder / "more.safetensors").write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError) as e:
        open_source(folder)
    assert first.name in str(e.value) and "more.safetensors" in str(e.value)


def test_pickles_are_refused_with_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, state = tiny_hf(tmp_path / "m", suffix="bin")
    with pytest.raises(CheckpointError) as e:
        open_source(folder)
    assert e.value.code == "unsafe" and f"mdi prepare-model {folder}" in str(e.value)
    for command in ("sample", "chat", "starter"):
        assert launch(command, ["--ckpt", str(folder)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and f"mdi prepare-model {folder}" in error
    convert(folder, progress=False)
    assert_holds(open_source(folder), state)


def test_hashes_are_kept_elsewhere_and_belong_to_the_files(tmp_path: Path, cache: Path) -> None:
    folder, _ = tiny_hf(tmp_path / "m", n_shards=2)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    source = open_source(folder)
    infos = {part: source.info(part) for part in source.part_names()}
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert len(list(cache.glob("folders/m-*.json"))) == 1
    again = open_source(folder)
    assert {part: again.known(part) for part in again.part_names()} == infos
    shard = folder / "model-00002-of-00002.safetensors"
    weights = load_file(shard)
    save_file({name: tensor + 1 for name, tensor in weights.items()}, shard)
    os.utime(shard, ns=(0, before[shard] + 1))
    changed = open_source(folder)
    assert changed.known("head") is None
    assert {part: changed.info(part) for part in changed.part_names()} != infos


def test_a_folder_of_the_hubs_cache_has_the_models_name(tmp_path: Path) -> None:
    folder, state = tiny_hf(tmp_path / "models--org--tiny-7b" / "snapshots" / "0123abcd")
    source = open_source(folder)
    assert source.model == "tiny-7b"
    assert_holds(source, state)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The model of `tiny_checkpoint` as a Hugging Face folder."""
    gpt = tiny_gpt()
    state = {name: tensor.clone() for name, tensor in gpt.state_dict().items()}
    folder = tmp_path / "home" / "org" / "tiny-model"
    return write_hf(folder, hf_config("Llama-3.1-8B", gpt.config), hf_state(gpt.config, state), n_shards=2)


ARGUMENTS = ("--prompt", "Who are you?", "--n-tokens", "12", "--temperature", "0", "--no-stream", "--dtype", "float32")


def test_commands_accept_the_folder(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = folder.parents[1]
    monkeypatch.setenv("MDI_STORE", str(home))
    before = sorted(folder.iterdir())
    expected = tokenizer().decode(list(reference("Who are you?", 12)))
    for ckpt in (str(folder), "org/tiny-model"):
        assert launch("sample", ["--ckpt", ckpt, *ARGUMENTS]) == 0
        assert expected in capsys.readouterr().out
    assert launch("list", []) == 0
    assert "org/tiny-model" in capsys.readouterr().out and checkpoints_in(home) == ["org/tiny-model"]
    profiles = home / "cluster.json"
    assert launch("plan", ["--example"]) == 0
    profiles.write_text(capsys.readouterr().out)
    assert launch("plan", ["--profiles", str(profiles), "--ckpt", str(folder), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert sum(node["blocks"][1] - node["blocks"][0] for node in plan["nodes"]) == 5
    assert launch("prepare-model", [str(folder), "--export", "hf", "--out", str(home / "back")]) == 0
    assert sorted(folder.iterdir()) == before


def test_a_secondary_reads_its_own_part_of_the_folder(folder: Path, tmp_path: Path) -> None:
    expected = list(reference("The ring", 6))
    source = open_source(folder)
    with secondary(0, tmp_path / "node", weights=source) as node:
        assert text_of(cluster_of([node]), folder) == expected
    assert not list((tmp_path / "node").rglob("*.safetensors")), "nothing was sent"


def test_a_ring_of_processes_and_a_chat(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("local-ring", ["--nodes", "2", "--ckpt", str(folder), *ARGUMENTS]) == 0
    assert tokenizer().decode(list(reference("Who are you?", 12))) in capsys.readouterr().out


def test_the_settings_are_read_without_the_weights(folder: Path) -> None:
    expected = open_source(folder).config
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    assert settings_of(folder) == expected
    with pytest.raises(CheckpointError):
        settings_of(folder.parent)


def test_a_starter_reads_it_without_torch_and_litgpt(folder: Path) -> None:
    code = without(("torch", "litgpt", "lightning", "transformers", "safetensors")) + (
        "from mdi.cli import launch\nassert launch('sample', sys.argv[1:]) == 0\n"
    )
    argv = [sys.executable, "-c", code, "--ckpt", str(folder), *ARGUMENTS]
    done = subprocess.run(argv, cwd=ROOT / "src", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert tokenizer().decode(list(reference("Who are you?", 12))) in done.stdout
