"""Whole nodes with a cluster key: examined, measured, sent their weights, run, ended; and two clusters that never mix."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cluster_keys import key_file
from mdi.errors import AccessError, ControlError
from mdi.host.doctor import examine
from mdi.spec.cluster import ClusterConfig
from secondaries import cluster_of, secondaries, text_of
from tiny_checkpoint import reference, write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("plain") / "tiny")


def generated(cluster: ClusterConfig, checkpoint: Path, placement: str, folder: Path) -> list[int]:
    return text_of(cluster, checkpoint, placement=placement, cache_dir=folder, wait_s=5)


@pytest.mark.parametrize("placement", ["even", "throughput"])
def test_a_run_with_a_key_gives_the_same_text(placement: str, checkpoint: Path, tmp_path: Path) -> None:
    keys = key_file(tmp_path / "cluster.key")
    with secondaries(2, tmp_path, keys=keys) as nodes:
        cluster = replace(cluster_of(nodes), keys=keys)
        report = examine(cluster, cache_dir=tmp_path)
        assert not [problem for problem in report.problems if "key" in str(problem)], str(report)
        assert all(link.route.is_ok for link in report.links)
        assert generated(cluster, checkpoint, placement, tmp_path) == list(reference("The ring", 6))


@pytest.mark.slow
def test_clusters_with_different_keys_never_mix(checkpoint: Path, tmp_path: Path) -> None:
    theirs = key_file(tmp_path / "theirs.key")
    with secondaries(1, tmp_path, keys=theirs) as nodes:
        for mine in (None, key_file(tmp_path / "mine.key")):
            cluster = replace(cluster_of(nodes), keys=mine)
            for placement in ("even", "throughput"):
                with pytest.raises(ControlError) as caught:
                    generated(cluster, checkpoint, placement, tmp_path)
                assert caught.value.code == AccessError.code and len(str(caught.value).splitlines()) == 1
            assert nodes[0].status(None)["state"] == "IDLE"
            assert any(reach.problem == "key" for reach in _reaches(cluster, tmp_path))


def _reaches(cluster: ClusterConfig, folder: Path) -> list:  # type: ignore[type-arg]
    return [
        route for node in examine(cluster, cache_dir=folder).nodes for route in (node.route.control, node.route.ring)
    ]
