"""Models that are packed in q4_k and q6_k here: block bytes, their error, runs over nodes, chunks, and what is refused."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from litgpt.model import GPT

from families import greedy, random_gpt
from mdi.checkpoint.chunks import ChunkFile, find_chunk
from mdi.checkpoint.derived import PackedSource
from mdi.checkpoint.hfconfig import published_config
from mdi.checkpoint.mixtures import meant
from mdi.checkpoint.packing import Packing, plain
from mdi.checkpoint.source import LitCheckpoint
from mdi.cli import launch
from mdi.engine.sequence import SamplingParams
from mdi.errors import CheckpointError, UsageError
from mdi.kernels import library
from mdi.kernels.block_rows import numbers_of
from mdi.kernels.block_search import SEARCHED, quantize_rows
from mdi.kernels.format_maps import format_map
from mdi.kernels.layout import block_rows, pack, unpack
from mdi.kernels.weight_formats import BLOCK_TYPES, MADE
from mdi.model.plain import spec_of
from mdi.model.spec import Attention
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.spec.cluster import ClusterConfig, NodeConfig
from mdi.spec.options import StarterOptions
from mdi.stages.calibration import mean_squares, windows_of
from secondaries import cluster_of, secondaries
from tiny_checkpoint import encode, tiny_config, write_checkpoint

needs_kernels = pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")

PROMPTS = ("The ring", "Every node keeps a cache for each sequence. " * 4)
N_TOKENS = 8


def drawn(kind: str, n_rows: int = 32, n_in: int = 512) -> np.ndarray:
    generator = np.random.default_rng(7)
    rows = generator.standard_normal((n_rows, n_in)).astype(np.float32) * np.float32(0.02)
    if kind == "outliers":
        rows[:, generator.choice(n_in, 8, replace=False)] *= 20
    if kind == "lopsided":
        rows = np.abs(rows) + np.float32(0.01)
    if kind == "zeros":
        rows[::2] = 0
        rows[:, 32:64] = 0
    return rows


def error(rows: np.ndarray, made: np.ndarray, form: str, importance: np.ndarray | None = None) -> float:
    off = np.square(numbers_of(form, made).astype(np.float64) - rows)
    return float((off if importance is None else off * importance).sum())


def naive(form: str, rows: np.ndarray) -> np.ndarray:
    """Numbers of the same type by the least and the largest number of each group, without a search."""
    group = {"q6_k": 16}.get(form, 32)
    x = rows.reshape(-1, group)
    if form == "q4_k":
        low = np.minimum(x.min(axis=1), 0)
        scale = ((x.max(axis=1) - low) / 15).reshape(-1, 8)
        low = -low.reshape(-1, 8)
        scale, low = (
            np.rint(v / (m := np.maximum(v.max(axis=1, keepdims=True), 1e-30)) * 63) * m / 63 for v in (scale, low)
        )
        scale, low = scale.reshape(-1, 1), low.reshape(-1, 1)
        q = np.clip(np.rint((x + low) / np.where(scale == 0, 1, scale)), 0, 15)
        return (q * scale - low).reshape(rows.shape)
    high = {"q6_k": 31, "q5_0": 15, "q8_0": 127}[form]
    scale = np.abs(x).max(axis=1, keepdims=True) / high
    return (np.clip(np.rint(x / np.where(scale == 0, 1, scale)), -high, high) * scale).reshape(rows.shape)


def test_the_formats_that_are_made_are_those_with_a_search() -> None:
    assert set(MADE) == set(SEARCHED)


@pytest.mark.parametrize("kind", ["plain", "outliers", "lopsided", "zeros"])
@pytest.mark.parametrize("form", MADE)
def test_gguf_reads_the_blocks_and_the_search_is_better_than_none(form: str, kind: str) -> None:
    rows = drawn(kind)
    made = quantize_rows(form, rows)
    assert made.shape == (len(rows), rows.shape[1] // BLOCK_TYPES[form].inputs * BLOCK_TYPES[form].block_bytes)
    there = dequantize(made, Kind(BLOCK_TYPES[form].type_id))
    matrix = pack(form, rows)
    assert np.array_equal(unpack(matrix), there) and np.array_equal(block_rows(matrix), made)
    assert np.isfinite(there).all()
    off = float(np.square(naive(form, rows).astype(np.float64) - rows).sum())
    assert error(rows, made, form) < {"q8_0": 1.001, "q6_k": 0.97, "q5_0": 0.97, "q4_k": 0.87}[form] * off
    if kind == "zeros":
        assert not there[::2].any()


@pytest.mark.parametrize("form", ["q4_k", "q5_0", "q6_k"])
def test_inputs_that_count_more_have_less_error(form: str) -> None:
    rows = drawn("plain")
    importance = np.exp(3 * np.random.default_rng(1).standard_normal(rows.shape[1])).astype(np.float32)
    weighed, same = quantize_rows(form, rows, importance), quantize_rows(form, rows)
    assert error(rows, weighed, form, importance) < 0.8 * error(rows, same, form, importance)
    assert error(rows, weighed, form) > error(rows, same, form)
    assert np.array_equal(quantize_rows(form, rows, np.full(rows.shape[1], 7, dtype=np.float32)), same)


@pytest.mark.parametrize("form", MADE)
def test_numbers_that_the_format_has_stay(form: str) -> None:
    """What is packed again is as good as it was: nothing is lost but what half precision rounds."""
    once = numbers_of(form, quantize_rows(form, drawn("outliers")))
    again = numbers_of(form, quantize_rows(form, once))
    assert (
        np.abs(again - once).max()
        <= {"q8_0": 0.01, "q5_0": 0.04, "q4_k": 0.15, "q6_k": 0.04}[form] * np.abs(once).max()
    )
    assert float(np.square(again - once).sum()) < 0.02 * float(np.square(once - drawn("outliers")).sum()) + 1e-12


def test_groups_of_equal_numbers_stay() -> None:
    """Also below 0, where a group has no span, and is its minimum alone."""
    rows = drawn("plain")
    rows[:, :32], rows[:, 64:96] = -0.75, 0.5
    made = numbers_of("q4_k", quantize_rows("q4_k", rows))
    assert np.allclose(made[:, :32], -0.75, atol=0.01) and np.allclose(made[:, 64:96], 0.5, atol=0.01)


@pytest.mark.parametrize("means", [0.0, np.inf, np.nan])
def test_means_that_say_nothing_count_all_inputs_alike(means: float) -> None:
    rows = drawn("plain")
    importance = np.full(rows.shape[1], means, dtype=np.float32)
    assert np.array_equal(quantize_rows("q4_k", rows, importance), quantize_rows("q4_k", rows))


def test_numbers_that_are_not_finite_are_refused() -> None:
    rows = drawn("plain")
    rows[3, 5] = np.nan
    with pytest.raises(CheckpointError, match="^blk "):
        pack("q4_k", rows, "blk")
    with pytest.raises(UsageError, match="no multiple of the 256"):
        pack("q4_k", drawn("plain", n_in=192))
    with pytest.raises(UsageError, match="q5_k holds what a GGUF file has"):
        pack("q5_k", drawn("plain"))


# Models


@functools.cache
def made_up(n_embd: int = 256) -> GPT:
    """Rows of 256 in attention, MLP and head, and of 192 in the down-projections."""
    return random_gpt(
        tiny_config(n_embd=n_embd, head_size=32, n_head=8, n_query_groups=2, intermediate_size=192, n_layer=5), 4
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("mixed") / "tiny", gpt=made_up(), with_end=False)


def test_which_matrix_has_which_format(checkpoint: Path) -> None:
    config = LitCheckpoint(checkpoint).config
    found = format_map(meant("q4_k", config))
    block = "transformer.h.{}.{}.weight"
    assert found.at("lm_head.weight") == "q6_k" == found.of["transformer.wte", None]
    assert found.at(block.format(0, "attn.qkv")) == "q4_k" and found.at(block.format(0, "mlp.proj")) == "q5_0"
    assert found.at(block.format(2, "attn.qkv")) == "q4_k*320+q6_k" and found.at(block.format(2, "mlp.proj")) == "q8_0"
    assert found.at(block.format(4, "mlp.proj")) == "q8_0" and found.at(block.format(2, "mlp.fc_1")) == "q4_k"
    assert meant("int8", config) == "int8"
    narrow = format_map(meant("q6_k", made_config(n_embd=144)))
    assert narrow.at(block.format(0, "attn.qkv")) == "fp16" and narrow.at(block.format(0, "mlp.proj")) == "q8_0"


def test_only_values_have_more_bits() -> None:
    """Blocks that read the keys and values of others, and whose values are made of keys, have no rows of values."""
    for model, block, makes in (("E2B", 34, "nothing"), ("26B-A4B", 29, "keys"), ("E2B", 0, "keys and values")):
        config = published_config(f"google/gemma-4-{model}")
        mixer = spec_of(config).blocks[block].mixer
        assert isinstance(mixer, Attention) and mixer.makes == makes
        found = format_map(meant("q4_k", config)).at(f"transformer.h.{block}.attn.qkv.weight")
        assert found == ("q4_k*2304+q6_k" if makes == "keys and values" else "q4_k")


def made_config(**changes: Any) -> Any:
    from dataclasses import asdict

    from mdi.model.plain import ModelConfig
    from tiny_checkpoint import plain as listed

    return ModelConfig.of(
        listed(asdict(tiny_config(head_size=18, n_head=8, n_query_groups=8, intermediate_size=192, **changes)))
    )


def ids(cluster: ClusterConfig, folder: Path, cache: Path, **options: Any) -> list[list[int]]:
    asked = StarterOptions(
        ckpt=folder, placement="even", prompt_style="none", device="cpu", cache_dir=cache, wait_s=5, **options
    )
    starter = Run(GivenNodes(cluster), asked, 120, n_texts=len(PROMPTS))
    try:
        starter.open()
        texts = [starter.submit(text, encode(text), SamplingParams(N_TOKENS, temperature=0)) for text in PROMPTS]
        starter.read()
        starter.close()
        return [list(text.token_ids) for text in texts]
    finally:
        starter.close()


def alone() -> ClusterConfig:
    return ClusterConfig(NodeConfig("starter", "127.0.0.1", 0, 0), ())


@functools.cache
def unpacked(checkpoint: Path, word: str) -> GPT:
    """litgpt's model with the unpacked numbers."""
    source = LitCheckpoint(checkpoint)
    form = meant(word, source.config)
    packed = PackedSource(source, Packing(form, form))
    state = {
        name: torch.from_numpy(tensor)
        for part in packed.part_names()
        for name, tensor in plain(packed.weights(part)).items()
    }
    gpt = GPT(made_up().config).eval().requires_grad_(False)
    gpt.load_state_dict(state)
    return gpt


def check_near(gpt: GPT, found: list[list[int]]) -> None:
    """Each token is the best one of the model, or as good: the kernels round activations to 8 bits."""
    for text, own in zip(PROMPTS, found, strict=True):
        prompt = encode(text)
        logits = gpt(torch.tensor([[*prompt, *own]]))[0, len(prompt) - 1 : -1]
        behind = logits.max(dim=1).values - logits[torch.arange(N_TOKENS), torch.tensor(own)]
        assert len(own) == N_TOKENS and bool((behind < 0.1 * logits.std(dim=1)).all()), behind / logits.std(dim=1)


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("word", ["q4_k", "q6_k"])
def test_ids_are_those_of_the_unpacked_numbers_over_any_number_of_nodes(
    word: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpt = unpacked(checkpoint, word)
    wanted = [greedy(gpt, encode(text), N_TOKENS) for text in PROMPTS]
    in_kernels = ids(alone(), checkpoint, tmp_path / "alone", quantize=word)
    check_near(gpt, in_kernels)
    with secondaries(2, tmp_path) as nodes:
        assert ids(cluster_of(nodes), checkpoint, tmp_path, quantize=word) == in_kernels
    monkeypatch.setattr(library, "load", lambda: None)  # torch computes, and rounds no activations
    assert ids(alone(), checkpoint, tmp_path / "alone", quantize=word) == wanted
    with secondaries(2, tmp_path) as nodes:
        assert ids(cluster_of(nodes), checkpoint, tmp_path, quantize=word) == wanted


@pytest.mark.slow
@needs_kernels
def test_what_is_made_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mdi.checkpoint.kept_packed.LEAST_BYTES", 1)
    folder, cache = write_checkpoint(tmp_path / "tiny", gpt=made_up(), with_end=False), tmp_path / "cache"
    first = ids(alone(), folder, cache, quantize="q4_k")
    kept = {path: path.stat().st_mtime_ns for path in cache.glob("*.safetensors")}
    assert len(kept) == 7, "embedding, five blocks and head"
    monkeypatch.setattr("mdi.kernels.layout.quantize_rows", lambda *_: pytest.fail("it is searched again"))
    with secondaries(2, tmp_path) as nodes:
        assert ids(cluster_of(nodes), folder, cache, quantize="q4_k") == first
    assert {path: path.stat().st_mtime_ns for path in cache.glob("*.safetensors")} == kept


@pytest.mark.slow
@needs_kernels
def test_chunks_in_a_mixture_are_found_by_its_name(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path / "tiny", gpt=made_up(), with_end=False)
    assert launch("prepare-model", [str(folder), "--n-nodes", "2", "--quantize", "q4_k"]) == 0
    form = meant("q4_k", LitCheckpoint(folder).config)
    assert find_chunk(folder, 2, "starter", form).is_file()
    wanted = ids(alone(), checkpoint, tmp_path / "alone", quantize="q4_k")
    monkeypatch.setattr("mdi.kernels.layout.quantize_rows", lambda *_: pytest.fail("it is searched again"))
    with secondaries(1, tmp_path) as nodes:
        assert ids(cluster_of(nodes), folder, tmp_path / "cache", quantize="q4_k") == wanted


def test_what_is_refused(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--quantize", "q4_k", "--quantize-head", "int8"], ["--quantize-head", "q6_k"]):
        assert launch("sample", ["--ckpt", str(checkpoint), *flags, "--prompt", "a"]) == 2
        assert "for a whole model" in capsys.readouterr().err
    assert launch("secondary", ["--quantize", "q4_k"]) == 2
    assert "the starter packs a model in q4_k" in capsys.readouterr().err
    assert launch("plan", [str(checkpoint), "--quantize", "q5_k"]) == 2
    assert "q5_k is a type of GGUF files" in capsys.readouterr().err


def test_a_text_says_what_inputs_count(checkpoint: Path) -> None:
    """The means are those of litgpt's own layers, and what is packed with them has less error in the results of the layers."""
    source = LitCheckpoint(checkpoint)
    windows = windows_of(encode("The last one brings it home. Who are you? " * 20), 64)
    means = mean_squares(source, windows)
    gpt, seen = made_up(), {}

    def see(name: str) -> Any:
        def hook(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            seen.setdefault(name, []).append(inputs[0].reshape(-1, inputs[0].shape[-1]))

        return hook

    hooks = [
        module.register_forward_pre_hook(see(f"{name}.weight"))
        for name, module in gpt.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    for window in windows:
        gpt(torch.tensor([window]))
    for hook in hooks:
        hook.remove()
    assert means.keys() == seen.keys()
    form = meant("q4_k", source.config)
    total = {"without": 0.0, "with": 0.0}
    for name, rows in seen.items():
        x = torch.cat(rows)
        assert np.allclose(means[name], x.square().mean(dim=0).numpy(), rtol=1e-3)
        for kind, known in (("without", None), ("with", means)):
            made = PackedSource(source, Packing(form, form, means=known)).tensor_weights(name)
            off = torch.from_numpy(plain(made)[name]) - gpt.state_dict()[name]
            total[kind] += float((x @ off.T).square().mean() / (x @ gpt.state_dict()[name].T).square().mean())
    assert total["with"] < total["without"], total


def test_calibrated_chunks_have_hashes_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint(tmp_path / "tiny", gpt=made_up(), with_end=False)
    text = tmp_path / "text"
    text.write_text("The ring is closed link by link. " * 30)
    flags = [str(folder), "--n-nodes", "1", "--quantize", "q4_k"]
    assert launch("prepare-model", [*flags, "--calibrate", str(text)]) == 0
    source = LitCheckpoint(folder)
    form = meant("q4_k", source.config)
    chunk = ChunkFile(find_chunk(folder, 1, "starter", form))
    own = PackedSource(source, Packing(form, form)).info("block.0")
    assert chunk.info("block.0").sha256 != own.sha256
    assert launch("prepare-model", flags) == 0
    assert ChunkFile(find_chunk(folder, 1, "starter", form)).info("block.0").sha256 == own.sha256
    capsys.readouterr()
    assert launch("prepare-model", [str(folder), "--n-nodes", "1", "--quantize", "int4", "--calibrate", str(text)]) == 2
    assert "--calibrate is for --quantize q4_k and q6_k" in capsys.readouterr().err
    assert launch("prepare-model", [*flags, "--calibrate", str(tmp_path / "none")]) == 2
    assert f"--calibrate {tmp_path / 'none'}" in capsys.readouterr().err
