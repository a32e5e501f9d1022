"""Errors as clients of OpenAI's API expect them: an HTTP status, and an object that says what and where."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from mdi.errors import MdiError

logger = logging.getLogger("mdi")

# status -> what OpenAI calls such errors
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}

TOO_LONG = "context_length_exceeded"  # the code of a prompt for which the context is too short


class ApiError(MdiError):
    """A request that ends with an error, before or during its answer.

    Attributes:
        status: of HTTP.
        param: the field of the request that is wrong, if it is one.
        headers: to be sent with it.
        details: further fields of the error object.
    """

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None,
        headers: Mapping[str, str] | None = None, details: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status = status
        self.param = param
        self._code = code
        self.headers = dict(headers or {})
        self.details = dict(details or {})

    @property
    def is_too_long(self) -> bool:
        """Whether its prompt is: agents then make their chat shorter."""
        return self._code == TOO_LONG

    @property
    def body(self) -> dict[str, Any]:
        error = {"message": str(self), "type": TYPES.get(self.status, "server_error"), "param": self.param}
        return {"error": {**error, "code": self._code or None, **self.details}}


def invalid(param: str, message: str) -> ApiError:
    """A field that cannot be used."""
    return ApiError(400, f"{param}: {message}", "invalid_value", param)


def checked_text(name: str, text: str) -> str:
    """Raises ApiError if a text holds half of a pair of surrogates, which JSON can say and no text has."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise invalid(name, "not valid Unicode: half of a surrogate pair") from None
    return text


def tell_ignored(what: str, kinds: Iterable[str]) -> None:
    """Log once what requests have that is left out."""
    tell_once(what, tuple(sorted({repr(kind[:40])[1:-1] for kind in kinds})[:8]))


@lru_cache(maxsize=256)
def tell_once(what: str, kinds: tuple[str, ...]) -> None:
    logger.warning("%s of these kinds are left out: %s", what, ", ".join(kinds))
