"""Reasoning that clients give back: it is told whether it was written here."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

from mdi.serve.api_errors import ApiError, invalid

_SEAL = "mdi_"


def signature_of(reasoning: str) -> str:
    """A text that says nothing to clients, with which they give reasoning back. Anybody may say what a model has thought, so it
    needs no secret: it tells what models here wrote from what those of other services did.
    """
    return _SEAL + hashlib.sha256(f"{_SEAL}reasoning {reasoning}".encode()).hexdigest()


def signed(where: str, reasoning: str, signature: Any) -> str:
    """The reasoning. Raises ApiError if the signature is another one."""
    if signature != signature_of(reasoning):
        raise invalid(where, "the signature of this thinking is none of this server's")
    return reasoning


def sealed(reasoning: str) -> str:
    """Reasoning for clients that give back only what they cannot read."""
    return f"{signature_of(reasoning)}.{base64.b64encode(reasoning.encode()).decode()}"


def unsealed(where: str, given: Any) -> str:
    """The reasoning. Raises ApiError if it was not sealed here."""
    signature, _, data = given.partition(".") if isinstance(given, str) else ("", "", "")
    try:
        reasoning = base64.b64decode(data, validate=True).decode()
    except ValueError:
        reasoning = ""
    if signature != signature_of(reasoning):
        raise ApiError(400, f"{where}: this server did not write this reasoning", "invalid_encrypted_content", where)
    return reasoning
