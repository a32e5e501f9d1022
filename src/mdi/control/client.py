"""The starter's side of the control exchange: one object per secondary. What goes wrong becomes ControlError here."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlencode

from mdi.config import NodeConfig
from mdi.control.exchange import ExchangeError, exchange
from mdi.control.messages import InitRequest, PartSpec, ProbeRequest, ProfileRequest
from mdi.errors import ControlError

CONNECT_S = 4.0
ANSWER_S = 6.0
# A node that has taken a part's last byte still has to bring it to its disk: minutes, on a slow card.
PART_ANSWER_S = 300.0
# Measuring takes a few seconds; a slow board that builds large blocks takes longer.
PROFILE_ANSWER_S = 180.0
PROBE_ANSWER_S = 60.0
CODE_LIMIT = 40
ERROR_LIMIT = 1000  # characters of a peer's words


class ControlClient:
    """Talks to the control port of one node."""

    def __init__(self, node: NodeConfig) -> None:
        self.node = node

    @property
    def where(self) -> str:
        return f"{self.node.name} at {self.node.addr}:{self.node.port}"

    def status(self, run: str | None = None, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """`GET /`; with `run`, also a sign of life to the node that waits for it."""
        query = {"run": run} if run else {}
        answer = self._request("GET", "/", timeout_s, query=query)
        if not isinstance(answer.get("state"), str):
            raise ControlError(f"{self.where} is not a node of MDI-LLM: its status has no state", problem="stranger")
        return answer

    def init(self, request: InitRequest) -> dict[str, Any]:
        """`POST /init`; the answer says which parts are missing."""
        return self._ask("POST", "/init", request.to_json(), ANSWER_S * 5)

    def send_part(self, part: PartSpec, run: str, offset: int, pieces: Iterable[bytes | memoryview]) -> None:
        """`PUT /parts/<sha256>`: the bytes of a part from `offset` on."""
        query = {"run": run, "offset": str(offset)}
        self._request("PUT", f"/parts/{part.sha256}", PART_ANSWER_S, pieces, part.n_bytes - offset, query)

    def stop(self, run: str, leave: bool = False, timeout_s: float = ANSWER_S) -> None:
        """`PUT /stop`: end a run, and with `leave` the process."""
        self._ask("PUT", "/stop", {"run": run, "leave": leave}, timeout_s)

    def profile(self, request: ProfileRequest) -> dict[str, Any]:
        """`POST /profile`: what the node measured of itself; takes as long as that takes."""
        return self._ask("POST", "/profile", request.to_json(), PROFILE_ANSWER_S)

    def probe(self, request: ProbeRequest) -> dict[str, Any]:
        """`POST /probe`: how the node reaches another one."""
        return self._ask("POST", "/probe", request.to_json(), PROBE_ANSWER_S)

    def echo(self, n_bytes: int, timeout_s: float) -> None:
        """`PUT /echo`: so many bytes on their way there, and a short answer."""
        self._request("PUT", "/echo", timeout_s, bytes(n_bytes), n_bytes)

    def _ask(self, method: str, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        data = json.dumps(body).encode()
        return self._request(method, path, timeout_s, data, len(data))

    def _request(
        self, method: str, path: str, timeout_s: float, body: bytes | Iterable[bytes | memoryview] = b"", n_bytes: int = 0,
        query: dict[str, str] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        target = f"{path}?{urlencode(query)}" if query else path
        node = self.node
        try:
            found = exchange(
                method, node.addr, node.port, target, body, n_bytes, min(CONNECT_S, timeout_s), timeout_s
            )  # fmt: skip
        except ExchangeError as e:
            raise ControlError(f"{self.where} does not answer ({e})", problem=e.problem) from None
        try:
            answer = json.loads(found.body)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise ControlError(
                f"{self.where} is not a node of MDI-LLM: its answer is no JSON object", found.status, "stranger"
            )
        if found.status != 200:
            words = str(answer.get("error", found.reason))[:ERROR_LIMIT]
            raise ControlError(f"{self.where}: {words}", found.status, code=str(answer.get("code", ""))[:CODE_LIMIT])
        return answer
