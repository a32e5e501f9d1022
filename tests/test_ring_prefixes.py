"""What the keys of kept prefixes depend on, what a starter takes from its nodes' answers, and who has the key of a machine."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.exceptions import UnsupportedAlgorithm

from loopback import DEADLINE_S
from mdi.engine import kept_prefixes
from mdi.engine.kept_prefixes import KeptFiles, Secrets
from mdi.engine.memory import CacheMemory, Kept, NodeCaches, Prefixes
from mdi.engine.prefix_tasks import FETCH, FILL, FILLED, FIND, KEEP, PrefixTask, RingPrefixes
from mdi.engine.scheduler import FETCH_ROUNDS, PromptPace, Scheduler
from mdi.engine.sequence import Plan, PlannedSlice, SamplingParams, Sequence
from mdi.errors import EngineError, WireError
from mdi.model.caches import PAGE, PageClass
from mdi.net import keys
from mdi.net.keys import KeyFile, new_secret, write_keys
from mdi.run.ring_prefixes import StarterPrefixes
from mdi.spec.arithmetic import Arithmetic
from mdi.spec.model_id import Formats
from mdi.spec.options import ParallelOptions, StarterOptions
from test_kept_prefixes import MadeUp, keep_task, kept

OWNER = f"{'0' * 16}-{'1' * 16}"
USUAL = StarterOptions()
INT8 = Arithmetic("fused", Formats.one("int8"), "fp16")


# The keys of a ring


def of_ring(
    folder: Path, options: StarterOptions = USUAL, *, max_length: int = 512, sha256: str = "a", **of: Any
) -> RingPrefixes | None:
    spec = SimpleNamespace(blocks=())  # of which the keys contain only hashes
    model = SimpleNamespace(spec=spec, config_hash=of.pop("config_hash", "c"), dtype=of.pop("dtype", "bfloat16"))
    weights: Any = SimpleNamespace(
        blocks=[(0, 1), (1, 5)], is_shared=of.pop("is_shared", False), model=model, n_layer=5,
        spec=lambda part: SimpleNamespace(sha256=sha256 if part == "head" else part),
    )  # fmt: skip
    stage: Any = SimpleNamespace(caches=SimpleNamespace(cache_type=of.pop("cache_type", "float16")))
    arithmetic = of.pop("arithmetic", INT8)
    assert not of
    files = KeptFiles(folder, 1 << 20, Secrets(folder, None))
    return StarterPrefixes(files, options).of_ring(weights, stage, ("a", "b"), (arithmetic, arithmetic), max_length)


@pytest.mark.parametrize(
    "other",
    [
        {"max_length": 1024},  # positions may be scaled by it
        {"sha256": "b"},  # weights of the same shape
        {"config_hash": "d"},
        {"dtype": "float16"},
        {"cache_type": "int8"},
        {"arithmetic": replace(INT8, formats=Formats.one("int4"))},
        {"options": StarterOptions(quantize_head="int8")},
        {"options": StarterOptions(wire_dtype="fp16")},
        {"options": StarterOptions(dtype="float32")},
        {"is_shared": True},
    ],
    ids=str,
)
def test_whatever_the_numbers_depend_on_makes_other_keys(other: dict[str, Any], tmp_path: Path) -> None:
    first, again, changed = of_ring(tmp_path), of_ring(tmp_path), of_ring(tmp_path, **other)
    assert first is not None and again is not None and changed is not None
    assert first.seed == again.seed != changed.seed


@pytest.mark.parametrize(
    "other",
    [
        {"arithmetic": replace(INT8, share=(0, (0, 3, 6), (0, 32, 64)))},
        {"arithmetic": replace(INT8, share=(0, (0, 2, 6), (0, 64, 64)))},
        {"options": StarterOptions(parallel=ParallelOptions(algorithm="ring"))},
        {"options": StarterOptions(parallel=ParallelOptions(reduce_dtype="fp16"))},
    ],
    ids=str,
)
def test_other_shares_and_other_sums_in_groups_make_other_keys(other: dict[str, Any], tmp_path: Path) -> None:
    """All rows come from sums over all shares, whichever of them a node has."""
    own = {"arithmetic": replace(INT8, share=(0, (0, 2, 6), (0, 32, 64))), "is_shared": True}
    first, again, changed = (of_ring(tmp_path, **one) for one in (own, own, own | other))
    assert first is not None and again is not None and changed is not None
    assert first.seed == again.seed != changed.seed


@pytest.mark.parametrize(
    "other",
    [{"options": StarterOptions(verify=0.5)}, {"arithmetic": replace(INT8, unit="cuda")}],
    ids=str,
)
def test_rings_that_could_not_use_them_keep_none(other: dict[str, Any], tmp_path: Path) -> None:
    assert of_ring(tmp_path, **other) is None


def test_each_list_of_keys_and_each_key_has_folders_of_its_own(tmp_path: Path) -> None:
    """A key's folder also changes with its digest: who gets the name of a revoked key does not get its texts."""

    def folder(realm: str, owner: str, digest: str = "d") -> str:
        made = of_ring(tmp_path, StarterOptions(prefix_realm=realm, prefix_owners=((owner, digest),)))
        assert made is not None and made.owners is not None
        assert made.task(FIND, f"adapter/{owner}", []).owner == made.owners.owner
        return made.owners.owner

    one = folder("list", "a")
    assert one == folder("list", "a")
    assert one.partition("-")[0] == folder("list", "b").partition("-")[0] != folder("other", "a").partition("-")[0]
    assert len({one, folder("list", "b"), folder("other", "a"), folder("list", "a", "e")}) == 4


# Keys of a machine


def test_nodes_that_begin_at_the_same_time_have_one_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All have seen that there is no file when the first one writes it."""
    n, found = 8, list[bytes]()
    together, real = threading.Barrier(n, timeout=60), write_keys

    def write(*args: Any, **kwargs: Any) -> None:
        together.wait()
        real(*args, **kwargs)

    monkeypatch.setattr(kept_prefixes, "write_keys", write)
    threads = [threading.Thread(target=lambda: found.append(Secrets(tmp_path, None).all()[0])) for _ in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == n and set(found) == {Secrets(tmp_path, None).all()[0]}
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_a_disk_without_hard_links_gets_a_key_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(keys.os, "link", link)
    first = Secrets(tmp_path, None).all()
    write_keys(tmp_path / "key", (new_secret(),), replaces=False)
    assert Secrets(tmp_path, None).all() == first
    write_keys(tmp_path / "key", (new_secret(),))
    assert Secrets(tmp_path, None).all() != first


# Ciphers


@pytest.mark.parametrize("has_fast", [True, False])
def test_a_file_says_its_cipher(has_fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that would take the other one opens it; one that does not have it, or does not know it, removes the file."""
    write_keys(tmp_path / "cluster", (new_secret(),))
    monkeypatch.setattr(kept_prefixes, "has_fast_aes", lambda: has_fast)
    with kept([tmp_path / "files"], keys=KeyFile(tmp_path / "cluster")) as (files,):
        assert files.answer(keep_task(1), MadeUp(1)).is_done and files.flush(DEADLINE_S)
        ((path, _, _),) = files.files()
        sealed = path.read_bytes()
        assert sealed[5] == (1 if has_fast else 2)
        monkeypatch.setattr(kept_prefixes, "has_fast_aes", lambda: not has_fast)
        assert files.read(path, "float32").first == 0
        for changed in (b"\x03", b"\x02" if has_fast else b"\x01"):
            path.write_bytes(sealed[:5] + changed + sealed[6:])
            with pytest.raises(EngineError, match=path.name):
                files.read(path, "float32")
            assert not path.exists()

        def lacks(*_: object) -> None:
            raise UnsupportedAlgorithm("made up")

        monkeypatch.setattr(kept_prefixes, "cipher_named", lacks)
        path.write_bytes(sealed)
        with pytest.raises(EngineError, match="does not have its cipher"):
            files.read(path, "float32")
        assert not path.exists()


# What nodes answer


@pytest.mark.parametrize(
    "wrong",
    [
        {"ends": "-1"}, {"ends": "x"}, {"keys": "0"}, {"keys": "zz"}, {"kind": "other"}, {"stop": PAGE + 1},
        {"start": 2 * PAGE},
        {"stop": 3 * PAGE}, {"kind": FILL, "stop": 0}, {"owner": "../up"}, {"owner": ""}, {"owner": f"{OWNER} "},
        {"run_pages": 0},
    {"seq_id": -1}, {"some": "-1"}, {"kind": FETCH, "stop": 0}, {"wanted": "../../key"}, {"files": f"{'0' * 40}.kv"},
        {"files": "../up AAAA"}, {"files": f"{'0' * 40}.kv ?"},
    ],
    ids=str,
)  # fmt: skip
def test_a_task_that_cannot_be_done_is_refused(wrong: dict[str, Any]) -> None:
    good = PrefixTask(KEEP, 1, 0, OWNER, "00" * 32, 2, 0, 2 * PAGE)
    assert PrefixTask.of(good.frame(3, 4)) == good
    bad = SimpleNamespace(**{**vars(good), **wrong})
    with pytest.raises(WireError):
        PrefixTask.of(PrefixTask.frame(bad, 3, 4))  # type: ignore[arg-type]


class Ring(RingPrefixes):
    """The starter has all."""

    def __init__(self) -> None:
        super().__init__(lambda task: task, "seed", 2, lambda owner: OWNER)


def asking(n_pages: int = 5) -> tuple[Scheduler, Plan]:
    """A scheduler whose text waits for the nodes' answers, and the plan of the question."""
    scheduler = Scheduler(2)
    scheduler.ring_prefixes = Ring()
    scheduler.rewind(2, CacheMemory((NodeCaches("starter", 1 << 40, (PageClass(None, 1),)),)))
    ids = tuple(range(n_pages * PAGE + 1))
    scheduler.submit(Sequence(7, ids, SamplingParams(n_tokens=3), 10_000, owner="a"))
    plan = scheduler.schedule()
    assert plan is not None and plan.task is not None and plan.task.kind == FIND
    return scheduler, plan


def test_a_starter_takes_only_what_it_asked_for() -> None:
    scheduler, plan = asking()
    assert plan.task is not None
    with pytest.raises(EngineError, match=f"frame {plan.number} ", check=lambda e: e.code == "wire"):
        scheduler.update(plan.number, {})
    with pytest.raises(
        EngineError, match=f"frame {plan.number + 1} .* frame {plan.number}", check=lambda e: e.code == "wire"
    ):
        scheduler.answered(plan.number + 1, plan.task)
    with pytest.raises(EngineError, match=f"frame {plan.number} ", check=lambda e: e.code == "wire"):
        scheduler.answered(plan.number, replace(plan.task, kind=FILL, stop=PAGE))
    # Ends that nobody asked for, another sequence and another folder: none of them count.
    scheduler.answered(plan.number, replace(plan.task, ends="ff04", seq_id=8, owner=OWNER[::-1], keys=""))
    fill = scheduler.schedule()
    assert fill is not None and fill.task == replace(plan.task, kind=FILL, ends="4", stop=3 * PAGE)


def test_an_answer_for_a_text_that_has_gone_is_left_alone() -> None:
    scheduler, plan = asking()
    assert plan.task is not None
    scheduler.cancel(7)
    scheduler.answered(plan.number, plan.task)
    freed = scheduler.schedule()
    assert freed is not None and freed.task is None and freed.freed == (7,)


def told(plan: Plan | None) -> tuple[str, int, int, int, str, int, bool]:
    """A task: its kind, how many pages have keys, its first and last page, which ends it asks for, and with which rounds."""
    assert plan is not None and plan.task is not None and not plan.slices
    task = plan.task
    return task.kind, len(task.pages), task.start // PAGE, task.stop // PAGE, task.ends, task.n_rounds, task.is_end


def rows_until_idle(scheduler: Scheduler) -> list[tuple[int, int, int]]:
    """Lets all texts end that wait for no node. Returns their rows: sequence, first, how many."""
    rows: list[tuple[int, int, int]] = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan is not None and plan.task is None
        rows += [(part.seq_id, part.start, part.n_rows) for part in plan.slices]
        scheduler.update(plan.number, {part.seq_id: [5] for part in plan.slices if part.n_logits})
    return rows


def test_a_text_is_looked_for_filled_computed_and_kept() -> None:
    scheduler, plan = asking()  # five pages and a token
    assert told(plan) == (FIND, 5, 0, 0, "1e", FETCH_ROUNDS, False), "the first page alone is not worth a question"
    assert plan.task is not None and (plan.task.seq_id, plan.task.owner) == (7, OWNER)
    assert scheduler.schedule() is None and scheduler.n_running == 1

    scheduler.answered(plan.number, replace(plan.task, ends="4"))
    for kind in (FILL, FILLED):
        again = scheduler.schedule()
        assert told(again) == (kind, 5, 0, 3, "4", FETCH_ROUNDS, False)
        assert again is not None and again.task is not None
        scheduler.answered(again.number, again.task)
    assert scheduler.n_reused == 3 * PAGE
    assert rows_until_idle(scheduler) == [(7, 96, 64), (7, 160, 1), (7, 161, 1), (7, 162, 1)]

    for start, stop, is_end in ((0, 2, False), (2, 4, False), (4, 5, True)):  # in runs of two pages
        plan = scheduler.schedule()  # type: ignore[assignment]
        assert told(plan) == (KEEP, stop, start, stop, "0", 0, is_end)
        assert plan.task is not None and scheduler.schedule() is None
        scheduler.answered(plan.number, plan.task)
    assert scheduler.schedule() is None and not scheduler.keeps_later

    for n_pages, ends in ((5, ""), (6, ""), (7, "40"), (9, "1c0")):  # beside five in memory
        ids = (*range(5 * PAGE), *[n_pages] * ((n_pages - 5) * PAGE + 1))
        scheduler.submit(Sequence(n_pages, ids, SamplingParams(n_tokens=1), 10_000, owner="a"))
        plan = scheduler.schedule()  # type: ignore[assignment]
        if ends:
            assert told(plan) == (FIND, n_pages, 0, 0, ends, FETCH_ROUNDS, False)
        assert bool(plan.slices) is not bool(ends)
        scheduler.cancel(n_pages)
        if plan.task is None:
            scheduler.update(plan.number, {})
        else:
            scheduler.answered(plan.number, plan.task)


def test_texts_that_wait_for_nodes_do_not_count_as_decoding() -> None:
    """Prompt rows are few beside a text that decodes, and as many as fit beside texts whose files are looked for."""
    for n_decoding, n_asking, n_rows in ((0, 2, 64), (1, 2, 10), (2, 1, 6)):
        scheduler = Scheduler(2, chunk_rows=64)
        scheduler.ring_prefixes = Ring()
        scheduler.rewind(2, CacheMemory((NodeCaches("starter", 1 << 40, (PageClass(None, 1),)),)))
        scheduler.doubling_rows = 10.0
        params = SamplingParams(n_tokens=50)
        for seq_id in range(n_decoding):
            scheduler.submit(Sequence(seq_id, (seq_id,), params, 1000))
            plan = scheduler.schedule()
            assert plan is not None
            scheduler.update(plan.number, {part.seq_id: [5] for part in plan.slices})
        for seq_id in range(5, 5 + n_asking):
            scheduler.submit(Sequence(seq_id, (seq_id,) * (5 * PAGE), params, 10_000, owner="a"))
        scheduler.submit(Sequence(9, (9,) * 100, params, 1000))
        plans = list(iter(scheduler.schedule, None))
        assert [part.n_rows for plan in plans for part in plan.slices if part.seq_id == 9][:1] == [n_rows]


def test_what_is_in_front_of_damaged_files_is_looked_for_again() -> None:
    scheduler, plan = asking()
    for kind, n_pages, stop, ends in ((FIND, 5, 0, "1e"), (FILL, 5, 4, "8"), (FILLED, 5, 4, "8"), (FIND, 3, 0, "6")):
        assert told(plan)[:5] == (kind, n_pages, 0, stop, ends) and not plan.freed
        assert plan.task is not None
        scheduler.answered(plan.number, replace(plan.task, ends="8", is_done=kind != FILLED))
        plan = scheduler.schedule()  # type: ignore[assignment]
    assert plan.task is None, "no end is left that anybody has"
    assert plan.freed == (7,) and [(part.start, part.n_rows) for part in plan.slices] == [(0, 64)]
    assert scheduler.n_reused == 0


def test_nodes_that_have_enough_to_write_are_asked_again_behind_the_next_text() -> None:
    scheduler, plan = asking()
    assert plan.task is not None
    scheduler.answered(plan.number, replace(plan.task, ends="0"))
    rows_until_idle(scheduler)
    plan = scheduler.schedule()  # type: ignore[assignment]
    assert told(plan)[:4] == (KEEP, 2, 0, 2) and plan.task is not None
    scheduler.answered(plan.number, replace(plan.task, is_done=False))
    assert scheduler.keeps_later and scheduler.schedule() is None
    scheduler.submit(Sequence(8, (1,), SamplingParams(n_tokens=2), 10_000))
    rows_until_idle(scheduler)
    assert not scheduler.keeps_later and told(scheduler.schedule())[:4] == (KEEP, 2, 0, 2)


def test_what_is_dropped_from_memory_leaves_nothing_behind() -> None:
    """And an answer about it that comes later does not, either."""
    memory = CacheMemory((NodeCaches("starter", 100, (PageClass(None, 1),)),))
    prefixes = Prefixes(memory, 1.0)
    for seq_id in range(1000):
        prefixes.add(Kept(seq_id, "a", tuple(range(seq_id, seq_id + 2 * PAGE)), (30,)))
        found = prefixes.unwritten(2)
        assert found is not None and (found[0].seq_id, found[1]) == (seq_id, 0)
        prefixes.note_written(seq_id, 1)
        assert prefixes.unwritten(2) == (found[0], 1)
        prefixes.note_written(seq_id, 2)
        prefixes.note_written(seq_id - 50, 2)
    assert prefixes.unwritten(2) is None
    assert len(prefixes.n_on_disk) == len(prefixes) == 3


# Read or compute


@pytest.mark.parametrize(("row_s", "is_read"), [(None, True), (0.011, True), (0.009, False)])
def test_what_is_computed_faster_is_not_read(row_s: float | None, is_read: bool) -> None:
    scheduler, plan = asking()
    assert plan.task is not None
    scheduler.row_s = row_s
    scheduler.answered(plan.number, replace(plan.task, row_read_s=0.01))
    after = scheduler.schedule()
    assert after is not None
    if is_read:
        assert after.task is not None and (after.task.kind, after.task.stop) == (FILL, 5 * PAGE)
    else:
        assert after.task is None and [part.start for part in after.slices] == [0]


def test_nodes_say_how_fast_they_read_as_they_have_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caches, keep = MadeUp(4), keep_task(1)
    find = replace(keep, kind=FIND, stop=0, ends="1", row_read_s=0.25)
    with kept([tmp_path]) as (files,):
        assert files.answer(keep, caches).is_done and files.flush(DEADLINE_S)
        assert files.answer(replace(keep, kind=FILL), caches).is_done
        assert files.answer(find, caches).row_read_s == 0.25, "so few bytes say nothing"
        monkeypatch.setattr(kept_prefixes, "MEASURED_BYTES", 1)
        assert files.answer(replace(keep, kind=FILL), caches).is_done
        assert 0 < files.answer(replace(find, row_read_s=0.0), caches).row_read_s < DEADLINE_S
        assert files.answer(replace(find, row_read_s=DEADLINE_S), caches).row_read_s == DEADLINE_S, "the slowest counts"
        assert files.answer(replace(find, keys="ab" * 16), caches).row_read_s == 0.25, "there is nothing to read"
        monkeypatch.setattr(kept_prefixes, "RATE_S", -1.0)
        assert files.answer(find, caches).row_read_s == 0.25, "that was long ago"


def test_what_a_prompt_row_takes_is_seen_in_frames_of_prompts_alone() -> None:
    def frame(number: int, n_prompt: int, n_decoding: int = 0) -> Plan:
        parts = [PlannedSlice(1, 0, n_prompt, 0, (0,) * n_prompt, is_prompt=True)] if n_prompt else []
        return Plan(number, (*parts, *(PlannedSlice(2 + i, 0, 1, 1, (0,)) for i in range(n_decoding))), ())

    pace = PromptPace()
    for number, (rows, seconds) in enumerate([((64, 1), 9.0), ((8, 0), 9.0), ((0, 2), 9.0)]):
        pace.sent(frame(number, *rows), 10.0 * number)
        pace.returned(number, 10.0 * number + seconds)
    assert pace.row_s is None
    for number in (3, 4):  # both are under way: the second one follows the first
        pace.sent(frame(number, 64), 100.0)
    pace.returned(3, 100.0 + 6.4)
    assert pace.row_s == pytest.approx(0.1)
    pace.returned(4, 100.0 + 6.4 + 3.2)
    assert pace.row_s == pytest.approx(0.1 - 0.2 * 0.05)


# Files from other nodes


class Fetched:
    """A scheduler of a ring of two nodes, whose first one gets all files of texts from the other, in `n_rounds` frames for each
    run of two pages.
    """

    def __init__(self, n_rounds: int, took_s: float = 0.0) -> None:
        self.scheduler = Scheduler(2)
        self.scheduler.ring_prefixes = Ring()
        self.scheduler.rewind(2, CacheMemory((NodeCaches("starter", 1 << 40, (PageClass(None, 1),)),)))
        self._n_rounds, self._took_s = n_rounds, took_s
        self.flying: deque[Plan] = deque()
        self.seen: list[tuple[str, int]] = []  # kind of each frame, and where its task ends
        self._n_left: dict[tuple[int, int], int] = {}
        self._n_pages: dict[int, int] = {}  # of each text, that have come

    def submit(self, seq_id: int, n_pages: int, n_tokens: int) -> None:
        ids = (seq_id,) * (n_pages * PAGE + 1)
        self.scheduler.submit(Sequence(seq_id, ids, SamplingParams(n_tokens=n_tokens), 10_000, owner="a"))

    def step(self) -> None:
        """All that may leave leaves, and one frame comes back."""
        while (plan := self.scheduler.schedule()) is not None:
            self.flying.append(plan)
            assert sum(one.task is not None and one.task.kind == FETCH for one in self.flying) <= 1
            self.seen.append(("rows", 0) if plan.task is None else (plan.task.kind, plan.task.stop // PAGE))
        plan = self.flying.popleft()
        if (task := plan.task) is None:
            self.scheduler.update(plan.number, {part.seq_id: [5] for part in plan.slices if part.n_logits})
            return
        n_pages = self._n_pages.setdefault(task.seq_id, 0)
        if task.kind == FIND:
            task = replace(task, ends=f"{task.possible & ((1 << n_pages) - 1):x}", some=task.ends)
        elif task.kind == FETCH:
            place = task.seq_id, task.stop
            n_left = self._n_left[place] = self._n_left.get(place, self._n_rounds) - 1
            task = replace(task, wanted=f"{n_left:040x}.kv" if n_left else "")
            self._n_pages[task.seq_id] = n_pages if n_left else task.stop // PAGE
        self.scheduler.answered(plan.number, task, self._took_s)


def test_texts_decode_while_others_get_files() -> None:
    ring = Fetched(n_rounds=10)
    ring.submit(1, 0, 1000)
    ring.step()
    for seq_id in (2, 3, 4):
        ring.submit(seq_id, 4, 3)
    while ring.scheduler.n_reused < 3 * 4 * PAGE:
        ring.step()
    kinds = [kind for kind, _ in ring.seen]
    assert kinds.count(FETCH) == 3 * 2 * 10
    assert all("rows" in pair for pair in zip(kinds[2:], kinds[3:], strict=False))


def test_files_that_nobody_takes_travel_once() -> None:
    scheduler, plan = asking()
    assert plan.task is not None
    name = f"{0:040x}.kv"
    scheduler.answered(plan.number, replace(plan.task, ends="0", some=plan.task.ends))
    for kind in (FETCH, FETCH, FIND):
        again = scheduler.schedule()
        assert again is not None and again.task is not None and again.task.kind == kind
        scheduler.answered(again.number, replace(again.task, wanted=name, files=f"{name} AAAA"))


def test_files_come_in_the_order_of_their_positions() -> None:
    ring = Fetched(n_rounds=2)
    ring.submit(1, 5, 3)
    while not ring.scheduler.n_reused:
        ring.step()
    assert ring.seen == [
        (FIND, 0),
        *[(FETCH, 2)] * 2,
        *[(FETCH, 4)] * 2,
        *[(FETCH, 5)] * 2,
        (FIND, 0),
        (FILL, 5),
        (FILLED, 5),
    ]


@pytest.mark.parametrize(("row_s", "n_runs"), [(None, 3), (0.0501, 3), (0.0499, 1)])
def test_files_that_come_slower_than_rows_are_computed_are_left(row_s: float | None, n_runs: int) -> None:
    """One run has come before that is seen, and is of use."""
    took_s = 0.05 * 2 * PAGE
    ring = Fetched(n_rounds=1, took_s=took_s)
    ring.scheduler.row_s = row_s
    ring.submit(1, 6, 3)
    while not ring.scheduler.n_reused:
        ring.step()
    stops = [stop for kind, stop in ring.seen if kind == FETCH]
    assert stops == [2, 4, 6][:n_runs] and ring.scheduler.n_reused == PAGE * stops[-1]


def test_what_files_bring_is_what_lies_behind_the_ends_that_all_have() -> None:
    """All nodes have two pages, and some of them six; 64 rows of the first run are worth 6.4 s."""
    scheduler, plan = asking(6)
    scheduler.row_s = 0.1
    assert plan.task is not None
    scheduler.answered(plan.number, replace(plan.task, ends="2", some="20"))
    for n, took_s in enumerate((6.3, 0.05, 0.1)):
        plan = scheduler.schedule()  # type: ignore[assignment]
        assert told(plan) == (FETCH, 6, 0, 4, "2", FETCH_ROUNDS - n, False) and plan.task is not None
        scheduler.answered(plan.number, replace(plan.task, wanted=f"{n:040x}.kv"), took_s)
    assert told(scheduler.schedule())[:5] == (FIND, 6, 0, 0, "3e")


def test_what_the_starter_lacks_meanwhile_is_computed() -> None:
    scheduler, plan = asking()
    has_some = iter([True, False])
    scheduler.ring_prefixes = RingPrefixes(
        lambda task: task if next(has_some) else replace(task, ends="0"), "seed", 2, lambda owner: OWNER
    )
    scheduler.rewind(2, scheduler.memory)
    plan = scheduler.schedule()  # type: ignore[assignment]
    assert told(plan)[0] == FIND and plan.task is not None
    scheduler.answered(plan.number, replace(plan.task, ends="0", some=plan.task.ends))
    plan = scheduler.schedule()  # type: ignore[assignment]
    assert told(plan)[:4] == (FETCH, 5, 0, 2) and plan.task is not None
    scheduler.answered(plan.number, replace(plan.task, is_done=True, n_rounds=1))
    plan = scheduler.schedule()  # type: ignore[assignment]
    while plan.task is not None:
        scheduler.answered(plan.number, plan.task)
        plan = scheduler.schedule()  # type: ignore[assignment]
    assert [part.start for part in plan.slices] == [0] and scheduler.n_reused == 0


def test_a_text_of_many_runs_gets_all_of_its_files() -> None:
    ring = Fetched(n_rounds=FETCH_ROUNDS // 2)
    ring.submit(1, 8, 3)
    while not ring.scheduler.n_reused:
        ring.step()
    assert ring.scheduler.n_reused == 8 * PAGE
    assert [kind for kind, _ in ring.seen].count(FETCH) == 2 * FETCH_ROUNDS


def test_nothing_is_filled_for_a_text_that_has_gone() -> None:
    ring = Fetched(n_rounds=1)
    ring.submit(1, 4, 3)
    ring.submit(2, 4, 3)
    while [kind for kind, _ in ring.seen].count(FETCH) < 3:
        ring.step()
    for seq_id in (1, 2):
        ring.scheduler.cancel(seq_id)
    n = len(ring.seen)
    while ring.scheduler.has_work:
        ring.step()
    assert ring.seen[n:] == [("rows", 0)], "what is freed"


# In memory


def test_who_has_many_conversations_takes_nobody_his_last_one() -> None:
    prefixes = Prefixes(CacheMemory((NodeCaches("starter", 10, (PageClass(None, 1),)),)), 1.0)

    def add(seq_id: int, owner: str) -> list[int]:
        return prefixes.add(Kept(seq_id, owner, tuple(range(seq_id * 1000, seq_id * 1000 + PAGE)), (2,)))

    assert not add(1, "/a") and not add(2, "/a") and not add(3, "/b")
    gone = [seq_id for n in range(4, 12) for seq_id in add(n, "/c")]
    assert gone == [1, 4, 5, 6, 7, 8], "the older ones of each"
    assert prefixes.drop_oldest() == 9 and prefixes.drop_oldest() == 10
    assert [prefixes.drop_oldest() for _ in range(3)] == [2, 3, 11], "each has one"


def test_what_is_wanted_goes_behind_what_other_owners_used_last() -> None:
    prefixes = Prefixes(CacheMemory((NodeCaches("starter", 100, (PageClass(None, 1),)),)), 1.0)
    for seq_id, owner in ((1, "/a"), (2, "/a"), (3, "/b")):
        prefixes.add(Kept(seq_id, owner, tuple(range(seq_id * 1000, seq_id * 1000 + PAGE)), (2,)))
    prefixes.wanted[9] = 1
    prefixes.add(Kept(4, "/a", tuple(range(1000, 1000 + 2 * PAGE)), (2,)))  # has all of the first one
    prefixes.add(Kept(5, "/a", tuple(range(5000, 5000 + PAGE)), (2,)))
    assert [prefixes.drop_oldest() for _ in range(4)] == [2, 3, 5, 4]


@pytest.mark.parametrize(
    "kept, limit", [(((0, 3, "a"), (5000, 5, "a")), 13), (((0, 3, "a"), (3000, 3, "a"), (5000, 5, "b")), 18)]
)
def test_what_a_waiting_text_begins_with_is_dropped_last(kept: tuple[tuple[int, int, str], ...], limit: int) -> None:
    """Also where another owner would lose the only one."""
    ids = count(1)

    def submit(first: int, n_pages: int, owner: str) -> None:
        prompt = tuple(range(first, first + n_pages * PAGE + 1))
        scheduler.submit(Sequence(next(ids), prompt, SamplingParams(n_tokens=1), 10_000, owner=owner))

    scheduler = Scheduler(1, kept_share=1.0)
    scheduler.rewind(1, CacheMemory((NodeCaches("starter", limit, (PageClass(None, 1),)),)))

    def go_on() -> None:
        while (plan := scheduler.schedule()) is not None:
            scheduler.update(plan.number, {part.seq_id: [5] for part in plan.slices if part.n_logits})

    for one in kept:
        submit(*one)
        go_on()
    assert scheduler.n_reused == 0
    submit(9000, 4, kept[-1][2])
    for one in kept[:-1]:  # as those that were used longest ago
        submit(*one)
    go_on()
    assert scheduler.n_reused == 3 * PAGE * (len(kept) - 1) and not scheduler.has_work
