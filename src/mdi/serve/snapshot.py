"""What the ring is at this moment, for those who look at it: the page, and /metrics."""

from __future__ import annotations

from typing import Any

from mdi.serve.host import ModelHost


def snapshot(host: ModelHost) -> dict[str, Any]:
    """Plain JSON; quick, for it is made each second."""
    told: dict[str, Any] = {"status": host.status, "nodes": []}
    loaded = host.loaded
    if loaded is None:
        return told
    engine = loaded.node.engine
    n_running, n_waiting, n_put_out = engine.texts()
    texts = {"running": n_running, "waiting": n_waiting, "put_out": n_put_out}
    caches = [{"node": name, "used_bytes": n, "limit_bytes": limit} for name, n, limit in engine.cache_use]
    return {
        **told, "nodes": list(loaded.node.names), "texts": texts, "n_tokens": engine.n_tokens, "caches": caches,
        "n_reused": engine.n_reused,
    }  # fmt: skip
