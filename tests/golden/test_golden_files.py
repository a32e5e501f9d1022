"""Files that programs of before wrote load, and say what they said; see golden_files.py."""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from golden.golden_files import (
    CONFIG,
    EXAMPLES,
    FILES,
    KINDS,
    LORA,
    PACKED,
    PROGRESS,
    RECORD,
    SIDES,
    TRAINING,
    fill,
    side_module,
    side_training,
    tensors_training,
    trained_model,
    tuned,
)  # fmt: skip
from golden.golden_values import lit_folder, state_of
from mdi.checkpoint.adapters import AdapterName, weights_hash
from mdi.checkpoint.chunks import ChunkFile, find_chunk
from mdi.checkpoint.derived import PackedSource
from mdi.checkpoint.manifest import config_hash
from mdi.checkpoint.packing import Packing, plain
from mdi.checkpoint.parts import PartInfo
from mdi.checkpoint.source import open_source
from mdi.checkpoint.store import BlockStore
from mdi.checkpoint.virtual_adapters import open_adapter
from mdi.model.plain import spec_of
from mdi.run.journal import Journal, read_record
from mdi.stages.side import check_base, read_side
from mdi_training.checkpoint import load_state
from mdi_training.loop import make_optimizer
from mdi_training.tuned_tensors import read_tensors


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return lit_folder(tmp_path / "model", CONFIG)


def test_a_journal_is_read_and_goes_on(tmp_path: Path) -> None:
    path = Path(shutil.copy(FILES / "journal", tmp_path))
    found = read_record(path)
    assert (found.flags, found.identity, found.numbers) == (RECORD.flags, RECORD.identity, RECORD.numbers)
    assert [(text.prompt, text.prompt_ids) for text in found.texts] == [
        (text.prompt, text.prompt_ids) for text in RECORD.texts
    ]
    assert [text.ids for text in found.texts] == [[4, 5], [6]]
    assert [(text.finish_reason, text.may_differ_from) for text in found.texts] == [(None, None), ("length", 0)]
    journal, _ = Journal.reopen(path)
    journal.add(0, [8], "stop")
    journal.close()
    assert read_record(path).texts[0].ids == [4, 5, 8]
    assert path.read_bytes().startswith((FILES / "journal").read_bytes())


@pytest.mark.parametrize("name", KINDS)
def test_an_adapter_is_read(name: str, model: Path) -> None:
    source = open_source(model)
    made, wanted = read_tensors(FILES / name, CONFIG, lambda part: source, weights_hash(source)), tuned(
        name, model, is_filled=True
    )  # fmt: skip
    assert made.kind == KINDS[name] and made.named.keys() == wanted.named.keys()
    assert all(torch.equal(made.named[key], one) for key, one in wanted.named.items())
    if not KINDS[name].labels:
        adapter = open_adapter(AdapterName(name, FILES / name), 1, CONFIG, lambda: weights_hash(source))
        found = {key: array for block in adapter.blocks for key, array in adapter.arrays(block).items()}
        ours = {key: one for key, one in wanted.of_blocks().items() if not key.endswith(".gain")}
        before = wanted.before()
        assert len(found) == len(ours) + (before is not None)
        if before is not None:
            ours["transformer.h.0.prompt"] = before
        for key, one in ours.items():  # rows are named without the number of the adapter, as there is one
            stored = re.sub(r"(h\.\d+)\.(prompt|prefix_\w+)$", r"\1.1.\2", key)
            assert np.array_equal(found[stored], one.detach().numpy()), stored


@pytest.mark.parametrize("name", KINDS)
def test_fine_tuning_of_adapters_goes_on(name: str, model: Path) -> None:
    made = tuned(name, model, is_filled=False)
    training, fresh = tensors_training(made), tensors_training(tuned(name, model, is_filled=True))
    assert training.restore(FILES / name) and training.n_steps == 1
    fresh.step()
    for _ in range(2):
        assert all(torch.allclose(one, fresh.named[key]) for key, one in made.named.items())
        training.step()
        fresh.step()


@pytest.mark.parametrize("name", SIDES)
def test_a_side_network_is_read(name: str) -> None:
    found, module = read_side(FILES / name), side_module(name)
    assert found.shape == SIDES[name]
    check_base(found.shape, SIDES[name].base, spec_of(CONFIG), FILES / name)
    rows = [torch.from_numpy(np.float32([[1, -2, 0.5, 3, 1, 0, 2, -1]]) * scale) for scale in (1, 2)]
    with torch.no_grad():
        wanted = module(rows[0], rows[1:])
    compute = found.classify if SIDES[name].labels else found
    assert np.allclose(compute(*(one.numpy() for one in rows)), wanted.numpy(), atol=1e-5)


@pytest.mark.parametrize("name", SIDES)
def test_fine_tuning_of_a_side_network_goes_on(name: str) -> None:
    training, fresh = side_training(name), side_training(name)
    assert training.restore(FILES / name) and training.n_steps == 1 and len(EXAMPLES) == training.n_train
    fresh.step()
    for _ in range(2):
        assert all(torch.allclose(one, fresh.named[key]) for key, one in training.named.items())
        training.step()
        fresh.step()


def test_a_state_of_training_is_read(model: Path) -> None:
    saved = load_state(FILES / "training")
    assert (saved.settings, saved.progress, saved.lora) == (TRAINING, PROGRESS, LORA)
    assert saved.progress.elapsed_s == PROGRESS.elapsed_s and saved.data_sha256 == "f" * 64
    made = trained_model(model)
    optimizer = make_optimizer(made, TRAINING)  # type: ignore[arg-type]
    optimizer.load_state_dict(saved.optimizer)
    named = {name: one for name, one in made.named_parameters() if one.requires_grad}
    assert named.keys() == saved.weights.keys()
    fill(named)
    before = {name: one.detach().clone() for name, one in named.items()}
    step = TRAINING.lr * 1.1  # AdamW's first one, with decay
    assert all(0 < (saved.weights[name] - one).abs().max() < step for name, one in before.items())


@pytest.mark.parametrize("part", ["block.1", "embedding"])
@pytest.mark.parametrize("form", PACKED)
def test_a_packed_part_is_read(form: str, part: str, model: Path, tmp_path: Path) -> None:
    path = FILES / f"{part}.{form}.safetensors"
    data = path.read_bytes()
    info = PartInfo(part, hashlib.sha256(data).hexdigest(), len(data))
    store, wanted = BlockStore(tmp_path / "store"), PackedSource(open_source(model), Packing(form, form))
    store.directory.mkdir()
    shutil.copy(path, store.path(info.sha256))
    assert wanted.info(part) == info
    found = plain(store.part(info, CONFIG, config_hash(CONFIG)).weights(part))
    assert all(np.array_equal(found[name], array) for name, array in plain(wanted.weights(part)).items())


@pytest.mark.parametrize("form", [None, "int4"])
@pytest.mark.parametrize("node", ["starter", "secondary0"])
def test_a_chunk_is_read(node: str, form: str | None) -> None:
    chunk = ChunkFile(find_chunk(FILES, 2, node, form))
    assert chunk.config == CONFIG and chunk.config_hash == config_hash(CONFIG)
    chunk.verify_part(chunk.part_names()[0])
    state = state_of(CONFIG)
    for part in chunk.part_names():
        for name, array in plain(chunk.weights(part)).items():
            assert array.shape == state[name].shape
            assert form is not None or np.array_equal(array, state[name])
