"""A GGUF file where the commands take a checkpoint: --ckpt, and prepare_model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gguf_files import byte_level_tokens, write_gguf
from mdi.checkpoint.ggufsource import GgufSource, gguf_directory
from mdi.checkpoint.source import ChunkFile, open_source
from mdi.cli import launch
from mdi.errors import INSTALL_ALL, CheckpointError
from missing_libraries import without
from tiny_checkpoint import reference, tiny_config, tiny_gpt, tokenizer, write_checkpoint

ROOT = Path(__file__).parents[1]
PROMPT = "The ring is"
FAMILY = "Llama-3.1-8B"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MDI_STORE", str(tmp_path / "checkpoints"))
    tokens = byte_level_tokens(json.loads(tokenizer().to_str()), **{"tokenizer.ggml.eos_token_id": 0})
    return write_gguf(tmp_path / "models" / "tiny.gguf", FAMILY, tiny_config(), tiny_gpt().state_dict(), tokens=tokens)


def test_ckpt_takes_the_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--prompt", PROMPT, "--n-tokens", "12", "--temperature", "0", "--no-stream", "--dtype", "float32"]
    assert launch("sample", ["--ckpt", str(file), *arguments]) == 0
    assert tokenizer().decode(list(reference(PROMPT, 12))) in capsys.readouterr().out
    assert [path.name for path in file.parent.iterdir()] == [file.name]  # nothing is written beside somebody's file


def test_a_starter_reads_it_without_torch_and_litgpt(file: Path, tmp_path: Path) -> None:
    arguments = ["--prompt", PROMPT, "--n-tokens", "12", "--temperature", "0", "--no-stream", "--dtype", "float32"]
    code = without(("torch", "litgpt", "lightning", "transformers", "safetensors")) + (
        "import mdi.cli\nfrom pathlib import Path\nmdi.cli.default_ckpt_folder = lambda: Path(sys.argv[1])\n"
        "sys.exit(mdi.cli.launch('sample', sys.argv[2:]))\n"
    )
    argv = [sys.executable, "-c", code, str(tmp_path / "home"), "--ckpt", str(file), *arguments]
    done = subprocess.run(argv, cwd=ROOT / "src", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert tokenizer().decode(list(reference(PROMPT, 12))) in done.stdout


def test_a_pickle_without_torch_says_what_to_do(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny")
    code = without(("torch",)) + "from mdi.cli import launch\nsys.exit(launch('sample', sys.argv[1:]))\n"
    argv = [sys.executable, "-c", code, "--ckpt", str(folder), "--n-tokens", "1"]
    done = subprocess.run(argv, cwd=ROOT / "src", capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.count("error:") == 1 and "lit_model.pth" in done.stderr and INSTALL_ALL in done.stderr


def test_the_file_itself_is_a_source(file: Path) -> None:
    source = open_source(file)
    assert isinstance(source, GgufSource) and source.info("head").n_bytes > 0
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_prepare_model_cuts_it(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert launch("prepare-model", [str(file), "--n-nodes", "2", "--ckpt-folder", str(out)]) == 0
    capsys.readouterr()
    directory = gguf_directory(file, out)
    state = tiny_gpt().state_dict()
    chunks = sorted(directory.glob("chunks/2nodes/*.safetensors"))
    assert len(chunks) == 2
    for path in chunks:
        chunk = ChunkFile(path)
        for part in chunk.part_names():
            chunk.verify_part(part)
            for name, tensor in chunk.tensors(part).items():
                torch.testing.assert_close(tensor, state[name], rtol=0, atol=3e-7)
    assert not list(directory.glob("lit_model*"))


def test_a_changed_file_gets_another_directory(file: Path, tmp_path: Path) -> None:
    first = gguf_directory(file, tmp_path)
    assert gguf_directory(file, tmp_path) == first
    file.write_bytes(file.read_bytes() + bytes(64))
    assert gguf_directory(file, tmp_path) != first
    file.unlink()
    with pytest.raises(CheckpointError) as e:
        open_source(first)
    assert str(file) in str(e.value)


@pytest.mark.parametrize("command", ["sample", "starter", "prepare-model"])
@pytest.mark.parametrize("content", [None, b"", b"GGUF and then something else"])
def test_a_file_that_is_none_is_one_line(
    file: Path, capsys: pytest.CaptureFixture[str], command: str, content: bytes | None
) -> None:
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    flag = [] if command == "prepare-model" else ["--ckpt"]
    assert launch(command, [*flag, str(file)]) == (2 if content is None else 1)
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and "\n" not in error and str(file) in error
