"""Real processes: standing nodes come and go, in good order and not, while starters generate over them."""

from __future__ import annotations

from pathlib import Path

import pytest
from churn import Churn

from tiny_checkpoint import write_checkpoint


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_texts_stay_the_same_while_nodes_come_and_go(tmp_path: Path) -> None:
    """All nodes hold all blocks of a tiny model: few processes, of which only the first measures itself."""
    checkpoint = write_checkpoint(tmp_path / "tiny", n_layer=2, with_end=False)
    churn = Churn(tmp_path, n_nodes=4, seed=3, most_blocks=2, n_tokens=60, ckpt=checkpoint, n_whole=99)
    found = churn.run(n_starters=1, seconds=4.0, each_s=1.0)
    assert found["wrong"] == [] and found["failures"] == []
    assert found["counts"]["texts"] >= 2 and found["counts"]["came"] >= 4
    assert any(found["counts"].get(what) for what in ("killed", "left", "halted", "starters killed"))
    assert not any(node.poll() is None for node in churn.nodes.values())
