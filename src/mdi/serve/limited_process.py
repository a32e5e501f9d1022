"""The processes of `mdi.serve.limited`, as the API process sees them."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from mdi.serve import limited
from mdi.serve.api_errors import ApiError
from mdi.serve.process import module_environment

FIRST_ANSWER_S = 60.0  # the process must begin before, which takes long on a busy board
ANSWER_S = 15.0  # the process's own limit is shorter, but counts only while it computes
ANSWER_LIMIT_BYTES = 8 * limited.RENDERED_LIMIT
MOST_CHECKS = 2  # schemas at the same time
SCHEMA_LIMIT = 1 << 18  # characters


class LimitedError(Exception):
    """The request needs too much time or memory; the process has ended, or can be asked no more."""


class LimitedProcess:
    """One process. Belongs to one event loop."""

    def __init__(
        self, process: subprocess.Popen[bytes], source: asyncio.StreamReader, sink: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._source = source
        self._sink = sink
        self._answer_s = FIRST_ANSWER_S

    @classmethod
    async def start(cls) -> LimitedProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            source, sink = await asyncio.open_connection(sock=ours)
            try:
                command = [sys.executable, "-m", limited.__name__]
                ends = theirs.fileno()
                process = subprocess.Popen(command, stdin=ends, stdout=ends, env=module_environment())
            except BaseException:
                sink.close()
                raise
        return cls(process, source, sink)

    async def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Raises LimitedError. If it is cancelled, the process can be asked no more."""
        try:
            answer = await asyncio.wait_for(self._exchange(limited.packed(message)), self._answer_s)
        except (asyncio.TimeoutError, asyncio.IncompleteReadError, OSError):  # noqa: UP041 - another class before Python 3.11
            raise LimitedError from None
        self._answer_s = ANSWER_S
        return answer

    async def _exchange(self, data: bytes) -> dict[str, Any]:
        self._sink.write(data)
        await self._sink.drain()
        (n_bytes,) = limited.LENGTH.unpack(await self._source.readexactly(limited.LENGTH.size))
        if n_bytes > ANSWER_LIMIT_BYTES:
            raise OSError("no answer of this program is so long")
        answer: dict[str, Any] = json.loads(await self._source.readexactly(n_bytes))
        return answer

    def kill(self) -> None:
        """The event loop does not end before the process has ended."""
        self._process.kill()
        self._sink.close()
        asyncio.get_running_loop().run_in_executor(None, self._process.wait)


class SchemaChecks:
    """Whether the engine can use JSON schemas. Belongs to one event loop."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(MOST_CHECKS)
        self._idle: list[LimitedProcess] = []

    async def check(self, schema: Any) -> None:
        """Raises ApiError."""
        written = json.dumps(schema)
        if len(written) > SCHEMA_LIMIT:
            raise _refused(f"has more than {SCHEMA_LIMIT} characters")
        async with self._turns:
            process = self._idle.pop() if self._idle else await LimitedProcess.start()
            try:
                answer = await process.ask({"schema": written})
            except LimitedError:
                process.kill()
                raise _refused("is too large: it takes too long to compile, or too much memory") from None
            except BaseException:
                process.kill()
                raise
            self._idle.append(process)
        if "error" in answer:
            raise _refused(f"cannot be used: {answer['error']}")

    def close(self) -> None:
        while self._idle:
            self._idle.pop().kill()


def _refused(why: str) -> ApiError:
    return ApiError(400, f"the JSON schema {why}", "invalid_request")
