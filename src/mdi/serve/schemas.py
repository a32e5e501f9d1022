"""Checks whether the engine can use the JSON schema of a request, in processes with limits (`mdi.text.limited`)."""

from __future__ import annotations

import json
from typing import Any

from mdi.serve.admission import Admission
from mdi.serve.api_errors import ApiError
from mdi.text.templates import LimitedError, LimitedProcess

MOST_CHECKS = 2  # schemas at the same time
SCHEMA_LIMIT = 1 << 18  # characters


class SchemaChecks:
    """Belongs to one event loop.

    Args:
        turns: where requests wait for their turn, or are refused.
    """

    def __init__(self, turns: Admission) -> None:
        self._turns = turns
        self._idle: list[LimitedProcess] = []

    async def check(self, schema: Any, owner: str, priority: int, param: str | None = None) -> None:
        """Raises ApiError.

        Args:
            schema: of JSON; a text is a grammar of llguidance's own.
            param: the field of the request that has it.
        """
        kind, written = ("lark", schema) if isinstance(schema, str) else ("schema", json.dumps(schema))
        if len(written) > SCHEMA_LIMIT:
            raise _refused(param, f"has more than {SCHEMA_LIMIT} characters")
        async with self._turns.entered(owner, priority, 1):
            process = self._idle.pop() if self._idle else await LimitedProcess.start()
            try:
                answer = await process.ask({kind: written})
            except LimitedError:
                process.kill()
                raise _refused(param, "is too large: it takes too long to compile, or too much memory") from None
            except BaseException:
                process.kill()
                raise
            self._idle.append(process)
        if "error" in answer:
            raise _refused(param, f"cannot be used: {answer['error']}")

    def close(self) -> None:
        while self._idle:
            self._idle.pop().kill()


def _refused(param: str | None, why: str) -> ApiError:
    return ApiError(400, f"{'' if param is None else f'{param}: '}the JSON schema {why}", "invalid_request", param)
