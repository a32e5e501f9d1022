"""Several models of one server: beside each other while there is memory, then in the place of the one unused longest."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from own_server import right, run, server

import clusters
import mdi.run.choice
from mdi.cancel import Cancel
from mdi.errors import Code, EngineError
from mdi.net.hello import Fault
from mdi.node.secondary import SecondaryNode
from mdi.run.run import Run
from mdi.serve.api_errors import ApiError
from secondaries import secondaries


def test_two_models_answer_at_the_same_time(folder: Path, nodes: list[SecondaryNode]) -> None:
    async def scenario() -> None:
        async with server(folder, nodes) as made:
            found = await asyncio.gather(made.write("one", 200), made.write("two", 60), made.write("", 60))
            assert found == [right("one", 200), right("two", 60), right("one", 60)]
            assert made.serving == {"one", "two"}
            found = await asyncio.gather(*(made.write(name, 60) for name in ("one", "two", "one", "two")))
            assert found == [right(name, 60) for name in ("one", "two", "one", "two")]
            assert [slot["state"] for slot in nodes[0].status(None)["slots"]] == ["RUNNING", "RUNNING"]
            await made.until(lambda: set(made.client.state.rings) == {"one", "two"})

    run(scenario())


def test_a_second_model_takes_what_the_first_leaves(
    folder: Path, nodes: list[SecondaryNode], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node without memory gets none of its blocks; where nothing was measured, they are shared out evenly."""
    profile = clusters.cluster(*(clusters.node(name) for name in ("starter", *(one.config.name for one in nodes))))
    monkeypatch.setattr(mdi.run.choice, "measured_cluster", lambda *args: profile)

    async def scenario() -> None:
        async with server(folder, nodes, placement="throughput") as made:
            with monkeypatch.context() as patch:
                patch.setattr(nodes[0].profiler, "available_bytes", lambda device: 0)
                assert await made.write("two", 20) == right("two", 20)
            first, second = (made.host.loaded[name].run for name in ("one", "two"))
            assert len(first.names) == 3 and second.names == ("starter", nodes[1].config.name)
            assert second.model.measured is first.model.measured is not None
            assert "shared out evenly" not in caplog.text
            first.model.measured = second.model.measured = None
            assert await made.write("three", 20) == right("three", 20)
            assert "shared out evenly" in caplog.text

    with caplog.at_level("INFO"):
        run(scenario())


def test_a_model_that_cannot_be_used_is_told_and_the_others_continue(
    folder: Path, nodes: list[SecondaryNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_session = Run.open

    def fail(self: Run, cancel: Cancel) -> None:
        if self.options.ckpt == folder / "two":
            raise ValueError("as only a defect would")
        open_session(self, cancel)

    monkeypatch.setattr(Run, "open", fail)
    tokenizer = folder / "three" / "tokenizer.json"
    whole = tokenizer.read_bytes()
    tokenizer.write_bytes(whole[:100])

    async def scenario() -> None:
        async with server(folder, nodes) as made:
            for name, status in (("two", 503), ("three", 503)):
                with pytest.raises(ApiError) as caught:
                    await made.write(name, 5)
                assert caught.value.status == status
            assert await made.write("one", 20) == right("one", 20)

    try:
        run(scenario())
    finally:
        tokenizer.write_bytes(whole)


def test_the_model_unused_longest_makes_way_and_no_node_takes_more_than_it_has(
    folder: Path, nodes: list[SecondaryNode]
) -> None:
    most = 4 << 30

    def held(node: SecondaryNode) -> int:
        return sum(slot.weight_bytes for slot in node.stages.listed if slot.use != "UNUSED")

    async def scenario() -> None:
        nonlocal most
        for node in nodes:
            node.stages.available = lambda device, node=node: most - held(node)  # type: ignore[misc]
        async with server(folder, nodes, replay_memory=0) as made:
            assert await made.write("two", 20) == right("two", 20)
            most = held(nodes[0]) * 8 // 5  # of three, one finds no memory for its caches
            assert await made.write("one", 20) == right("one", 20)
            assert await made.write("three", 20) == right("three", 20)
            assert made.serving == {"one", "three"}
            async with made.models.using("one"), made.models.using("three"):
                asked = asyncio.create_task(made.write("two", 20))
                await made.until(lambda: "one" in made.models.leaving)
                assert made.serving == {"one", "three"} and not asked.done(), "both are in use"
            assert await asked == right("two", 20)
            assert made.serving == {"two", "three"}
            assert await made.write("", 20) == right("two", 20), "the one that was used last"
            for node in nodes:
                assert held(node) <= most
                assert sum(slot.cache_bytes for slot in node.stages.listed) <= node.stages.kv_memory

    run(scenario())


def test_caches_that_have_no_memory_left_beside_others_are_told(folder: Path, tmp_path: Path) -> None:
    """What was set by hand for caches holds two texts: the second model takes the place of the first."""

    async def scenario() -> None:
        with secondaries(2, tmp_path, kv_memory=400_000) as nodes:
            async with server(folder, nodes) as made:
                assert await made.write("two", 20) == right("two", 20)
                assert made.serving == {"two"}

    run(scenario())


def test_a_model_that_nobody_uses_is_given_up(folder: Path, nodes: list[SecondaryNode]) -> None:
    async def scenario() -> None:
        async with server(folder, nodes) as made:
            await made.write("two", 5)
            keeping = asyncio.create_task(made.models.give_up_unused(0.3))
            async with made.models.using("one"):
                await made.until(lambda: made.serving == {"one"})
            await made.until(lambda: not made.serving)
            keeping.cancel()
            assert made.client.state.status["state"] == "idle"
            assert await made.write("", 5) == right("one", 5)

    run(scenario())


@pytest.mark.slow
def test_a_ring_that_is_lost_is_formed_anew_and_the_other_model_goes_on(
    folder: Path, nodes: list[SecondaryNode]
) -> None:
    async def scenario() -> None:
        async with server(folder, nodes, fixed=True) as made:
            await made.write("two", 5)
            writing = asyncio.create_task(made.write("two", 200))
            load = made.client.state.statuses["one"]["load"]
            ring = made.host.loaded["one"].run.ring.link  # type: ignore[union-attr]
            ring.fail(Fault("secondary0", "it failed", "starter", Code.ENGINE))  # type: ignore[union-attr]
            await made.until(lambda: made.client.state.statuses["one"]["load"] != load)
            assert await made.write("one", 30) == right("one", 30)
            assert await writing == right("two", 200)

    run(scenario())


def test_a_loss_is_told_to_the_page_whether_it_is_open_or_not(folder: Path, nodes: list[SecondaryNode]) -> None:
    """The engine's own words, from the log of the server."""

    async def scenario() -> None:
        async with server(folder, nodes) as made:
            ring = made.host.loaded["one"].run.ring.link  # type: ignore[union-attr]
            ring.fail(Fault("secondary0", "it failed", "starter"))  # type: ignore[union-attr]
            await made.until(lambda: "the texts wait" in str(made.api.events))
            (told,) = [event for event in made.api.events if "the texts wait" in event["text"]]
            assert told["level"] == "warning" and "secondary0" in told["text"] and told["time_s"] > 1.7e9
            assert not told["text"].startswith("warning"), "its level says that"
            assert await made.write("one", 30) == right("one", 30)
            assert not made.host.loaded["one"].run.trouble

    run(scenario())


def test_a_model_that_is_not_there_any_more_cannot_be_had(folder: Path, nodes: list[SecondaryNode]) -> None:
    async def scenario() -> None:
        async with server(folder, nodes) as made:
            assert (await made.client.ask("load", {"model": "four"}))["code"] == "usage"
            with pytest.raises(EngineError):
                made.host.submit("four", {"numbers": [1], "ids": [1], "sampling": {}}, None)
            assert await made.write("one", 5) == right("one", 5)

    run(scenario())
