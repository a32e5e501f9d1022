"""The starter's side of the control exchange: one object per secondary. `requests`' errors become ControlError here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import requests
from urllib3.exceptions import HTTPError

from mdi.config import NodeConfig
from mdi.control.messages import InitRequest, PartSpec, ProbeRequest, ProfileRequest
from mdi.errors import ControlError

CONNECT_S = 4.0
ANSWER_S = 6.0
# A node that has taken a part's last byte still has to bring it to its disk: minutes, on a slow card.
PART_ANSWER_S = 300.0
# Measuring takes a few seconds; a slow board that builds large blocks takes longer.
PROFILE_ANSWER_S = 180.0
PROBE_ANSWER_S = 60.0


class ControlClient:
    """Talks to the control port of one node."""

    def __init__(self, node: NodeConfig) -> None:
        self.node = node
        host = f"[{node.addr}]" if ":" in node.addr else node.addr
        self._url = f"http://{host}:{node.port}"

    @property
    def where(self) -> str:
        return f"{self.node.name} at {self.node.addr}:{self.node.port}"

    def status(self, run: str | None = None, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """`GET /`; with `run`, also a sign of life to the node that waits for it."""
        answer = self._request("GET", "/", params={"run": run} if run else {}, timeout_s=timeout_s)
        if not isinstance(answer.get("state"), str):
            raise ControlError(f"{self.where} is not a node of MDI-LLM: its status has no state")
        return answer

    def init(self, request: InitRequest) -> dict[str, Any]:
        """`POST /init`; the answer says which parts are missing."""
        return self._request("POST", "/init", data=json.dumps(request.to_json()), timeout_s=ANSWER_S * 5)

    def send_part(self, part: PartSpec, run: str, offset: int, pieces: Iterable[bytes | memoryview]) -> None:
        """`PUT /parts/<sha256>`: the bytes of a part from `offset` on."""
        n_left = part.n_bytes - offset
        self._request(
            "PUT",
            f"/parts/{part.sha256}",
            params={"run": run, "offset": str(offset)},
            data=_Body(pieces, n_left) if n_left else b"",  # without a length, requests would send it in chunks
            timeout_s=PART_ANSWER_S,
        )

    def stop(self, run: str, leave: bool = False, timeout_s: float = ANSWER_S) -> None:
        """`PUT /stop`: end a run, and with `leave` the process."""
        self._request("PUT", "/stop", data=json.dumps({"run": run, "leave": leave}), timeout_s=timeout_s)

    def profile(self, request: ProfileRequest) -> dict[str, Any]:
        """`POST /profile`: what the node measured of itself; takes as long as that takes."""
        return self._request("POST", "/profile", data=json.dumps(request.to_json()), timeout_s=PROFILE_ANSWER_S)

    def probe(self, request: ProbeRequest) -> dict[str, Any]:
        """`POST /probe`: how the node reaches another one."""
        return self._request("POST", "/probe", data=json.dumps(request.to_json()), timeout_s=PROBE_ANSWER_S)

    def echo(self, n_bytes: int, timeout_s: float) -> None:
        """`PUT /echo`: so many bytes on their way there, and a short answer."""
        self._request("PUT", "/echo", data=bytes(n_bytes), timeout_s=timeout_s)

    def _request(self, method: str, path: str, timeout_s: float, **kwargs: Any) -> dict[str, Any]:
        try:
            with requests.Session() as session:
                session.trust_env = False  # a proxy of the environment has no business between two nodes
                timeout = (min(CONNECT_S, timeout_s), timeout_s)
                response = session.request(method, self._url + path, timeout=timeout, allow_redirects=False, **kwargs)
        except (requests.RequestException, HTTPError, UnicodeError) as e:  # requests lets some through as they are
            raise ControlError(f"{self.where} does not answer ({_reason(e)})") from None
        try:
            answer = response.json()
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise ControlError(
                f"{self.where} is not a node of MDI-LLM: its answer is no JSON object", response.status_code
            )
        if response.status_code != 200:
            raise ControlError(f"{self.where}: {answer.get('error', response.reason)}", response.status_code)
        return answer


class _Body:
    """A request body of known length that is produced while it is sent; `requests` asks for its length."""

    def __init__(self, pieces: Iterable[bytes | memoryview], n_bytes: int) -> None:
        self._pieces = pieces
        self._n_bytes = n_bytes

    def __len__(self) -> int:
        return self._n_bytes

    def __iter__(self) -> Iterator[bytes | memoryview]:
        return iter(self._pieces)


def _reason(error: Exception) -> str:
    """The innermost cause, in a few words; requests wraps three layers around it."""
    cause: BaseException = error
    while (inner := cause.__cause__ or cause.__context__) is not None:
        cause = inner
    if isinstance(cause, TimeoutError) or isinstance(error, requests.Timeout):
        return "no answer in time"
    return getattr(cause, "strerror", None) or str(cause)[:200]
