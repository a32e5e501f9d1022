"""Prefixes on the disks of the nodes: a text that begins with one has the ids that it would have had, whatever files became."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from litgpt.model import GPT

from families import config_of, greedy, model_of, prompt, random_gpt
from guessing import Bold, of_two_tokens
from loopback import DEADLINE_S, InProcessRing, Text, ring_of, stages_of
from mdi.engine import kept_prefixes
from mdi.engine.cohort import Beams
from mdi.engine.kept_prefixes import KeptFiles, Secrets
from mdi.engine.memory import CacheMemory, NodeCaches
from mdi.engine.prefix_tasks import FETCH, FILL, FIND, KEEP, OWNERS, PrefixTask
from mdi.engine.scheduler import PromptPace
from mdi.engine.sequence import SamplingParams
from mdi.kernels.stage_caches import CacheRun, Piece
from mdi.model.caches import PAGE, CacheClass, PageClass
from mdi.net.keys import KeyFile, new_secret, write_keys
from mdi.stages.torch_stage import Stage

GREEDY = SamplingParams(n_tokens=12, temperature=0)
LLAMA, GEMMA, LATENT = "Llama-3.1-8B", "Gemma-3-1b-it", "deepseek-v3-shape"


def owner_folder(owner: str) -> str:
    return f"{'0' * 16}-{hashlib.sha256(owner.encode()).hexdigest()[:16]}"


@contextmanager
def kept(
    folders: list[Path], limit_bytes: int = 1 << 30, free: Callable[[], int] | None = None, keys: KeyFile | None = None
) -> Iterator[list[KeptFiles]]:
    """The files of nodes, each with a folder; without the keys of a cluster, each with a key."""
    with ExitStack() as stack:
        nodes = []
        for folder in folders:
            files = KeptFiles(folder, limit_bytes, Secrets(folder, keys), free or (lambda: 1 << 40), bytes_per_s=1e12)
            stack.callback(files.close)
            nodes.append(files)
        yield nodes


@contextmanager
def ring(
    family: str, n_nodes: int, files: list[KeptFiles], gpt: GPT | None = None, **kwargs: object
) -> Iterator[InProcessRing]:
    """A ring whose nodes have just begun: nothing is in memory."""
    with ring_of(gpt or model_of(family), n_nodes, files=files, owner_folder=owner_folder, **kwargs) as made:
        nodes = [NodeCaches(f"node{i}", 1 << 40, tuple(s.caches.classes)) for i, s in enumerate(made.stages)]
        made.engine.memory = CacheMemory(tuple(nodes))
        yield made


def wide_model(family: str) -> GPT:
    """With a longer context."""
    return random_gpt(config_of(family, block_size=320))


def folders_of(tmp_path: Path, n: int) -> list[Path]:
    return [tmp_path / f"node{i}" for i in range(n)]


def ask(made: InProcessRing, ids: list[int], owner: str | None = "a") -> Text:
    text = Text(made.engine.submit(ids, GREEDY, owner=owner))
    made.run()
    return text


def all_files(folders: list[Path]) -> list[Path]:
    return sorted({path for folder in folders for path in folder.rglob("*.kv")})


@pytest.mark.parametrize("family", [LLAMA, GEMMA, LATENT])
@pytest.mark.parametrize("n_nodes", [1, 3])
def test_after_a_restart_the_next_turn_has_the_ids_that_it_would_have_had(
    family: str, n_nodes: int, tmp_path: Path
) -> None:
    gpt, first = model_of(family), prompt(110, 1)
    second = [*first, *greedy(gpt, first, 12), *prompt(20, 2)]
    folders = folders_of(tmp_path, n_nodes)
    with kept(folders) as files, ring(family, n_nodes, files) as made:
        ask(made, first)
        made.keep()
    assert all_files(folders)
    with kept(folders) as files, ring(family, n_nodes, files) as made:
        assert ask(made, second, "b").ids == greedy(gpt, second, 12)
        assert made.engine.n_reused == 0, "others' files are theirs"
        assert ask(made, second).ids == greedy(gpt, second, 12)
        assert made.engine.n_reused == 96, "files were not read"


@pytest.mark.parametrize("n_nodes", [1, 2])
def test_a_text_of_several_runs_with_windows_is_found_by_its_end(n_nodes: int, tmp_path: Path) -> None:
    """Windows have dropped what they had at the end of its first runs."""
    gpt, first, folders = wide_model(GEMMA), prompt(228, 1), folders_of(tmp_path, n_nodes)
    with kept(folders) as files, ring(GEMMA, n_nodes, files, gpt=gpt, max_length=320) as made:
        second = [*first, *ask(made, first).ids, *prompt(20, 2)]
        made.keep()
    with kept(folders) as files, ring(GEMMA, n_nodes, files, gpt=gpt, max_length=320) as made:
        assert ask(made, second).ids == greedy(gpt, second, 12)
        assert made.engine.n_reused == 224


@contextmanager
def kept_text(
    family: str, n_nodes: int, folders: list[Path], n: int = 110, keys: KeyFile | None = None
) -> Iterator[list[int]]:
    """A text and its answer, which nodes that have ended meanwhile have kept."""
    ids = prompt(n, 1)
    with kept(folders, keys=keys) as files, ring(family, n_nodes, files) as made:
        text = ask(made, ids)
        made.keep()
    yield [*ids, *text.ids]


def check_next_turn(
    family: str, n_nodes: int, folders: list[Path], before: list[int], keys: KeyFile | None = None, **kwargs: object
) -> int:
    """The next turn over nodes that have just begun; how many of its tokens were not computed."""
    gpt, ids = model_of(family), [*before, *prompt(20, 2)]
    with kept(folders, keys=keys) as files, ring(family, n_nodes, files, **kwargs) as made:
        assert ask(made, ids).ids == greedy(gpt, ids, 12)
        return made.engine.n_reused


def test_another_cut_finds_the_files_of_its_blocks(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    with kept_text(LLAMA, 2, [shared] * 2) as before:
        assert check_next_turn(LLAMA, 3, [shared] * 3, before) == 96
        assert check_next_turn(LLAMA, 1, [shared], before) == 96


@pytest.fixture
def cluster_key(tmp_path: Path) -> KeyFile:
    write_keys(tmp_path / "cluster", (new_secret(),))
    return KeyFile(tmp_path / "cluster")


@pytest.mark.parametrize("family", [LLAMA, GEMMA])
def test_after_another_cut_nodes_get_what_they_lack_from_those_that_have_it(
    family: str, tmp_path: Path, cluster_key: KeyFile
) -> None:
    folders = folders_of(tmp_path, 3)
    with kept_text(family, 3, folders, keys=cluster_key) as before:
        n_files = len(all_files(folders))
        n_layer = model_of(family).config.n_layer
        moved = {"keys": cluster_key, "cuts": (1, n_layer - 1)}
        assert check_next_turn(family, 3, folders, before, **moved) == 96
        names = [path.name for path in all_files(folders)]
        assert len(names) > n_files == len(set(names)), "they are copied"
        assert {path.parent.name for path in all_files(folders)} == {owner_folder("a")}
        for path in all_files(folders[:1]):
            path.unlink()
        assert check_next_turn(family, 2, folders[1:], before, **moved | {"cuts": (n_layer - 1,)}) == 0, (
            "block 0 is lost, and the starter has files of later ones"
        )


def test_a_new_node_gets_its_files_for_a_text_that_is_asked_again(tmp_path: Path, cluster_key: KeyFile) -> None:
    """And the frames with them are timed."""
    folders, took = folders_of(tmp_path, 2), list[float]()
    with kept_text(LLAMA, 2, folders, keys=cluster_key) as ids:
        for path in all_files(folders[1:]):
            path.rename(folders[0] / owner_folder("a") / path.name)
        with kept(folders, keys=cluster_key) as files, ring(LLAMA, 2, files) as made:
            scheduler, made.engine.pace = made.engine.scheduler, PromptPace()
            answered = scheduler.answered

            def note(number: int, task: PrefixTask, took_s: float = 0.0) -> None:
                took.append(took_s)
                answered(number, task, took_s)

            scheduler.answered = note  # type: ignore[method-assign]
            assert ask(made, ids).ids == greedy(model_of(LLAMA), ids, 12)
            assert made.engine.n_reused == 96 and len(took) > 4 and min(took) > 0


def test_files_travel_in_several_rounds_and_only_as_they_are(
    tmp_path: Path, cluster_key: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is too large stays where it is; what cannot be opened with the own key, or was changed, is not taken."""
    folders, n_layer = folders_of(tmp_path, 2), model_of(LLAMA).config.n_layer
    with kept_text(LLAMA, 2, folders, keys=cluster_key) as before:
        sizes = [path.stat().st_size for path in all_files(folders)]
        cuts = (n_layer - 1,)
        monkeypatch.setattr(kept_prefixes, "FETCH_BYTES", min(sizes) - 1)
        assert check_next_turn(LLAMA, 2, folders, before, keys=cluster_key, cuts=cuts) == 0
        assert [path.stat().st_size for path in all_files(folders)] == sizes
        assert check_next_turn(LLAMA, 2, folders, before, cuts=cuts) == 0, "another key"
        for path in all_files(folders):
            path.unlink()
    with kept_text(LLAMA, 2, folders, keys=cluster_key) as before:
        monkeypatch.setattr(kept_prefixes, "FETCH_BYTES", max(sizes))
        whole = {path: path.read_bytes() for path in all_files(folders)}
        for path, data in whole.items():
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        assert check_next_turn(LLAMA, 2, folders, before, keys=cluster_key, cuts=cuts) == 0
        assert set(all_files(folders)) <= set(whole), "nothing damaged is copied"
        for path, data in whole.items():
            path.write_bytes(data)
        with kept(folders, keys=cluster_key) as files, ring(LLAMA, 2, files, cuts=cuts) as made:
            ids = [*before, *prompt(20, 2)]
            assert ask(made, ids).ids == greedy(model_of(LLAMA), ids, 12)
            assert made.engine.n_reused == 96 and made.tasks.qsize() > 4, "FIND, several FETCH, FIND, FILL"


def test_a_disk_that_takes_no_file_of_others(tmp_path: Path, cluster_key: KeyFile) -> None:
    folders, n_layer = folders_of(tmp_path, 2), model_of(LLAMA).config.n_layer
    with kept_text(LLAMA, 2, folders, keys=cluster_key) as before:
        ids, n_files = [*before, *prompt(20, 2)], len(all_files(folders))
        with kept(folders, keys=cluster_key, free=lambda: 0) as files:
            for turn in range(2):
                with ring(LLAMA, 2, files, cuts=(n_layer - 1,)) as made:
                    assert ask(made, ids).ids == greedy(model_of(LLAMA), ids, 12)
                    assert not turn or made.engine.n_reused == 0 and made.tasks.qsize() < 5
                assert all([one.flush(DEADLINE_S) for one in files])
        assert len(all_files(folders)) <= n_files


def test_a_node_without_files_and_other_numbers_take_nothing(tmp_path: Path) -> None:
    folders = folders_of(tmp_path, 3)
    with kept_text(LLAMA, 3, folders) as before:
        assert check_next_turn(LLAMA, 3, folders, before, seed="another arithmetic") == 0
        assert check_next_turn(LLAMA, 3, [*folders[:2], tmp_path / "new"], before) == 0
        assert check_next_turn(LLAMA, 3, folders, before) == 96


def test_a_ring_takes_the_longest_beginning_that_all_nodes_have(tmp_path: Path) -> None:
    """The starter lacks what is behind the first run."""
    folders = folders_of(tmp_path, 2)
    with kept_text(LLAMA, 2, folders) as before:
        newest = max(all_files(folders[:1]), key=lambda path: path.stat().st_size)
        tails = [path for path in all_files(folders[:1]) if path.stat().st_size < newest.stat().st_size]
        assert tails
        for path in tails:
            path.unlink()
        with kept(folders) as files, ring(LLAMA, 2, files) as made:
            ids = [*before, *prompt(20, 2)]
            assert ask(made, ids).ids == greedy(model_of(LLAMA), ids, 12)
            assert made.engine.n_reused == 64
            assert [made.tasks.get_nowait().is_done for _ in range(made.tasks.qsize())] == [True] * 3, "one round"


@pytest.mark.parametrize("family", [LLAMA, GEMMA])
def test_a_file_that_was_changed_is_removed_and_its_part_computed(family: str, tmp_path: Path) -> None:
    folders = folders_of(tmp_path, 2)
    with kept_text(family, 2, folders) as before:
        for path in all_files(folders):
            whole = path.read_bytes()
            path.write_bytes(whole[:100] + bytes([whole[100] ^ 4]) + whole[101:])
        assert check_next_turn(family, 2, folders, before) == 0


def test_all_nodes_read_at_the_same_time(tmp_path: Path) -> None:
    """Each waits with its reading until the others read."""
    folders, together = folders_of(tmp_path, 3), threading.Barrier(3, timeout=DEADLINE_S)

    def waiting(node: KeptFiles) -> Callable[[PrefixTask, Any], PrefixTask]:
        answer = node.answer

        def answered(task: PrefixTask, caches: Any) -> PrefixTask:
            if task.kind == FILL:
                together.wait()
            return answer(task, caches)

        return answered

    with kept_text(LLAMA, 3, folders) as before, kept(folders) as files:
        for node in files:
            node.answer = waiting(node)  # type: ignore[method-assign]
        with ring(LLAMA, 3, files) as made:
            ids = [*before, *prompt(20, 2)]
            assert ask(made, ids).ids == greedy(model_of(LLAMA), ids, 12)
            assert made.engine.n_reused == 96


@pytest.mark.parametrize("n_nodes", [1, 2])
def test_what_is_in_front_of_a_damaged_file_is_used(n_nodes: int, tmp_path: Path) -> None:
    """The second try fills a sequence that was to be freed after the first one."""
    folders = folders_of(tmp_path, n_nodes)
    with kept_text(LLAMA, n_nodes, folders) as before:
        largest = max(path.stat().st_size for path in all_files(folders))
        for path in all_files(folders):
            if path.stat().st_size < largest:
                path.write_bytes(path.read_bytes()[:-1] + b"?")
        assert check_next_turn(LLAMA, n_nodes, folders, before) == 64


def test_files_of_another_key_or_version_go_and_one_cannot_stand_for_another(tmp_path: Path) -> None:
    folders = folders_of(tmp_path, 1)
    with kept_text(LLAMA, 1, folders) as before:
        first, second, *_ = all_files(folders)
        a, b = first.read_bytes(), second.read_bytes()
        first.write_bytes(b)
        second.write_bytes(a)
        assert check_next_turn(LLAMA, 1, folders, before) < 96
    with kept_text(LLAMA, 1, [tmp_path / "again"]) as before:
        for path in all_files([tmp_path / "again"])[:2]:
            path.write_bytes(b"MDIp\x09" + path.read_bytes()[5:])
        (tmp_path / "again" / "key").unlink()
        assert check_next_turn(LLAMA, 1, [tmp_path / "again"], before) == 0
        with kept([tmp_path / "again"]) as (files,):
            files.sweep()
            assert all(path.stat().st_mtime > 0 for path, _, _ in files.files())


def test_only_the_owners_that_there_are_keep_their_files(tmp_path: Path) -> None:
    folders = folders_of(tmp_path, 2)
    with kept_text(LLAMA, 2, folders) as before:
        (others := folders[1] / f"{'1' * 16}-{'2' * 16}").mkdir()
        assert check_next_turn(LLAMA, 2, folders, before, owners=("a", "b")) == 96
        assert check_next_turn(LLAMA, 2, folders, before, owners=("b",)) == 0
        assert not (folders[1] / owner_folder("a")).exists() and not (folders[0] / owner_folder("a")).exists()
        assert others.exists(), "it is another server's"


def test_a_full_disk_and_a_quota(tmp_path: Path) -> None:
    """Where there is no room nothing is kept, and texts go on; what was used longest ago makes way."""
    with kept([tmp_path / "full"], free=lambda: 0) as files, ring(LLAMA, 1, files) as made:
        ask(made, prompt(110, 1))
        made.keep()
        assert not all_files([tmp_path / "full"])
    folder = tmp_path / "small"
    with kept_text(LLAMA, 1, [folder]) as before:
        size = sum(path.stat().st_size for path in all_files([folder]))
    with kept([folder], limit_bytes=int(1.5 * size)) as files, ring(LLAMA, 1, files) as made:
        ask(made, prompt(110, 7))
        made.keep()
    assert size <= sum(path.stat().st_size for path in all_files([folder])) <= 1.5 * size
    assert check_next_turn(LLAMA, 1, [folder], before) < 96


def test_several_texts_and_beams_of_one_prompt_wait_for_what_is_read(tmp_path: Path) -> None:
    gpt, folders = model_of(LLAMA), folders_of(tmp_path, 2)
    with kept_text(LLAMA, 2, folders) as before:
        ids = [*before, 9, 8, 7]
        with kept(folders) as files, ring(LLAMA, 2, files) as made:
            texts = [Text(made.engine.submit(ids, GREEDY, owner="a")) for _ in range(3)]
            made.run()
            assert [text.ids for text in texts] == [greedy(gpt, ids, 12)] * 3
            assert made.engine.n_reused == 96 + 2 * (len(ids) - 1)
            cancelled = Text(made.engine.submit([*before, 5], GREEDY, owner="a"))
            cancelled.cancel()
            made.run()
        with kept(folders) as files, ring(LLAMA, 2, files) as made:
            beams = made.engine.submit_beams(ids, GREEDY, Beams(2), owner="a")
            found = [Text(one) for one in beams]
            made.run()
            assert made.engine.n_reused >= 96
        with kept(folders_of(tmp_path / "none", 2)) as files, ring(LLAMA, 2, files) as made:
            alone = [Text(one) for one in made.engine.submit_beams(ids, GREEDY, Beams(2), owner="a")]
            made.run()
        assert [text.ids for text in found] == [text.ids for text in alone]


def test_guesses_and_drawn_texts_behind_what_is_read_are_those_of_a_text_that_is_computed_anew(tmp_path: Path) -> None:
    folders = folders_of(tmp_path, 2)
    with kept_text(LLAMA, 2, folders, n=70) as before:
        ids = [*before, *prompt(3, 4)]
        asked = [of_two_tokens(SamplingParams(n_tokens=60, temperature=0), 3, 4)]
        asked += [SamplingParams(n_tokens=12, temperature=1.0, seed=seed) for seed in (1, 2, 3)]
        found, n_reused = [], []
        for where, guesser in ((folders, Bold()), (folders_of(tmp_path / "none", 2), None)):
            with kept(where) as files, ring(LLAMA, 2, files) as made:
                made.engine.speculation = guesser
                texts = [Text(made.engine.submit(ids, params, owner="a")) for params in asked]
                made.run()
                found.append([text.ids for text in texts])
                n_reused.append(made.engine.n_reused)
                assert guesser is None or made.engine.guesses[1] > 0, "no guess was right"
        assert found[0] == found[1] and len({tuple(one) for one in found[0]}) == 4
        assert n_reused[0] == n_reused[1] + 64


@pytest.mark.parametrize("family", [LLAMA, GEMMA])
def test_a_hot_spare_keeps_what_its_node_keeps_and_takes_its_place(family: str, tmp_path: Path) -> None:
    """Both get the frames of their blocks, tasks among them."""
    gpt, ids, folders = model_of(family), prompt(110, 1), folders_of(tmp_path, 3)
    cut = (gpt.config.n_layer // 2,)

    def stages() -> list[Stage]:
        return [*stages_of(gpt, cut), stages_of(gpt, cut)[1]]

    with kept(folders) as files, ring(family, 3, files, stages=stages(), hot=(1,)) as made:
        text = ask(made, ids)
        made.keep()
    before = [*ids, *text.ids]
    names = [[path.name for path in all_files([folder])] for folder in folders]
    assert text.ids == greedy(gpt, ids, 12) and names[1] == names[2] != names[0]
    assert check_next_turn(family, 3, folders, before, stages=stages(), hot=(1,)) == 96
    assert check_next_turn(family, 2, [folders[0], folders[2]], before, cuts=cut) == 96, "the node was lost"


def test_what_another_turn_may_go_on_from_stays_in_memory_at_the_end_of_a_prompt(tmp_path: Path) -> None:
    """A model with windows: from the end of its answer the text could not be cut to the end of its prompt."""
    gpt, ids = model_of(GEMMA), prompt(70, 1)
    params = SamplingParams(n_tokens=75, temperature=0)
    with ring(GEMMA, 2, []) as made:
        Text(made.engine.submit(ids, params, owner="a"))
        made.run()
        other = [*ids, *prompt(10, 3)]
        assert ask(made, other).ids == greedy(gpt, other, 12)
        assert made.engine.n_reused == 70
        assert len(set(made.caches())) == 1


class Disk:
    """Does to files what disks and ends of processes do, at random."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def harm(self, folders: list[Path]) -> None:
        rng = self.rng
        for path in all_files(folders):
            whole, at = path.read_bytes(), rng.randrange(max(1, path.stat().st_size))
            what = rng.choice(["nothing"] * 4 + ["bit", "cut", "gone", "empty", "swapped", "part"])
            if what == "bit" and whole:
                path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :])
            elif what == "cut":
                path.write_bytes(whole[:at])
            elif what == "gone":
                path.unlink()
            elif what == "empty":
                path.write_bytes(b"")
            elif what == "swapped":
                path.write_bytes(rng.choice(all_files(folders)).read_bytes())
            elif what == "part":  # killed before the file had its name
                path.rename(path.with_name(f"{path.name}.999999999.part"))

    def fail(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From now on some calls of the system fail."""
        for of, name in ((os, "replace"), (os, "fsync"), (Path, "open"), (Path, "exists"), (Path, "mkdir")):
            if self.rng.random() < 0.3:
                real, share = getattr(of, name), self.rng.choice([0.1, 1.0])

                def call(*args: object, real: Any = real, share: float = share, **kwargs: object) -> object:
                    if any(".kv" in str(one) or isinstance(one, int) for one in args) and self.rng.random() < share:
                        raise OSError(self.rng.choice([errno.ENOSPC, errno.EROFS, errno.EIO]), "made up")
                    return real(*args, **kwargs)

                monkeypatch.setattr(of, name, call)


N_TRIALS = int(os.environ.get("TRIALS", "12"))


@pytest.mark.parametrize("seed", range(N_TRIALS))
def test_whatever_happens_to_files_ids_stay_the_same(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    family, n_nodes, disk = rng.choice([LLAMA, GEMMA]), rng.choice([1, 2]), Disk(rng)
    folders = [tmp_path / "shared"] * n_nodes if rng.random() < 0.3 else folders_of(tmp_path, n_nodes)
    gpt, ids = model_of(family), prompt(rng.choice([66, 100]), 1)
    for turn in range(3):
        with monkeypatch.context() as patch, kept(folders) as files, ring(family, n_nodes, files) as made:
            if rng.random() < 0.4:
                disk.fail(patch)
            text = ask(made, ids)
            patch.undo()
            assert text.ids == greedy(gpt, ids, 12)
            if rng.random() < 0.8:
                disk.fail(patch) if rng.random() < 0.4 else None
                made.keep()
        disk.harm(folders)
        ids = [*ids, *text.ids[: rng.randrange(12)], *prompt(1 + rng.randrange(8), turn + 5)]


class MadeUp:
    """Caches of blocks that have 1024 bytes in each page."""

    cache_type = "float32"
    shares: Mapping[int, str] = {}

    def __init__(self, n_blocks: int) -> None:
        self._blocks = range(n_blocks)
        self.exported: list[int] = []

    def classes_of_blocks(self) -> dict[int, CacheClass]:
        return {i: PageClass(None, 1024) for i in self._blocks}

    def export(self, seq_id: int, start: int, stop: int, wanted: Collection[int] | None = None) -> CacheRun:
        assert wanted is not None
        self.exported += wanted
        rows = np.zeros((stop - start, 8), np.float32)
        return CacheRun(start, stop, self.cache_type, {i: Piece(start, (rows,)) for i in wanted})

    def fill(self, seq_id: int, run: CacheRun) -> None:
        assert all(run.blocks[i].first == 0 for i in self._blocks)

    def free(self, seq_id: int) -> None: ...


def keep_task(text: int) -> PrefixTask:
    """One page of a text."""
    return PrefixTask(KEEP, owner=owner_folder("a"), keys=f"{text:032x}", stop=PAGE, is_end=True)


def test_what_waits_to_be_written_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_prefixes, "WAITING_BYTES", 3000)
    caches, may_write = MadeUp(8), threading.Event()
    with kept([tmp_path], free=lambda: may_write.wait(DEADLINE_S) << 40) as (files,):
        for _ in range(2):
            assert not files.answer(keep_task(1), caches).is_done
            assert caches.exported == [0, 1, 2], "they wait"
        may_write.set()
        for _ in range(2):
            assert files.flush(DEADLINE_S)
            files.answer(keep_task(1), caches)
        assert files.answer(keep_task(1), caches).is_done and files.flush(DEADLINE_S)
        assert caches.exported == [*range(8)] and len(all_files([tmp_path])) == 8


def test_a_file_that_has_come_otherwise_makes_way_for_others(
    tmp_path: Path, cluster_key: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches, folders, task = MadeUp(2), folders_of(tmp_path, 2), keep_task(1)
    with kept(folders, keys=cluster_key) as (full, empty):
        assert full.answer(task, caches).is_done and full.flush(DEADLINE_S)
        monkeypatch.setattr(kept_prefixes, "FETCH_BYTES", all_files(folders)[0].stat().st_size)
        asked = full.answer(empty.answer(replace(task, kind=FETCH), caches), caches)
        (name,) = asked.attached
        (where := folders[1] / task.owner).mkdir(parents=True)
        (where / name).write_bytes(asked.attached[name])
        for _ in range(2):
            asked = full.answer(empty.answer(asked, caches), caches)
        assert not asked.wanted and not asked.files
        assert empty.flush(DEADLINE_S) and len(all_files(folders[1:])) == 2


def test_a_file_of_another_node_is_of_use_before_it_is_written(tmp_path: Path, cluster_key: KeyFile) -> None:
    """Another thread writes it."""
    caches, folders, task, may_write = MadeUp(2), folders_of(tmp_path, 2), keep_task(1), threading.Event()
    with (
        kept(folders[:1], keys=cluster_key) as (full,),
        kept(folders[1:], keys=cluster_key, free=lambda: may_write.wait(DEADLINE_S) << 40) as (empty,),
    ):
        assert full.answer(task, caches).is_done and full.flush(DEADLINE_S)
        asked = replace(task, kind=FETCH)
        for _ in range(2):
            asked = full.answer(empty.answer(asked, caches), caches)
        assert asked.is_done and not asked.wanted and not all_files(folders[1:])
        assert empty.answer(replace(task, kind=FIND, stop=0, ends="1"), caches).ends == "1"
        assert empty.answer(replace(task, kind=FILL), caches).is_done
        may_write.set()
        assert empty.flush(DEADLINE_S) and len(all_files(folders[1:])) == 2


def test_what_waits_to_be_written_is_given_to_other_nodes(tmp_path: Path, cluster_key: KeyFile) -> None:
    caches, folders, task, may_write = MadeUp(2), folders_of(tmp_path, 2), keep_task(1), threading.Event()
    with (
        kept(folders[:1], keys=cluster_key, free=lambda: may_write.wait(DEADLINE_S) << 40) as (full,),
        kept(folders[1:], keys=cluster_key) as (empty,),
    ):
        assert full.answer(task, caches).is_done
        asked = empty.answer(full.answer(empty.answer(replace(task, kind=FETCH), caches), caches), caches)
        assert not asked.wanted and not all_files(folders[:1])
        assert empty.flush(DEADLINE_S) and len(all_files(folders[1:])) == 2
        may_write.set()
        assert full.flush(DEADLINE_S)


def test_a_disk_that_was_full_takes_files_again(
    tmp_path: Path, cluster_key: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches, folders, task, n_free = MadeUp(2), folders_of(tmp_path, 2), keep_task(1), [0]
    with (
        kept(folders[:1], keys=cluster_key) as (full,),
        kept(folders[1:], keys=cluster_key, free=lambda: n_free[0]) as (empty,),
    ):
        assert full.answer(task, caches).is_done and full.flush(DEADLINE_S)
        monkeypatch.setattr(kept_prefixes, "FAILING_S", 0.0)
        for n_free[0], n_files in ((0, 0), (1 << 40, 2)):
            empty.answer(full.answer(empty.answer(replace(task, kind=FETCH), caches), caches), caches)
            assert empty.flush(DEADLINE_S) and len(all_files(folders[1:])) == n_files


@pytest.mark.parametrize("is_full", [True, False])
def test_a_disk_that_is_full_or_hangs_takes_no_more_files(
    is_full: bool, tmp_path: Path, cluster_key: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_prefixes, "ROOM_S", DEADLINE_S if is_full else 0.0)
    caches, folders, task, may_write = MadeUp(2), folders_of(tmp_path, 2), keep_task(1), threading.Event()

    def free() -> int:
        assert is_full or may_write.wait(DEADLINE_S)
        return 0

    with (
        kept(folders[:1], keys=cluster_key) as (full,),
        kept(folders[1:], keys=cluster_key, free=free) as (empty,),
    ):
        assert full.answer(task, caches).is_done and full.flush(DEADLINE_S)
        monkeypatch.setattr(kept_prefixes, "WAITING_BYTES", 1)
        with_files = full.answer(empty.answer(replace(task, kind=FETCH), caches), caches)
        assert len(with_files.attached) == 2
        assert not empty.answer(with_files, caches).is_done, "it took one of them"
        may_write.set()
        assert empty.flush(DEADLINE_S) and not all_files(folders[1:])


def test_a_node_with_all_files_says_so_to_those_behind_that_have_none(tmp_path: Path) -> None:
    caches, task = MadeUp(2), keep_task(1)
    with kept(folders_of(tmp_path, 2)) as (full, empty):
        assert full.answer(task, caches).is_done and full.flush(DEADLINE_S)
        found = empty.answer(full.answer(replace(task, kind=FIND, stop=0, ends="1"), caches), caches)
        assert (found.ends, found.some) == ("0", "1")


def test_owners_that_go_while_room_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is counted again then, by the next file."""
    caches, unlink, threads = MadeUp(1), Path.unlink, list[threading.Thread]()

    with kept([tmp_path], limit_bytes=3000) as (files,):

        def unlinked(path: Path, missing_ok: bool = False) -> None:
            if path.suffix == ".kv":
                (tmp_path / owner_folder("b")).mkdir()
                task = PrefixTask(OWNERS, owner=owner_folder("a"))
                threads.append(threading.Thread(target=files.answer, args=(task, caches)))
                threads[-1].start()
                threads[-1].join(0.2)  # it may have to wait until there is room
            unlink(path, missing_ok)

        for text in (1, 2, 3):
            if text == 3:
                monkeypatch.setattr(Path, "unlink", unlinked)
            assert files.answer(keep_task(text), caches).is_done and files.flush(DEADLINE_S)
        names = {path.name for path in all_files([tmp_path])}
        assert files.answer(keep_task(3), caches).is_done and files.flush(DEADLINE_S)
        (thread,) = threads
        thread.join(DEADLINE_S)
        assert not thread.is_alive() and len(caches.exported) == 3, "the third file was not written"
        assert names == {path.name for path in all_files([tmp_path])}


@pytest.mark.slow
def test_two_processes_together_keep_no_more_than_the_limit(tmp_path: Path) -> None:
    limit, caches = 1 << 19, MadeUp(16)
    (part := tmp_path / "other" / f"{'0' * 40}.kv.{os.getpid()}.part").parent.mkdir()
    part.write_bytes(b"x")
    os.utime(part, (0, 0))
    with kept([tmp_path] * 2, limit_bytes=limit) as nodes:
        for text in range(64):
            files = nodes[text % 2]
            assert files.answer(keep_task(text), caches).is_done and files.flush(DEADLINE_S)
        assert sum(size for _, size, _ in files.files()) <= limit * 9 // 8
        assert part.exists(), "another process writes it"
