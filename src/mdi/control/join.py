"""`POST /join`: a board with the code of an invitation gets the cluster key from a node that has it."""

from __future__ import annotations

import json
from typing import Any, Protocol

from mdi.control.exchange import exchange
from mdi.errors import AccessError, ControlError
from mdi.net.message import ExchangeError

CONNECT_S = 4.0
ANSWER_S = 6.0
JOIN_LIMIT_BYTES = 1024


class Host(Protocol):
    """A side that can be joined: an Invitation."""

    def answer(self, request: Any, addr: str) -> dict[str, str]:
        """What the guest at an address gets; raises AccessError."""


def ask_to_join(addr: str, port: int, request: dict[str, Any]) -> Any:
    """The answer of the node there; ControlError if there is none, or it says no."""
    body, where = json.dumps(request).encode(), f"{addr}:{port}"
    try:
        found = exchange("POST", addr, port, "/join", body, CONNECT_S, ANSWER_S)
        answer = json.loads(found.body)
    except ExchangeError as e:
        raise ControlError(
            f"{where} does not answer ({e}): is `mdi key --invite` still running there?", problem=e.problem
        ) from None
    except (ValueError, RecursionError):
        raise ControlError(f"{where} is not a node of MDI-LLM", problem="stranger") from None
    if found.status == 401:
        raise ControlError(
            f"{where} refuses the code: it is wrong, was used, or is older than 15 minutes", 401, code=AccessError.code
        )
    if found.status != 200:
        raise ControlError(f"{where} has no open invitation: run `mdi key --invite` there", found.status)
    return answer
