"""prepare_model: converting, cutting, and what it says when it cannot."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from litgpt.config import name_to_config
from safetensors.torch import load_file, save_file

from mdi.block_ranges import block_span
from mdi.checkpoint.chunks import ChunkFile, find_chunk
from mdi.checkpoint.convert import convert, needs_conversion
from mdi.checkpoint.folder import is_hf_dir, is_lit_dir
from mdi.checkpoint.hffolder import HfFolder
from mdi.checkpoint.manifest import config_hash
from mdi.checkpoint.source import LitCheckpoint
from mdi.cli import launch
from mdi.errors import CheckpointError, UsageError
from tiny_models import HF_KINDS, State, hf_config, hf_state, tiny_hf, tiny_lit, tiny_state, write_hf, write_lit

ROOT = Path(__file__).parents[1]


def _assert_holds(directory: Path, state: State, dtype: torch.dtype = torch.float32) -> None:
    source = LitCheckpoint(directory)
    for part in source.part_names():
        for name, tensor in source.tensors(part).items():
            assert tensor.dtype == dtype
            assert torch.equal(tensor, state[name].to(dtype)), name


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkpoints folder."""
    folder = tmp_path / "checkpoints"
    monkeypatch.setenv("MDI_STORE", str(folder))
    return folder


# -- converting


@pytest.mark.parametrize("family", HF_KINDS)
def test_every_derived_family(tmp_path: Path, family: str) -> None:
    directory, state = tiny_hf(tmp_path / "my-model", family)
    assert is_hf_dir(directory) and not is_lit_dir(directory)
    assert needs_conversion(directory)
    assert convert(directory, progress=False) == directory
    assert not needs_conversion(directory)
    _assert_holds(directory, state)
    expected, _ = tiny_state(family)
    derived = LitCheckpoint(directory)
    differing = {
        key: (value, getattr(expected, key))
        for key, value in derived.config.plain().items()
        if value != getattr(expected, key) and key not in ("name", "hf_config", "padding_multiple", "norm_eps")
    }
    assert differing == {}
    assert not list(directory.glob("*.part"))
    is_tied = family.startswith(("Gemma-2-", "Gemma-3-"))  # then the head is written once, as the embedding
    expected_bytes = sum(t.nbytes for name, t in state.items() if not (is_tied and name == "lm_head.weight"))
    with zipfile.ZipFile(directory / "lit_model.pth") as archive:
        assert sum(entry.file_size for entry in archive.infolist() if "/data/" in entry.filename) == expected_bytes


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards_that_cut_through_blocks(tmp_path: Path, suffix: str) -> None:
    directory, state = tiny_hf(tmp_path / "m", n_shards=3, suffix=suffix)
    convert(directory, progress=False)
    _assert_holds(directory, state)


@pytest.mark.parametrize("family", ["Llama-3.1-8B", "Gemma-2-9b", "pythia-14m", "Qwen2.5-0.5B"])
@pytest.mark.parametrize("missing", ["head", "embedding"])
def test_tied_weights_in_both_directions(tmp_path: Path, family: str, missing: str) -> None:
    config, state = tiny_state(family)
    state["lm_head.weight"] = state["transformer.wte.weight"].clone()
    weights = hf_state(config, state)
    is_neox = family == "pythia-14m"
    head = "embed_out.weight" if is_neox else "lm_head.weight"
    embedding = "gpt_neox.embed_in.weight" if is_neox else "model.embed_tokens.weight"
    weights[head] = state["lm_head.weight"].clone()  # litgpt's converter leaves some out
    del weights[head if missing == "head" else embedding]
    directory = write_hf(tmp_path / "m", hf_config(family, config), weights, n_shards=2)
    convert(directory, progress=False)
    _assert_holds(directory, state)


def test_a_model_that_only_litgpts_table_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first Falcon, whose config.json says another model_type."""
    config, state = tiny_state("falcon-7b")
    monkeypatch.setitem(name_to_config, "falcon-tiny", {**asdict(config), "name": "falcon-tiny"})
    settings = {**hf_config("falcon-7b", config), "model_type": "RefinedWebModel"}
    for given, folder in ((None, "falcon-tiny"), ("falcon-tiny", "my-model")):
        directory = write_hf(tmp_path / folder, settings, hf_state(config, state))
        convert(directory, given, progress=False)
        _assert_holds(directory, state)
        assert LitCheckpoint(directory).model == "falcon-tiny"


def test_a_name_given_by_hand_that_does_not_fit_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, state = tiny_state()
    monkeypatch.setitem(name_to_config, "llama-tiny", {**asdict(config), "name": "llama-tiny"})
    weights = {**hf_state(config, state), "model.layers.1.odd": torch.ones(1)}
    directory = write_hf(tmp_path / "m", {"model_type": "mine"}, weights)
    with pytest.raises(CheckpointError, match="is --model-name right") as e:
        convert(directory, "llama-tiny", progress=False)
    assert "model.layers.<i>.odd" in str(e.value) and "llama-tiny" in str(e.value) and "\n" not in str(e.value)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="peak memory is read as POSIX has it")
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_the_model_is_never_in_memory_as_a_whole(tmp_path: Path, suffix: str) -> None:
    """A small model is converted first, so that what is imported does not count."""
    small, _ = tiny_hf(tmp_path / "small", suffix=suffix)
    config, state = tiny_state(n_layer=24, n_embd=512, n_head=8, head_size=64, intermediate_size=512)
    large = write_hf(tmp_path / "large", hf_config("Llama-3.1-8B", config), hf_state(config, state), suffix=suffix)
    code = (
        "import sys; from mdi.checkpoint.convert import convert; from mdi.metrics import peak_rss_bytes as peak\n"
        "convert(sys.argv[1], dtype='bfloat16', progress=False); before = peak()\n"
        "convert(sys.argv[2], dtype='bfloat16', progress=False); print(peak() - before)"
    )
    argv = [sys.executable, "-c", code, str(small), str(large)]
    done = subprocess.run(argv, cwd=ROOT / "src", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    n_bytes = sum(tensor.nbytes for tensor in state.values())
    assert n_bytes > 60e6 and int(done.stdout) < n_bytes / 3


_LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 40}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rope_scaling": {"rope_type": "longrope", **_LONG}}, "rope_adjustments is None, not {"),
        ({"rope_theta": 20000.0}, "rope_base is 10000, not 20000"),
        ({"sliding_window": 24}, "sliding_window_size is 20, not 24"),
    ],
)
def test_positions_that_an_older_version_took_from_litgpts_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], field: str
) -> None:
    family = "Phi-3-mini-4k-instruct"
    config, state = tiny_state(family)
    folder = write_hf(tmp_path / "m", {**hf_config(family, config), **changes}, hf_state(config, state))
    write_lit(folder, config, state)
    command = [str(folder), "--n-nodes", "1", "--out", str(folder)]
    assert launch("prepare-model", command) == 0
    told = capsys.readouterr().err
    (line,) = [line for line in told.splitlines() if line.startswith("warning: ")]
    assert field in line and str(folder / "model_config.yaml") in line and len(line) < 600
    assert f"remove {folder / 'lit_model.pth'} and run mdi prepare-model {folder}" in line
    (folder / "lit_model.pth").unlink()
    assert launch("prepare-model", command) == 0
    assert launch("prepare-model", command) == 0
    assert "warning" not in capsys.readouterr().err
    assert LitCheckpoint(folder).config == HfFolder(folder).config


@pytest.mark.parametrize(
    "config_json", [None, "{", '{"model_type": "mine", "rope_theta": 1.0}', '{"model_type": "phi3"}']
)
def test_a_config_json_that_says_nothing_of_positions_is_no_warning(
    tmp_path: Path, config_json: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = tiny_lit(tmp_path / "m")
    if config_json is not None:
        (folder / "config.json").write_text(config_json)
    LitCheckpoint(folder)
    assert not caplog.records


def test_wrong_positions_without_other_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, _ = tiny_lit(tmp_path / "m")
    changed = {**hf_config("Llama-3.1-8B", tiny_state()[0]), "rope_theta": 1e6}
    (folder / "config.json").write_text(json.dumps(changed))
    LitCheckpoint(folder)
    LitCheckpoint(folder)
    (record,) = caplog.records
    assert "rope_base" in record.getMessage() and "download the model again" in record.getMessage()


def test_a_dtype(tmp_path: Path) -> None:
    directory, state = tiny_hf(tmp_path / "m")
    convert(directory, dtype="bfloat16", progress=False)
    _assert_holds(directory, state, torch.bfloat16)
    with pytest.raises(UsageError) as e:
        convert(directory, dtype="int3")
    assert "'int3'" in str(e.value)


def test_safetensors_go_before_bin(tmp_path: Path) -> None:
    directory, state = tiny_hf(tmp_path / "m")
    (directory / "pytorch_model.bin").write_bytes(b"not looked at")
    (directory / "training_args.bin").write_bytes(b"nor this")
    convert(directory, progress=False)
    _assert_holds(directory, state)


def test_a_known_name_that_contradicts_config_json(tmp_path: Path) -> None:
    directory, _ = tiny_hf(tmp_path / "m")
    with pytest.raises(CheckpointError) as e:
        convert(directory, "Llama-3.2-1B", progress=False)
    assert (
        "num_hidden_layers is 5" in str(e.value)
        and "n_layer" in str(e.value)
        and "'Llama-3.2-1B' is 16" in str(e.value)
    )
    with pytest.raises(CheckpointError) as e:
        convert(directory, "No-Such-7B", progress=False)
    assert "'No-Such-7B'" in str(e.value)
    assert not is_lit_dir(directory)


def test_a_folders_name_does_not_contradict_config_json(tmp_path: Path) -> None:
    directory, state = tiny_hf(tmp_path / "pythia-14m")
    convert(directory, progress=False)
    _assert_holds(directory, state)


@pytest.mark.parametrize("word", ["Gemma", "OLMo"])
def test_a_name_does_not_make_a_family(tmp_path: Path, word: str) -> None:
    """litgpt adds one to the norms of whatever has "Gemma" in its name."""
    directory, _ = tiny_hf(tmp_path / f"{word}-of-mine")
    convert(directory, progress=False)
    assert word not in LitCheckpoint(directory).model


def _edit(**changes: Any) -> Any:
    def edit(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def _drop(key: str) -> Any:
    def edit(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != key}))

    return edit


def _weights(change: Any) -> Any:
    def edit(directory: Path) -> None:
        weights = load_file(directory / "model.safetensors")
        change(weights)
        save_file(weights, directory / "model.safetensors")

    return edit


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (_edit(model_type="mamba"), "'mamba'"),
        (_drop("model_type"), "model_type"),
        (_edit(model_type=["llama"]), "model_type"),
        (_drop("hidden_size"), "'hidden_size'"),
        (_drop("rms_norm_eps"), "'rms_norm_eps'"),
        (_edit(hidden_size="64"), "config.json"),
        (_edit(num_attention_heads=7, head_dim=None, num_key_value_heads=None), "7 heads"),
        (_edit(attention_bias=True), "attention_bias"),
        (_edit(rope_scaling={"rope_type": "proportional", "factor": 2.0}), "'proportional'"),
        (_edit(rope_scaling={"rope_type": "longrope", "factor": 2.0}), "short_factor"),
        (_edit(rope_scaling=3), "config.json"),
        (lambda d: (d / "config.json").write_text("{"), "config.json"),
        (lambda d: (d / "config.json").write_text("[]"), "config.json"),
        (lambda d: (d / "config.json").write_text("<html>404</html>"), "web page"),
        (_edit(intermediate_size=65), "fc_1.weight has the shape [64, 48], expected [65, 48]"),
        (_weights(lambda w: w.pop("model.norm.weight")), "transformer.ln_f.weight"),
        (_weights(lambda w: w.pop("model.layers.2.self_attn.k_proj.weight")), "h.2.attn.qkv.weight"),
        (_weights(lambda w: w.update({"model.layers.1.odd": torch.ones(1)})), "model.layers.<i>.odd"),
        (
            _weights(lambda w: [w.pop(n) for n in ("lm_head.weight", "model.embed_tokens.weight")]),
            "embedding",
        ),
        (lambda d: os.truncate(d / "model.safetensors", 5000), "model.safetensors"),
        (lambda d: (d / "model.safetensors").unlink(), "Hugging Face"),
    ],
)
def test_what_cannot_be_converted(tmp_path: Path, damage: Any, name: str) -> None:
    directory, _ = tiny_hf(tmp_path / "m")
    damage(directory)
    with pytest.raises(CheckpointError) as caught:
        convert(directory, progress=False)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not is_lit_dir(directory)
    assert not list(directory.glob("*.part"))


def test_a_missing_shard_and_a_strange_index(tmp_path: Path) -> None:
    directory, _ = tiny_hf(tmp_path / "m", n_shards=2)
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError) as e:
        convert(directory, progress=False)
    assert "model-00002-of-00002" in str(e.value)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    with pytest.raises(CheckpointError) as e:
        convert(directory, progress=False)
    assert index.name in str(e.value)
    index.write_text("[]")
    with pytest.raises(CheckpointError) as e:
        convert(directory, progress=False)
    assert index.name in str(e.value)


def test_code_in_a_bin_is_not_run(tmp_path: Path) -> None:
    directory, _ = tiny_hf(tmp_path / "m", suffix="bin")
    witness = tmp_path / "run"

    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (witness,)

    torch.save({"model.norm.weight": Evil()}, directory / "pytorch_model.bin")
    with pytest.raises(CheckpointError) as e:
        convert(directory, progress=False)
    assert "pytorch_model.bin" in str(e.value) and e.value.code == "weights"
    assert not witness.exists()


def test_no_space_to_convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, _ = tiny_hf(tmp_path / "m")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(CheckpointError) as caught:
        convert(directory, progress=False)
    assert caught.value.code == "disk"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="resource limits are POSIX")
def test_a_disk_that_gets_full(tmp_path: Path) -> None:
    directory, _ = tiny_hf(tmp_path / "m")
    code = (
        "import resource, sys; from mdi.checkpoint.convert import convert; from mdi.errors import CheckpointError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try: convert(sys.argv[1], progress=False)\n"
        "except CheckpointError as e: print(e)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(directory)], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.stdout.count("\n") == 1, done.stderr
    assert "cannot write" in done.stdout and "lit_model.pth" in done.stdout
    assert not list(directory.glob("*.part")) and not is_lit_dir(directory)


# -- the command


def test_the_command_from_hugging_face_to_chunks(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, state = tiny_hf(tmp_path / "m")
    before = sorted(directory.iterdir())
    assert launch("prepare-model", [str(directory), "--n-nodes", "3"]) == 0
    output = capsys.readouterr()
    assert "error" not in output.err
    union: State = {}
    for node in ("starter", "secondary0", "secondary1"):
        path = find_chunk(home / "m", 3, node)
        start, stop = ChunkFile(path).manifest.blocks
        assert block_span(start, stop) in output.out
        assert str(path) in output.out
        chunk = ChunkFile(path)
        union.update({name: tensor for part in chunk.part_names() for name, tensor in chunk.tensors(part).items()})
    assert all(torch.equal(union[name], state[name]) for name in state)
    assert "starter.py --chunk" in output.out
    assert sorted(directory.iterdir()) == before, "nothing is written into somebody's folder"


def test_another_model_of_the_same_name_is_not_written_over(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tiny_hf(tmp_path / "a" / "m")[0], tiny_hf(tmp_path / "b" / "m")[0]
    assert launch("prepare-model", [str(first)]) == 0
    assert launch("prepare-model", [str(second)]) == 2
    assert str(home / "m") in capsys.readouterr().err
    assert launch("prepare-model", [str(second), "--out", str(tmp_path / "mine")]) == 0
    assert is_lit_dir(tmp_path / "mine") and not is_lit_dir(second)
    assert launch("prepare-model", [str(second), "--out", str(second)]) == 0
    assert is_lit_dir(second)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_model_that_cannot_be_converted_leaves_nothing_in_the_way(tmp_path: Path, is_there: bool) -> None:
    bad, good = tiny_hf(tmp_path / "a" / "m")[0], tiny_hf(tmp_path / "b" / "m")[0]
    (bad / "tokenizer_config.json").write_text("{}")
    (bad / "config.json").write_text("{}")
    out = tmp_path / "out"
    if is_there:
        out.mkdir()
    assert launch("prepare-model", [str(bad), "--out", str(out)]) == 1
    assert out.is_dir() is is_there and not (is_there and list(out.iterdir()))
    assert launch("prepare-model", [str(good), "--out", str(out)]) == 0
    assert is_lit_dir(out) and not (out / "tokenizer_config.json").exists()


def test_an_earlier_result_survives_a_conversion_that_fails(tmp_path: Path) -> None:
    """The weights that it was made from have changed, and are damaged."""
    directory, out = tiny_hf(tmp_path / "m")[0], tmp_path / "out"
    assert launch("prepare-model", [str(directory), "--out", str(out)]) == 0
    before = sorted(out.iterdir())
    (weights,) = directory.glob("*.safetensors")
    weights.write_bytes(b"damaged")
    os.utime(weights, (4e9, 4e9))
    assert launch("prepare-model", [str(directory), "--out", str(out)]) == 1
    assert sorted(out.iterdir()) == before


def test_a_model_in_the_checkpoints_folder_is_converted_where_it_is(home: Path) -> None:
    directory, _ = tiny_hf(home / "org" / "m")
    assert launch("prepare-model", [str(directory)]) == 0
    assert is_lit_dir(directory) and not (home / "m").exists()


def test_chunks_of_a_checkpoint_go_where_one_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory, _ = tiny_lit(tmp_path / "m")
    (directory / "tokenizer_config.json").write_text("{}")
    out = tmp_path / "out"
    for _ in range(2):
        assert launch("prepare-model", [str(directory), "--n-nodes", "2", "--out", str(out)]) == 0
    assert ChunkFile(find_chunk(out, 2, "starter")).model and not (directory / "chunks").exists()
    assert (out / "tokenizer_config.json").is_file(), "whoever runs the chunks looks for it there"
    assert launch("prepare-model", [str(directory), "--n-nodes", "2"]) == 0
    assert find_chunk(directory, 2, "starter").is_file()


def test_layers_and_dtype(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory, state = tiny_lit(tmp_path / "m")
    assert launch("prepare-model", [str(directory), "--layers", "0,1,4", "--dtype", "float16"]) == 0
    assert "no blocks" in capsys.readouterr().out
    chunk = ChunkFile(find_chunk(directory, 3, "secondary1"))
    assert chunk.manifest.blocks == (1, 5)
    assert chunk.dtype == "float16"
    name = "transformer.h.4.attn.qkv.weight"
    assert chunk.manifest.format == "fp16"
    assert torch.equal(chunk.tensors("block.4")[name], state[name].half().float())


def test_without_nodes_the_model_is_only_made_ready(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, directory = tiny_hf(tmp_path / "m")[0], home / "m"
    assert launch("prepare-model", [str(given)]) == 0
    told = capsys.readouterr()
    assert f"chat.py --ckpt {directory}" in told.out
    assert "warning" not in told.err
    assert is_lit_dir(directory)
    assert not (directory / "chunks").exists()


def test_what_is_to_be_called_next_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has installed the package has no starter.py; and without a tokenizer nothing can be called."""
    given = tiny_hf(tmp_path / "m")[0]
    (given / "tokenizer.json").unlink()
    monkeypatch.setattr("mdi.cli.launchers", lambda: None)
    assert launch("prepare-model", [str(given)]) == 0
    told = capsys.readouterr()
    assert "mdi chat --ckpt" in told.out and ".py" not in told.out
    assert "m has no tokenizer" in told.err and "tokenizer.json" in told.err


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_damaged_file_is_told_before_torch_is_imported(tmp_path: Path, name: str) -> None:
    directory, _ = tiny_hf(tmp_path / "m")
    os.truncate(directory / name, (directory / name).stat().st_size // 2)
    code = (
        "import sys\nfrom mdi.cli import launch\n"
        "assert launch('prepare-model', sys.argv[1:]) == 1\n"
        "assert 'torch' not in sys.modules\n"
    )
    argv = [sys.executable, "-c", code, str(directory), "--out", str(tmp_path / "out")]
    done = subprocess.run(argv, cwd=ROOT / "src", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and str(directory / name) in done.stderr, done.stderr
    assert not (tmp_path / "out").exists()


def test_a_newer_hugging_face_model_is_converted_again(tmp_path: Path, home: Path) -> None:
    directory, _ = tiny_hf(tmp_path / "m")
    assert launch("prepare-model", [str(directory)]) == 0
    config, state = tiny_state(seed=9)
    write_hf(directory, hf_config("Llama-3.1-8B", config), hf_state(config, state))
    later = (home / "m" / "lit_model.pth").stat().st_mtime + 10
    os.utime(directory / "model.safetensors", (later, later))
    assert launch("prepare-model", [str(directory)]) == 0
    _assert_holds(home / "m", state)


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        (["{m}", "--n-nodes", "7"], 2, "a model of 5 blocks can be cut for 1 to 6 nodes"),
        (["{m}", "--n-nodes", "0"], 2, "--n-nodes 0"),
        (["{m}", "--n-nodes", "3", "--layers", "4,1"], 2, "2 nodes, but there are 3"),
        (["{m}", "--layers", "4,2"], 2, "6 blocks in all, but the model has 5"),
        (["{m}", "--layers", "5,0"], 2, "secondary0 gets no block"),
        (["{m}", "--model-name", "pythia-14m"], 2, "was converted as 'Llama-3.1-8B'"),
        (["{m}/lit_model.pth"], 2, "is a file"),
        (["{m}/no/where"], 2, "no/where"),
        (["./nowhere"], 2, "nowhere"),
        (["{m}/.."], 2, "has no model"),
    ],
)
def test_one_line_that_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], status: int, message: str
) -> None:
    directory, _ = tiny_lit(tmp_path / "m")
    assert launch("prepare-model", [arg.format(m=directory) for arg in args]) == status
    output = capsys.readouterr().err
    assert output.count("\n") == 1
    assert output.startswith("error: ")
    assert message.format(m=directory) in output
    assert not (directory / "chunks").exists()


def test_the_launcher() -> None:
    launcher = ROOT / "src" / "prepare_model.py"
    done = subprocess.run([sys.executable, launcher, "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    for flag in ("--n-nodes", "--layers", "--ckpt-folder", "--hf-token", "--revision", "--dtype", "--device"):
        assert flag in done.stdout
    assert "examples:" in done.stdout
    if sys.platform != "win32":
        assert os.access(launcher, os.X_OK)


def test_converted_and_ready_made_are_the_same_model(tmp_path: Path) -> None:
    hf, _ = tiny_hf(tmp_path / "a")
    lit, _ = tiny_lit(tmp_path / "b")
    convert(hf, progress=False)
    one, other = LitCheckpoint(hf), LitCheckpoint(lit)
    assert one.config_hash == config_hash(one.config)
    assert [one.info(p) for p in one.part_names()] == [other.info(p) for p in other.part_names()]
