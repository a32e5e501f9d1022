"""Adapters behind the API: each is a model of its own name, and all are written at the same time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from litgpt.config import Config
from litgpt.model import GPT
from own_server import TEXT, right, run, server

from adapter_files import write_adapter
from conftest import NANO, Server
from families import greedy
from mdi.checkpoint.manifest import config_hash
from mdi.checkpoint.source import open_source
from mdi.cli.serve_settings import serve_settings
from mdi.errors import UsageError
from mdi.model.plain import ModelConfig
from mdi.node.secondary import SecondaryNode
from mdi.serve.api_errors import ApiError
from mdi.serve.catalog import Catalog
from mdi.spec.options import Options
from mdi.stages.side import Base, SideShape, write_side
from mdi_training.side_training import SideModule
from mdi_training.tuned_tensors import TuningKind, new_tensors
from tiny_checkpoint import encode, tiny_gpt


def test_texts_of_adapters_and_models_are_written_together(
    folder: Path, nodes: list[SecondaryNode], tmp_path: Path
) -> None:
    merged = {name: write_adapter(tmp_path / name, tiny_gpt(), seed) for name, seed in (("sql", 1), ("law", 2))}
    expected = {name: greedy(gpt, encode(TEXT), 30) for name, gpt in merged.items()}
    expected |= {name: right(name, 30) for name in ("one", "two")}

    async def scenario() -> None:
        flags = tuple(f"{name}={tmp_path / name}" for name in merged)
        async with server(folder, nodes, adapter=flags) as made:
            asked = ["sql", "one", "law", "sql", "two"]
            found = await asyncio.gather(*(made.write(name, 30) for name in asked))
            assert found == [expected[name] for name in asked]
            assert made.serving == {"one", "two"}
            assert await made.write("one", 30) == expected["one"]  # whose last text was an adapter's
            for act in (made.models.load, made.models.unload):
                with pytest.raises(ApiError, match="sql is an adapter, which comes with its model"):
                    act("sql")

    run(scenario())


def test_an_adapter_takes_no_name_of_a_model(folder: Path) -> None:
    assert Catalog(folder, folder / "one", ["sql"]).names() == ["one", "sql", "three", "two"]
    with pytest.raises(UsageError, match="there is a model of that name"):
        Catalog(folder, folder / "one", ["two"])
    with pytest.raises(UsageError, match="there is a model of that name"):
        Catalog(folder, folder / "one", ["one"])


def test_an_alias_means_a_model_or_an_adapter(folder: Path) -> None:
    given = serve_settings(Options(alias=("claude-*=two", "*-mini=sql", "one=three")))
    catalog = Catalog(folder, folder / "one", ["sql"], given.aliases)
    asked = ["claude-opus-5", "claude-mini", "gpt-mini", "one", "gpt", "", "Claude-1"]
    assert [catalog.meant(name) for name in asked] == ["two", "two", "sql", "one", "gpt", "", "Claude-1"]
    with pytest.raises(UsageError, match="--alias a=four: there is no model four; there are one, sql, three, two"):
        Catalog(folder, folder / "one", ["sql"], {"a": "four"})
    for wrong in ("claude", "=one", "claude-*="):
        with pytest.raises(UsageError, match="expected PATTERN=NAME"):
            serve_settings(Options(alias=(wrong,)))


def test_requests_choose_an_adapter_by_model(tmp_path: Path) -> None:
    gpt = GPT(Config(**yaml.safe_load((NANO / "model_config.yaml").read_text(encoding="utf-8")))).eval()
    gpt.load_state_dict(torch.load(NANO / "lit_model.pth", weights_only=True))
    write_adapter(tmp_path / "a", gpt.float(), 1, size=0.2)
    learned = new_tensors(
        TuningKind("prompt", length=6), ModelConfig.from_litgpt(gpt.config), 1, lambda part: open_source(NANO)
    )
    learned.named["prompt_embeddings"].data += 1
    learned.write(tmp_path / "b", "nano-llama", None)
    config = open_source(NANO).config
    shape = SideShape(Base("nano-llama", config_hash(config), "", "another form"), config.n_embd, (0, 1), 8, "lm")
    side = SideModule(shape, seed=3)
    torch.nn.init.normal_(side.weights["out"], 0, 0.4)
    write_side(tmp_path / "c", shape, side.tensors())
    folders = {"poet": "a", "beside": "c", "prompted": "b"}
    flags = (flag for name, at in folders.items() for flag in ("--adapter", f"{name}={tmp_path / at}"))
    made = Server(tmp_path, *flags)
    try:
        made.wait()
        status, told = made.ask("GET", "/v1/models")
        assert status == 200
        first, poet, beside, prompted = told["data"]
        assert (beside["id"], beside["parent"]) == ("beside", "nano-llama")
        assert beside["max_model_len"] == first["max_model_len"]
        assert (first["id"], poet["id"], poet["parent"]) == ("nano-llama", "poet", "nano-llama")
        assert poet["is_loaded"] and poet["max_model_len"] == first["max_model_len"] and "parent" not in first
        assert (prompted["id"], prompted["max_model_len"]) == ("prompted", first["max_model_len"] - 6)

        def text(**more: Any) -> tuple[str, str]:
            asked = {"prompt": "ROMEO:", "max_tokens": 20, "temperature": 0, **more}
            status, told = made.ask("POST", "/v1/completions", asked)
            assert status == 200, told
            return told["model"], told["choices"][0]["text"]

        plain = text()
        assert plain[0] == "nano-llama" and text(model="nano-llama") == plain
        own = text(model="poet")
        assert own[0] == "poet" and own[1] != plain[1]
        other = text(model="prompted")
        assert other[0] == "prompted" and other[1] not in (plain[1], own[1])
        third = text(model="beside")
        assert third[0] == "beside" and third[1] not in (plain[1], own[1], other[1])
        names = ("nano-llama", "poet", "prompted", "beside")
        assert [text(model=name) for name in names] == [plain, own, other, third]
        assert made.ask("POST", "/v1/completions", {"prompt": "a", "model": "other"})[0] == 404
    finally:
        made.end()
