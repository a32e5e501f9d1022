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
from mdi.errors import Code, NoMemoryError, UsageError
from mdi.model.plain import ModelConfig
from mdi.net.hello import Fault
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
                with pytest.raises(ApiError, check=lambda e: e.status == 409 and e.body["error"]["code"] == "adapter"):
                    act("sql")

    run(scenario())


def test_an_adapter_takes_no_name_of_a_model(folder: Path) -> None:
    assert Catalog(folder, folder / "one", ["sql"]).names() == ["one", "sql", "three", "two"]
    with pytest.raises(UsageError, match="^--adapter two: "):
        Catalog(folder, folder / "one", ["two"])
    with pytest.raises(UsageError):
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_adapters_come_and_go_while_texts_are_written(folder: Path, nodes: list[SecondaryNode], tmp_path: Path) -> None:
    """Texts under way keep theirs, and have the tokens that they have alone."""
    made_up = (("sql", 1), ("law", 2), ("art", 3))
    merged = {name: write_adapter(tmp_path / name, tiny_gpt(), seed) for name, seed in made_up}
    expected = {name: greedy(gpt, encode(TEXT), 200) for name, gpt in merged.items()}
    expected["one"] = right("one", 200)

    async def scenario() -> None:
        async with server(folder, nodes, adapter=(f"sql={tmp_path / 'sql'}",)) as made:

            async def told(name: str, n: int = 200) -> None:
                assert await made.write(name, n) == expected[name][:n], name

            def is_written(n: int) -> bool:
                return made.engine.texts()[0] >= n

            texts = [asyncio.create_task(told(name)) for name in ("sql", "one", "sql")]
            await made.until(lambda: is_written(3))
            for name in ("law", "art"):
                await made.models.load_adapter(name, str(tmp_path / name))
            assert not all(one.done() for one in texts), "the test asks for longer texts"
            texts += [asyncio.create_task(told(name)) for name in ("law", "art")]
            await made.until(lambda: made.models.idle_s("law") == 0.0 and is_written(2))
            leaving = asyncio.create_task(made.models.unload_adapter("sql"))
            await asyncio.sleep(0)
            with pytest.raises(ApiError, match="there is no model 'sql'; there are one, law, art, three, two"):
                await made.write("sql", 3)
            await asyncio.gather(*texts, leaving)
            assert made.api.catalog.adapters == made.host.loaded["one"].run.adapters == ("law", "art")
            await asyncio.gather(told("law", 20), told("one", 20), told("art", 20))
            await made.models.load_adapter("sql", str(tmp_path / "sql"))  # it takes the number that was freed
            await asyncio.gather(told("law", 20), told("sql", 20), told("art", 20))

            for name, at, why in (
                ("law", "law", "there is a model law, or an adapter, already"), ("two", "law", "there is a model two"),
                ("new", "none", "cannot be read"), ("a b", "law", "expected NAME=DIR"),
            ):  # fmt: skip
                with pytest.raises(ApiError, match=why) as refused:
                    await made.models.load_adapter(name, str(tmp_path / at))
                assert refused.value.status == 400
            with pytest.raises(ApiError, match="there is no adapter 'two'"):
                await made.models.unload_adapter("two")
            await told("law", 20)

            # A ring that is lost is formed with those that are there now.
            lost = made.host.loaded["one"]
            lost.run.ring.link.fail(Fault("", "as a test wants", "starter", Code.ENGINE))  # type: ignore[union-attr]
            await made.until(lambda: "one" in made.serving)
            await asyncio.gather(told("law", 20), told("sql", 20), told("one", 20))

    run(scenario())


def test_a_ring_goes_on_where_a_node_cannot_have_an_adapter(
    folder: Path, nodes: list[SecondaryNode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_adapter(tmp_path / "sql", tiny_gpt(), 1)

    async def scenario() -> None:
        async with server(folder, nodes) as made:
            text = asyncio.create_task(made.write("one", 200))
            await made.until(lambda: made.engine.texts()[0] == 1)
            with monkeypatch.context() as patch:

                def no_memory(*_: Any, **__: Any) -> None:
                    raise NoMemoryError("board7 is full")

                patch.setattr("mdi.stages.store.StageStore.reserve", no_memory)
                with pytest.raises(ApiError, match="board7"):
                    await made.models.load_adapter("sql", str(tmp_path / "sql"))
            assert await text == right("one", 200)
            assert made.api.catalog.adapters == made.host.loaded["one"].run.adapters == ()
            with pytest.raises(ApiError, check=lambda e: e.body["error"]["code"] == "model_not_found"):
                await made.write("sql", 3)
            await made.models.load_adapter("sql", str(tmp_path / "sql"))
            assert len(await made.write("sql", 3)) == 3

    run(scenario())
