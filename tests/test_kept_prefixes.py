"""Prefixes on the disks of the nodes: a text that begins with one has the ids that it would have had, whatever became of the files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from families import greedy, model_of, prompt
from loopback import InProcessRing, Text, ring_of
from mdi.engine.kept_prefixes import KeptFiles, Secrets
from mdi.engine.memory import CacheMemory, NodeCaches
from mdi.engine.sequence import SamplingParams

GREEDY = SamplingParams(n_tokens=12, temperature=0)
LLAMA, GEMMA, LATENT = "Llama-3.1-8B", "Gemma-3-1b-it", "deepseek-v3-shape"


def owner_folder(owner: str) -> str:
    return f"{'0' * 16}-{hashlib.sha256(owner.encode()).hexdigest()[:16]}"


@contextmanager
def kept(
    folders: list[Path], limit_bytes: int = 1 << 30, free: Callable[[], int] | None = None
) -> Iterator[list[KeptFiles]]:
    """The files of nodes, each with a folder."""
    with ExitStack() as stack:
        nodes = []
        for folder in folders:
            files = KeptFiles(folder, limit_bytes, Secrets(folder, None), free or (lambda: 1 << 40), bytes_per_s=1e12)
            stack.callback(files.close)
            nodes.append(files)
        yield nodes


@contextmanager
def ring(family: str, n_nodes: int, files: list[KeptFiles], **kwargs: object) -> Iterator[InProcessRing]:
    """A ring whose nodes have just begun: nothing is in memory."""
    with ring_of(model_of(family), n_nodes, files=files, owner_folder=owner_folder, **kwargs) as made:
        nodes = [NodeCaches(f"node{i}", 1 << 40, tuple(s.caches.classes)) for i, s in enumerate(made.stages)]
        made.engine.memory = CacheMemory(tuple(nodes))
        yield made


def folders_of(tmp_path: Path, n: int) -> list[Path]:
    return [tmp_path / f"node{i}" for i in range(n)]


def ask(made: InProcessRing, ids: list[int], owner: str | None = "a") -> Text:
    text = Text(made.engine.submit(ids, GREEDY, owner=owner))
    made.run()
    return text


def all_files(folders: list[Path]) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.kv"))


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
