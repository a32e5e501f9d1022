"""A starter that waits for its nodes, beside another one on the same machine."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from cluster_keys import key_file
from mdi.cancel import CancelledError
from mdi.cli import discover
from mdi.cli.access import free_port
from mdi.cli.discover import Discovery
from mdi.run.local import free_ports
from mdi.spec.options import Options
from waiting import until


@pytest.mark.parametrize("no_invite", [True, False], ids=["no code", "code"])
def test_another_starter_chooses_other_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_invite: bool) -> None:
    addr, first = "127.0.0.1", free_ports(2)
    monkeypatch.setattr(discover, "CONTROL_PORT", first[0])
    monkeypatch.setattr(discover, "RING_PORT", first[1])
    options = Options(key=key_file(tmp_path / "k").path, addr=addr, nodes=2, no_invite=no_invite)
    with Discovery(options) as discovery:

        def wait() -> None:
            with pytest.raises(CancelledError):
                discovery.present_nodes()

        waiting = threading.Thread(target=wait)
        waiting.start()
        try:
            until(lambda: all(free_port(addr, port) != port for port in first))
        finally:
            discovery.cancel.cancel()
            waiting.join()
    assert [free_port(addr, port) for port in first] == first
