"""mdi finetune over a node of a nodes file, with a cluster key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cluster_keys import key_file
from mdi.checkpoint.adapters import WEIGHTS_FILE
from mdi.cli import launch
from processes import Cluster


@pytest.mark.slow
def test_questions_for_gradients_are_sealed_with_the_key(
    make_cluster: Callable[[int], Cluster], checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The node takes them from who has the key only, and changes no loss."""
    cluster, key, other = make_cluster(2), key_file(tmp_path / "own.key"), key_file(tmp_path / "other.key")
    cluster.start(0, "--key", key.path)
    cluster[0].wait_for("waits for its starter")
    data = tmp_path / "texts.jsonl"
    data.write_text('{"text": "Who are you?"}\n{"text": "The ring is closed."}\n', encoding="utf-8")

    def finetune(out: str, *flags: str) -> int:
        given = ["--ckpt", str(checkpoint), "--data", str(data), "--out", str(tmp_path / out), "--dtype", "float32"]
        own = ["--device", "cpu", "--epochs", "2", "--method", "lora", "--lora-r", "2", "--sequence-length", "64"]
        return launch("finetune", [*given, *own, *flags])

    nodes = ("--nodes-config", str(cluster.path), "--key")
    assert finetune("refused", *nodes, str(other.path)) != 0
    assert "Traceback" not in capsys.readouterr().err and not [*cluster.cache_dir(0).glob("*.safetensors")]
    assert finetune("over", *nodes, str(key.path)) == finetune("alone") == 0
    assert "sent" in capsys.readouterr().out and (tmp_path / "over" / WEIGHTS_FILE).is_file()
    over, alone = (
        [float(line.split(",")[1]) for line in (tmp_path / out / "losses.csv").read_text().split()[1:]]
        for out in ("over", "alone")
    )
    assert len(over) == 2 and over == pytest.approx(alone, rel=1e-5)
