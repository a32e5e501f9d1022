"""The time to the first token of a prompt: numbers that were worked out by hand."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from litgpt.config import Config

from clusters import MB, block, cluster, model, node
from mdi.checkpoint.hfconfig import published_config
from mdi.errors import PlacementError
from mdi.model.caches import cache_classes
from mdi.model.plain import ModelConfig, spec_of
from mdi.placement.cost import CostModel, LinkSpeed, seconds
from mdi.placement.model import Workload, model_shape
from mdi.placement.parallel import merged
from mdi.placement.plan import plan
from mdi.placement.profile import HOP_S, ClusterProfile, NodeProfile
from mdi.placement.prompts import Piece, pieces, ring_first_token_s, tensor_first_token_s
from mdi.placement.tensor_plan import plan_tensor
from mdi.placement.windows import NodeWindows
from mdi.stages.building import PROMPT_ROWS
from mdi.stages.window_budget import MARGIN_BYTES, absorbed_bytes, work_bytes

HEAD_S = 3e-3
BLOCK_S = ((1, 1e-3), (64, 10e-3), (128, 20e-3))
LINK_S = HOP_S + 150e-6
RATE = 1e9  # multiplications of attention per second


def cost_of(n_nodes: int, **changes: object) -> CostModel:
    nodes = [
        node(f"n{i}", block_s=BLOCK_S, head_s=((1, HEAD_S),), attention_macs_s=RATE, **changes) for i in range(n_nodes)
    ]
    return CostModel(cluster(*nodes), model(), Workload(1, 1000))


def test_a_prompt_is_cut_into_pieces() -> None:
    assert list(pieces(130)) == [Piece(0, 64, False), Piece(64, 64, False), Piece(128, 2, True)]
    assert list(pieces(64)) == [Piece(0, 64, True)]


def test_one_node_computes_one_piece_after_the_other() -> None:
    assert ring_first_token_s(cost_of(1), (0,), (6,), 192) == pytest.approx(3 * 6 * 10e-3 + HEAD_S)


def test_stages_of_a_ring_work_at_the_same_time() -> None:
    """Of stages of 10, 30 and 20 ms the slowest sets the pace; a frame for each node is under way."""
    link = LINK_S + 64 * 4096 / 125e6
    home = LINK_S  # rows that give no logits do not travel back
    got = ring_first_token_s(cost_of(3), (0, 1, 2), (1, 3, 2), 4 * 64)
    assert got == pytest.approx(0.01 + link + 4 * 0.03 + link + 0.02 + home + 4096 / 125e6 + HEAD_S)
    lone = ring_first_token_s(cost_of(3), (0, 1, 2), (1, 3, 2), 4 * 64, n_frames=1)
    assert lone == pytest.approx(4 * (0.06 + 2 * link + home) + 4096 / 125e6 + HEAD_S)


def test_attention_takes_longer_the_more_positions_a_row_sees() -> None:
    cost = cost_of(1)
    looking = replace(block(), look_macs=1000)
    windowed = replace(looking, window=100)
    shape = model(blocks=(looking, windowed, block(), block(), block(), block()))
    found = CostModel(cost.profile, shape, cost.workload)
    more = ring_first_token_s(found, (0,), (6,), 192) - ring_first_token_s(cost, (0,), (6,), 192)
    seen = sum(p + 1 for p in range(192)), sum(min(p + 1, 100) for p in range(192))
    assert more == pytest.approx(1000 * sum(seen) / RATE)
    state = CostModel(cost.profile, model(blocks=(replace(block(), state_macs=5000),) * 6), cost.workload)
    more = ring_first_token_s(state, (0,), (6,), 192) - ring_first_token_s(cost, (0,), (6,), 192)
    assert more == pytest.approx(6 * 5000 * 192 / RATE)


@pytest.mark.parametrize("window", [None, 1, 30, 64, 100, 128, 500])
@pytest.mark.parametrize("start", [0, 40, 100, 1000])
def test_positions_that_rows_see(window: int | None, start: int) -> None:
    of = replace(block(), look_macs=1, window=window)
    seen = sum(min(start + j + 1, window or 10**9) for j in range(64))
    assert of.attention_macs(start, 64) == pytest.approx(seen)


def test_rows_without_logits_skip_the_blocks_that_only_read() -> None:
    cost = cost_of(1)
    skipping = CostModel(cost.profile, replace(cost.shape, skipped_from=2), cost.workload)
    assert ring_first_token_s(skipping, (0,), (6,), 192) == pytest.approx(3 * 2 * 10e-3 + 4 * 1e-3 + HEAD_S)
    assert model_shape(published_config("gemma-4-31B"), "int8").skipped_from is None  # type: ignore[arg-type]


@pytest.mark.parametrize("cut", [15, 24])
def test_the_plan_of_e2b_knows_which_rows_skip_its_last_blocks(cut: int) -> None:
    """Of 192 rows one gives logits: it alone is computed in the blocks 15 to 34, and travels there with all its columns."""
    shape = model_shape(published_config("gemma-4-E2B"), "int8")  # type: ignore[arg-type]
    assert shape.skipped_from == 15 and shape.n_layer == 35 and shape.cut_bytes is not None
    profile, work = cost_of(2, memory_bytes=10_000 * MB).profile, Workload(1, 256)
    profile = replace(profile, config_hash=shape.config_hash, format="int8")  # whose times are not scaled

    def block_s(block: int, position: int, n_rows: int) -> float:
        of = shape.blocks[block]
        weights = of.macs / shape.reference.macs * dict(BLOCK_S)[n_rows]
        return weights + of.attention_macs(position, n_rows) / RATE

    def stage_s(blocks: range, position: int) -> float:
        whole = sum(block_s(i, position, 64) for i in blocks if i < 15)
        return whole + (position == 128) * sum(block_s(i, 191, 1) for i in blocks if i >= 15)

    lone = sum(stage_s(range(35), position) for position in (0, 64, 128)) + HEAD_S
    one = replace(profile, nodes=profile.nodes[:1])
    told = plan(one, shape, work, prompt_tokens=192).first_token
    assert told is not None and told.seconds == pytest.approx(lone)
    whole = plan(one, replace(shape, skipped_from=None), work, prompt_tokens=192).first_token
    all_rows = sum(block_s(i, position, 64) for i in range(35) for position in (0, 64, 128)) + HEAD_S
    assert whole is not None and whole.seconds == pytest.approx(all_rows) and all_rows > 2 * lone

    spec = spec_of(published_config("gemma-4-E2B"))  # type: ignore[arg-type]
    beside = 4 * spec.row_at(cut).cached.width  # the keys and values that all blocks from 15 on read
    assert 0 < beside < shape.cut_bytes[cut] - shape.row_bytes, "inputs of blocks are columns, too"
    sent = 64 * beside + shape.cut_bytes[cut] - beside
    ring = sum(stage_s(range(cut), position) for position in (0, 64, 128)) + stage_s(range(cut, 35), 128) + HEAD_S
    ring += LINK_S + sent / 125e6 + LINK_S + shape.row_bytes / 125e6
    assert ring_first_token_s(CostModel(profile, shape, work), (0, 1), (cut, 35 - cut), 192) == pytest.approx(ring)


def test_a_group_sums_the_rows_of_each_piece() -> None:
    cost = cost_of(2)
    shared = plan_tensor(cost)
    sums = 6 * 2 * seconds("exchange", 2, 64 * 4096, LinkSpeed(150e-6, 125e6))
    assert tensor_first_token_s(cost, shared, 128) == pytest.approx(2 * (6 * 10e-3 / 2 + sums) + HEAD_S)


def test_a_group_in_a_ring_computes_attention_together() -> None:
    nodes = tuple(node(name, block_s=BLOCK_S, attention_macs_s=RATE, group="g") for name in "ab")
    one, _ = merged(cluster(node("s"), *nodes), model(), Workload(1, 100))
    assert [found.attention_macs_s for found in one.nodes] == [0.0, 2 * RATE]


LLAMA = ModelConfig.from_litgpt(Config.from_name("tiny-llama-1.1b"))


def windowed(*limits_mb: int) -> tuple[ClusterProfile, NodeWindows]:
    nodes: list[NodeProfile] = [
        node(f"n{i}", block_s=BLOCK_S, head_s=((1, HEAD_S),), disk_read_bytes_s=100e6, window_bytes=n * MB)
        for i, n in enumerate(limits_mb)
    ]
    profile = cluster(*nodes)
    shape = model_shape(LLAMA, "int8")
    return profile, NodeWindows(LLAMA, shape, profile, Workload(1, 256))


def test_what_a_window_reads_is_part_of_the_time() -> None:
    profile, windows = windowed(600)
    shape = model_shape(LLAMA, "int8")
    found = plan(profile, shape, Workload(1, 256), windows=windows, prompt_tokens=200)
    (one,) = found.nodes
    assert one.read_bytes > 0.5e9 and one.read_s == pytest.approx(one.read_bytes / 100e6)
    assert one.memory.weights < 600 * MB < one.read_bytes + one.memory.weights and one.free_bytes == 600 * MB
    assert found.tokens_s == pytest.approx(1 / one.read_s)
    assert found.first_token is not None
    assert found.first_token.seconds == pytest.approx(one.read_s + HEAD_S, rel=1e-2), "a piece has up to 256 rows"
    assert "window:   n0 keeps" in plan_text(found) and "to the first token of 200 tokens" in plan_text(found)


def plan_text(found: object) -> str:
    from mdi.placement.plan import format_plan

    return format_plan(found)  # type: ignore[arg-type]


def test_one_frame_goes_round_where_weights_are_read() -> None:
    profile, windows = windowed(400, 400)
    found = plan(profile, model_shape(LLAMA, "int8"), Workload(4, 256), windows=windows, prompt_tokens=200)
    assert (found.n_frames, found.n_rows) == (1, 4)
    whole = sum(one.stage_s + one.link_s for one in found.nodes)
    assert found.tokens_s == pytest.approx(4 / whole)
    assert [one.read_s > 0 for one in found.nodes] == [True, True]


def test_a_node_with_memory_enough_reads_nothing() -> None:
    profile, windows = windowed(3000)
    (one,) = plan(profile, model_shape(LLAMA, "int8"), Workload(1, 256), windows=windows).nodes
    assert one.read_bytes == 0


EXPERTS = ModelConfig.from_litgpt(Config.from_name("Qwen3-30B-A3B", n_layer=8))


def test_a_window_reads_the_experts_that_rows_choose() -> None:
    """An eighth of them is in memory, or as many as a run has found there."""
    shape = model_shape(EXPERTS, "int4")
    measured = []
    for n_texts, hits in ((1, 0.0), (16, 0.0), (1, 0.9)):
        profile = cluster(
            node(
                "n0",
                block_s=BLOCK_S,
                head_s=((1, HEAD_S),),
                disk_read_bytes_s=1e9,
                window_bytes=1300 * MB,
                expert_hits=hits,
            )
        )
        windows = NodeWindows(EXPERTS, shape, profile, Workload(n_texts, 64))
        found = plan(profile, shape, Workload(n_texts, 64), windows=windows, prompt_tokens=60)
        (one,) = found.nodes
        window = windows.plan(0, 0, 8)
        assert window is not None and window.retain == 1 and one.expert_hits is not None
        assert one.expert_hits == (hits or window.n_expert_slots / (8 * 128))
        each = window.expert_bytes
        chosen = 8 * 128 * (1 - (1 - 8 / 128) ** n_texts)
        assert one.read_bytes == pytest.approx(chosen * each * (1 - one.expert_hits), rel=1e-3)
        assert one.read_s == pytest.approx(one.read_bytes / 1e9) and "of the chosen experts" in plan_text(found)
        assert found.first_token is not None
        prompt = 8 * 128 * (1 - (1 - 8 / 128) ** 60) * each * (1 - one.expert_hits) / 1e9
        assert found.first_token.seconds > prompt
        measured.append(one.read_bytes)
    assert measured[2] < measured[0] < measured[1]


def test_windows_that_cannot_be_are_refused() -> None:
    profile, windows = windowed(30)
    with pytest.raises(PlacementError, match="30.0 MB of memory are not enough for n0"):
        plan(profile, model_shape(LLAMA, "int8"), Workload(1, 256), windows=windows)
    profile = replace(profile, nodes=(replace(profile.nodes[0], disk_read_bytes_s=0.0),))
    windows = NodeWindows(LLAMA, model_shape(LLAMA, "int8"), profile, Workload(1, 256))
    with pytest.raises(PlacementError, match="disk_read_bytes_s"):
        plan(profile, model_shape(LLAMA, "int8"), Workload(1, 256), windows=windows)


@pytest.mark.parametrize("name, start", [("GLM-4.7-Flash", 1), ("gemma-4-E2B", 15)])
def test_the_memory_beside_a_window_is_that_of_a_stage(name: str, start: int) -> None:
    """What the kernels absorb, and copies of caches that blocks of the stage read: both count."""
    config = published_config(name)
    assert config is not None
    spec, length = spec_of(config), 4096
    shape = replace(model_shape(config, "int8", "fp16"), table_bytes=0, runtime_bytes=0)
    stop = spec.n_layer

    def beside(n_texts: int) -> float:
        """Bytes of caches and rows, as the refusal of a window of 1 byte says them."""
        profile = cluster(node("n0"), node("n1", disk_read_bytes_s=100e6, window_bytes=1, process_bytes=0))
        windows = NodeWindows(config, shape, profile, Workload(n_texts, length))
        with pytest.raises(PlacementError) as raised:
            windows.plan(1, start, stop)
        number, unit = re.findall(r"caches and rows ([0-9.]+) (.B)", str(raised.value))[0]
        return float(number) * {"MB": 1e6, "GB": 1e9}[unit]

    caches = sum(c.n_bytes(length) for c in cache_classes(spec, start, stop, "fp16")[0])
    work = work_bytes(spec, PROMPT_ROWS + 2, 2)
    absorbed = absorbed_bytes(spec.blocks[start:stop])
    assert absorbed > 0.8e9 or name != "GLM-4.7-Flash"
    assert beside(2) == pytest.approx(2 * caches + work + absorbed + MARGIN_BYTES, rel=0.01)
