"""Weights move once: transfers that are cut off at any point, other splits of the same model, nodes without room."""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mdi.checkpoint.source import open_source
from mdi.checkpoint.store import BlockStore
from mdi.control.client import ControlClient
from mdi.control.messages import InitRequest, PartSpec
from mdi.errors import CheckpointError, Code, ControlError, MdiError
from mdi.node.secondary import SecondaryNode
from mdi.spec.extent import Extent
from secondaries import cluster_of, entry_of, secondaries, secondary, text_of
from tiny_checkpoint import reference, write_checkpoint
from waiting import DEADLINE_S, until

N_KILLS = 20
PIECE_BYTES = 1 << 14


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Blocks of some megabytes."""
    folder = tmp_path_factory.mktemp("wide") / "wide"
    return write_checkpoint(folder, n_embd=256, n_head=8, head_size=32, intermediate_size=1024, n_layer=5)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny")


def parts_of(checkpoint: Path) -> tuple[dict[str, Any], dict[PartSpec, bytes]]:
    """Fields of a request for all blocks of a model, and the bytes of each."""
    source = open_source(checkpoint)
    data = {}
    for i in range(source.config.n_layer):
        raw = b"".join(bytes(piece) for piece in source.pieces(f"block.{i}"))
        data[PartSpec(f"block.{i}", hashlib.sha256(raw).hexdigest(), len(raw))] = raw
    fields = {"model": source.model_id}
    source.close()
    return {**fields, "blocks": (0, len(data)), "parts": tuple(data)}, data


class Killed(Exception):
    """The sender's process dies."""


class Transfer:
    """A starter that sends what is missing, and may be cut off after any number of bytes."""

    def __init__(self, fields: dict[str, Any], data: dict[PartSpec, bytes]) -> None:
        self.fields, self.data = fields, data
        self.whole: set[str] = set()  # parts that a node has confirmed
        self.sent: dict[str, int] = dict.fromkeys((part.sha256 for part in data), 0)
        self.n_resumed = 0
        self._run = 0

    def attempt(self, node: SecondaryNode, left: float, die: Any) -> bool:
        """Send until `left` bytes have gone; then `die`. True if everything arrived."""
        self._run += 1
        run = f"{self._run:016x}"
        client = ControlClient(entry_of(node))
        request = InitRequest(
            run=run, epoch=run, index=1, names=("starter", "secondary0"), placement="p", next_addr="127.0.0.1", next_port=1,
            extent=Extent(10), **self.fields,
        )  # fmt: skip
        client.init(request)
        missing = self._missing(client, run)
        by_sha = {part.sha256: part for part in self.data}
        assert not self.whole & set(missing), "a block that had arrived whole is asked for again"
        assert self.whole | set(missing) == set(by_sha)
        for sha, have in missing.items():
            part = by_sha[sha]
            assert 0 <= have <= part.n_bytes
            self.n_resumed += have > 0
            left -= part.n_bytes - have
            pieces = self._pieces(part, have, left, die)
            try:
                client.send_part(part, run, have, pieces)
            except Killed:
                return False
            except ControlError:
                assert left < 0
                return False
            self.whole.add(sha)
        client.stop(run)
        return True

    @staticmethod
    def _missing(client: ControlClient, run: str) -> dict[str, int]:
        for _ in range(2000):
            missing = client.status(run)["missing"]
            if missing is not None:
                return {entry["sha256"]: entry["have_bytes"] for entry in missing}
            threading.Event().wait(0.01)
        raise AssertionError("the node does not say what it lacks")

    def _pieces(self, part: PartSpec, have: int, left: float, die: Any) -> Iterator[bytes]:
        """The rest of a part; `left` is what may still be sent after it, below 0 by as much as must not be sent."""
        raw = self.data[part]
        stop = part.n_bytes if left >= 0 else max(have, int(part.n_bytes + left))
        for i in range(have, stop, PIECE_BYTES):
            piece = raw[i : min(i + PIECE_BYTES, stop)]
            self.sent[part.sha256] += len(piece)
            yield piece
        if left < 0:
            die()
            raise Killed


@pytest.mark.slow
def test_a_transfer_killed_twenty_times(wide: Path, tmp_path: Path) -> None:
    """At random points, the starter or the node, in turns of chance; no block that had arrived whole is sent again."""
    draw = random.Random(1)
    fields, data = parts_of(wide)
    total = sum(part.n_bytes for part in data)
    transfer = Transfer(fields, data)
    n_kills = n_restarts = 0
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(secondary(0, tmp_path / "cache"))
        while n_kills < N_KILLS or len(transfer.whole) < 3:  # what was on its way to a killed node is lost: chance
            kills_node = draw.random() < 0.3
            there = sum(node.store.partial_bytes(p.sha256) for p in data) + sum(
                p.n_bytes for p in data if node.store.has(p.sha256)
            )
            sent = draw.randint(0, 2 * (total - there) // max(3, N_KILLS + 2 - n_kills))
            assert not transfer.attempt(node, sent, node.close if kills_node else int)
            n_kills += 1
            if kills_node:  # what lies in its cache is all that the next one knows
                n_restarts += 1
                stack.close()
                node = stack.enter_context(secondary(0, tmp_path / "cache"))
            else:
                node.stop(f"{transfer._run:016x}", leave=False)
                wait_idle(node)
        assert transfer.attempt(node, float("inf"), int)
        wait_idle(node)
    assert n_restarts >= 2 and n_kills - n_restarts >= 5 and transfer.n_resumed >= 5
    store = BlockStore(tmp_path / "cache")
    for part, raw in data.items():
        assert store.path(part.sha256).read_bytes() == raw
    assert not list((tmp_path / "cache").glob("*.part"))
    assert sum(transfer.sent.values()) >= total


def wait_idle(node: SecondaryNode) -> None:
    until(lambda: not node.runs.active)


def test_the_bytes_of_a_part_that_had_come_are_not_sent_again(wide: Path, tmp_path: Path) -> None:
    """Cut off in the middle of a block with the connection closed in good order: what was sent was kept."""
    fields, data = parts_of(wide)
    total = sum(part.n_bytes for part in data)
    transfer = Transfer(fields, data)
    with secondary(0, tmp_path / "cache") as node:
        assert not transfer.attempt(node, total // 2, int)
        node.stop(f"{transfer._run:016x}", leave=False)
        wait_idle(node)
        assert transfer.attempt(node, float("inf"), int)
    # all that can be lost is what was on its way, in a system's buffers
    assert sum(transfer.sent.values()) <= total + (8 << 20)


def sending(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(node, part) of everything that is sent from now on."""
    sent: list[tuple[str, str]] = []
    original = ControlClient.send_part

    def send_part(self: ControlClient, part: PartSpec, *args: Any) -> None:
        sent.append((self.node.name, part.name))
        original(self, part, *args)

    monkeypatch.setattr(ControlClient, "send_part", send_part)
    return sent


def generate(nodes: list[SecondaryNode], checkpoint: Path, layers: str) -> list[int]:
    return text_of(cluster_of(nodes), checkpoint, 5, layers=layers)


@pytest.mark.slow
def test_a_new_split_sends_only_the_blocks_that_moved(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = list(reference("The ring", 5))
    sent = sending(monkeypatch)
    with secondaries(2, tmp_path) as nodes:
        assert generate(nodes, tiny, "1,2,2") == expected
        first = [
            ("secondary0", "block.1"),
            ("secondary0", "block.2"),
            ("secondary1", "block.3"),
            ("secondary1", "block.4"),
        ]
        assert sorted(sent) == first
        sent.clear()
        assert generate(nodes, tiny, "1,3,1") == expected
        assert sent == [("secondary0", "block.3")]
        sent.clear()
        for layers in ("1,2,2", "1,3,1", "1,1,3"):
            assert generate(nodes, tiny, layers) == expected
        assert sent == [("secondary1", "block.2")], "what a node had in an earlier split it still has"


@pytest.mark.slow
def test_a_cache_with_a_limit_forgets_what_was_used_longest_ago(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, data = parts_of(tiny)
    each = max(part.n_bytes for part in data)
    sent = sending(monkeypatch)
    with secondary(0, tmp_path / "cache", cache_bytes=3 * each + 100) as node:
        generate([node], tiny, "2,3")
        other = write_checkpoint(tmp_path / "other", seed=9)
        generate([node], other, "3,2")
        assert len(node.store.parts()) == 3, "two of the new model, one of the old"
        sent.clear()
        generate([node], other, "3,2")
        assert sent == []
    with secondary(0, tmp_path / "cache", cache_bytes=3 * each + 100) as node:  # with nothing in its memory
        with pytest.raises(MdiError, match="--cache-size"):
            generate([node], tiny, "1,4")
        wait_idle(node)
        assert len(node.store.parts()) == 3, "nothing is forgotten for what does not fit anyhow"
        assert generate([node], tiny, "2,3") == list(reference("The ring", 5))


def test_a_node_without_memory_is_told_before_anything_is_sent(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = sending(monkeypatch)
    with secondary(0, tmp_path / "cache") as node:
        monkeypatch.setattr(type(node.profiler), "available_bytes", lambda self, device: 50_000)
        with pytest.raises(MdiError, match=r"secondary0 has 50.0 kB of memory free") as caught:
            generate([node], tiny, "1,4")
        assert caught.value.code == "memory"
        assert sent == []
        wait_idle(node)
        monkeypatch.undo()
        assert generate([node], tiny, "1,4") == list(reference("The ring", 5))


def test_kept_weights_that_were_damaged_are_sent_again(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signs flipped in one file, while no process looked: the next run has the right text, and only that part is sent."""
    expected = list(reference("The ring", 5))
    with secondary(0, tmp_path / "cache") as node:
        assert generate([node], tiny, "1,4") == expected
    for damage in (flip_signs, cut_short):
        damaged = sorted((tmp_path / "cache").glob("*.safetensors"))[1]
        damage(damaged)
        sent = sending(monkeypatch)
        with secondary(0, tmp_path / "cache") as node:
            assert generate([node], tiny, "1,4") == expected
        assert len(sent) == 1 and damaged.exists()
        monkeypatch.undo()


def flip_signs(path: Path) -> None:
    import os

    status, data = path.stat(), bytearray(path.read_bytes())
    for i in range(len(data) // 2, len(data) - 4, 4):
        data[i + 3] ^= 0x80
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


# The store itself


def put(store: BlockStore, name: str, n_bytes: int, used_s: float, suffix: str = ".safetensors") -> str:
    import os

    sha = hashlib.sha256(name.encode()).hexdigest()
    path = store.directory / f"{sha}{suffix}"
    path.write_bytes(bytes(n_bytes))
    os.utime(path, (used_s, used_s))
    return sha


def test_space_is_freed_by_age(tmp_path: Path) -> None:
    store = BlockStore(tmp_path, 1000)
    shas = [put(store, f"part{i}", 300, 1000.0 - i) for i in range(3)]
    (tmp_path / "profiles.json").write_text("{}")
    assert store.free_space(100, set()) == 0
    assert store.free_space(101, set()) == 300 and store.parts() == tuple(sorted(shas[:2]))
    assert store.free_space(400, {shas[1]}) == 0
    assert store.free_space(500, {shas[1]}) == 300 and store.parts() == (shas[1],)
    with pytest.raises(CheckpointError, match="--cache-size"):
        store.free_space(800, {shas[1]})
    assert store.parts() == (shas[1],)
    partial = put(store, "begun", 600, 1.0, ".part")
    assert store.free_space(400, {partial}) == 300, "a part of this run that has begun to come is kept"
    assert (tmp_path / f"{partial}.part").exists() and (tmp_path / "profiles.json").exists()
    assert BlockStore(tmp_path / "nowhere", 10).free_space(5, set()) == 0


def test_what_other_runs_need_is_not_removed(tmp_path: Path) -> None:
    store = BlockStore(tmp_path, 1000)
    shas = [put(store, f"part{i}", 300, 1000.0 + i) for i in range(2)]
    coming = put(store, "coming", 300, 1.0, ".part")
    with store.in_use({shas[0], coming}):
        with store.in_use({coming}):
            assert store.free_space(300, set()) == 300 and store.parts() == (shas[0],)
        with pytest.raises(CheckpointError) as caught:
            store.free_space(500, set())
        assert caught.value.code == "disk" and store.partial_bytes(coming) == 300, "the outer one still needs it"
    assert store.free_space(500, set()) == 300 and not store.partial_bytes(coming)


def test_space_is_made_beside_a_part_that_is_being_received(tmp_path: Path) -> None:
    raw = bytes(range(256)) * 4
    part = PartSpec("block.0", hashlib.sha256(raw).hexdigest(), len(raw))
    store = BlockStore(tmp_path, 2000)
    left, removed = [raw[:512], raw[512:]], []

    def read(n: int) -> bytes:
        if len(left) == 1:
            with contextlib.suppress(CheckpointError):
                removed.append(store.free_space(1800, set()))
        return left.pop(0)

    store.receive(part, 0, read)
    assert not removed and store.path(part.sha256).read_bytes() == raw


def test_the_parts_of_a_run_stay_until_it_has_loaded_them(tiny: Path, tmp_path: Path) -> None:
    fields, data = parts_of(tiny)
    transfer = Transfer(fields, data)
    with secondary(0, tmp_path) as node:
        store, limit = node.store, 2 * sum(part.n_bytes for part in data)
        store.limit_bytes = limit
        sizes = [part.n_bytes for part in data]
        assert not transfer.attempt(node, sizes[0] + 10, lambda: None)
        (job,) = node.runs.active
        whole = store.parts()
        assert len(whole) == 1 and whole[0] in transfer.whole
        for keep in (set(), {"f" * 64}):
            with pytest.raises(CheckpointError) as caught:
                store.free_space(limit, keep)
            assert caught.value.code == "disk"
        assert store.parts() == whole
        job.end()
        assert job.has_ended.wait(DEADLINE_S)
        assert store.free_space(limit, set()) > 0 and not store.parts()


def test_a_part_that_is_coming_already_is_to_be_asked_for_again(tmp_path: Path) -> None:
    """Somebody else sends it, or the first transfer was cut off, and its thread has not noticed yet."""
    raw = bytes(range(256)) * 100
    part = PartSpec("block.0", hashlib.sha256(raw).hexdigest(), len(raw))
    store = BlockStore(tmp_path)
    refused: list[str] = []

    def slow(n: int) -> bytes:
        with pytest.raises(CheckpointError) as caught:
            store.receive(part, 0, lambda n: raw)
        refused.append(caught.value.code)
        return b""

    with pytest.raises(CheckpointError):
        store.receive(part, 0, slow)
    assert refused == [Code.BUSY]
    left = [raw]
    store.receive(part, 0, lambda n: left.pop() if left else b"")
    assert store.path(part.sha256).read_bytes() == raw
