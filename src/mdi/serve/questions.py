"""What can be asked of the engine process, beside texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mdi.serve.host import ModelHost


def handlers(host: ModelHost) -> dict[str, Callable[[dict[str, Any]], dict[str, Any]]]:
    """By name; each is called in a thread of its own, and gives plain JSON or raises MdiError."""
    return {"status": lambda args: dict(host.status)}
