"""The starter's side of the control exchange: one object per secondary. Turns failures into ControlError."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlencode

from mdi.control.exchange import ExchangeError, HttpAnswer, exchange
from mdi.control.messages import ForwardRequest, InitRequest, PartSpec, ProbeRequest, ProfileRequest
from mdi.control.signing import (
    BODY_HEADER,
    NONCE_HEADER,
    SIGNATURE_HEADER,
    UNHASHED,
    NoncesKept,
    body_hash,
    is_answer,
    sign_request,
)
from mdi.errors import AccessError, ControlError
from mdi.net.keys import KeyFile
from mdi.spec.cluster import NodeConfig

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
    """Talks to the control port of one node; may be used by several threads.

    Args:
        keys: of the cluster. Where there are some, requests are signed, and only signed answers are believed.
    """

    def __init__(self, node: NodeConfig, keys: KeyFile | None = None) -> None:
        self.node = node
        self._keys = keys
        self.nonces = NoncesKept()

    @property
    def where(self) -> str:
        return f"{self.node.name} at {self.node.addr}:{self.node.port}"

    def status(self, run: str | None = None, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """`GET /`; with `run`, also a sign of life to the node that waits for it."""
        query = {"run": run} if run else {}
        answer = self.request("GET", "/", timeout_s, query=query)
        if not isinstance(answer.get("state"), str):
            raise ControlError(f"{self.where} is not a node of MDI-LLM: its status has no state", problem="stranger")
        return answer

    def init(self, request: InitRequest) -> dict[str, Any]:
        """`POST /init`; the answer says which parts are missing."""
        return self._ask("POST", "/init", request.to_json(), ANSWER_S * 5)

    def send_part(
        self, part: PartSpec, run: str, offset: int, pieces: Iterable[bytes | memoryview],
        timeout_s: float = PART_ANSWER_S,
    ) -> None:  # fmt: skip
        """`PUT /parts/<sha256>`: the bytes of a part from `offset` on."""
        query = {"run": run, "offset": str(offset)}
        self.request("PUT", f"/parts/{part.sha256}", timeout_s, pieces, part.n_bytes - offset, query)

    def forward(self, request: ForwardRequest) -> None:
        """`POST /forward`: the node sends a part to another one."""
        self._ask("POST", "/forward", request.to_json(), PART_ANSWER_S)

    def stop(self, run: str, leave: bool = False, timeout_s: float = ANSWER_S, ring: str | None = None) -> None:
        """`PUT /stop`: end a run, and with `leave` the process; with `ring`, an epoch, only that ring of the run."""
        only = {} if ring is None else {"ring": ring}
        self._ask("PUT", "/stop", {"run": run, "leave": leave, **only}, timeout_s)

    def profile(self, request: ProfileRequest) -> dict[str, Any]:
        """`POST /profile`: the node measures itself; returns when that is done."""
        return self._ask("POST", "/profile", request.to_json(), PROFILE_ANSWER_S)

    def probe(self, request: ProbeRequest) -> dict[str, Any]:
        """`POST /probe`: how the node reaches another one."""
        return self._ask("POST", "/probe", request.to_json(), PROBE_ANSWER_S)

    def echo(self, n_bytes: int, timeout_s: float) -> None:
        """`PUT /echo`: so many bytes on their way there, and a short answer."""
        self.request("PUT", "/echo", timeout_s, bytes(n_bytes), n_bytes)

    def _ask(self, method: str, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        data = json.dumps(body).encode()
        return self.request(method, path, timeout_s, data, len(data))

    def request(
        self, method: str, path: str, timeout_s: float, body: bytes | Iterable[bytes | memoryview] = b"", n_bytes: int = 0,
        query: dict[str, str] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        target = f"{path}?{urlencode(query)}" if query else path
        if self._keys is None:
            found = self._exchange(method, target, timeout_s, body, n_bytes)
            if NONCE_HEADER in found.headers:
                raise self._no_entry("has a cluster key, and this command was started without")
        else:
            found = self._signed(self._keys.first, method, target, timeout_s, body, n_bytes)
        return self._content(found)

    def _signed(
        self, secret: bytes, method: str, target: str, timeout_s: float, body: bytes | Iterable[bytes | memoryview],
        n_bytes: int,
    ) -> HttpAnswer:  # fmt: skip
        """Exchange a signed request for a signed answer. Raises ControlError."""
        hashed = body_hash(body) if isinstance(body, bytes) else UNHASHED

        def ask(nonce: str) -> tuple[str, HttpAnswer]:
            signature = sign_request(secret, method, target, n_bytes, hashed, nonce)
            headers = {NONCE_HEADER: nonce, SIGNATURE_HEADER: signature, BODY_HEADER: hashed}
            return signature, self._exchange(method, target, timeout_s, body, n_bytes, headers)

        signature, found = ask(self.nonces.take() or self._fetch_nonce(timeout_s))
        if self._is_stale(found) and isinstance(body, bytes):  # for example, the node was started again
            signature, found = ask(self._fetch_nonce(timeout_s))
        answered, nonce = found.headers.get(SIGNATURE_HEADER, ""), found.headers.get(NONCE_HEADER, "")
        if not is_answer(answered, secret, signature, found.status, found.body, nonce):
            raise self._no_entry("does not have the same cluster key as this node")
        self.nonces.keep(nonce)
        return found

    def _fetch_nonce(self, timeout_s: float) -> str:
        """Anybody may have one. Raises ControlError if the node gives none: it has no key."""
        found = self._exchange("GET", "/", timeout_s, b"", 0)
        nonce = found.headers.get(NONCE_HEADER)
        if nonce is None:
            self._content(found)  # is it a node at all?
            raise self._no_entry("has no cluster key")
        return nonce

    def _no_entry(self, why: str) -> ControlError:
        return ControlError(
            f"{self.where} {why}: start all nodes with the same --key FILE", 401, "key", code=AccessError.code
        )

    def _exchange(
        self, method: str, target: str, timeout_s: float, body: bytes | Iterable[bytes | memoryview], n_bytes: int,
        headers: dict[str, str] | None = None,
    ) -> HttpAnswer:  # fmt: skip
        node, connect_s = self.node, min(CONNECT_S, timeout_s)
        try:
            return exchange(method, node.addr, node.port, target, body, n_bytes, connect_s, timeout_s, headers)
        except ExchangeError as e:
            raise ControlError(f"{self.where} does not answer ({e})", problem=e.problem) from None

    @staticmethod
    def _is_stale(found: HttpAnswer) -> bool:
        """Whether the nonce was not good any more. Nobody has signed this, so it is only a reason to try once more."""
        try:
            return found.status == 401 and bool(json.loads(found.body)["code"] == "nonce")
        except (ValueError, KeyError, TypeError, RecursionError):
            return False

    def _content(self, found: HttpAnswer) -> dict[str, Any]:
        try:
            answer = json.loads(found.body)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise ControlError(
                f"{self.where} is not a node of MDI-LLM: its answer is not a JSON object", found.status, "stranger"
            )
        if found.status != 200:
            words = str(answer.get("error", found.reason))[:ERROR_LIMIT]
            raise ControlError(f"{self.where}: {words}", found.status, code=str(answer.get("code", ""))[:CODE_LIMIT])
        return answer
