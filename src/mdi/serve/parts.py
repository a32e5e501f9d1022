"""Contents of messages: texts, or parts that are texts, as all APIs of chats have them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mdi.serve.api_errors import checked_text, invalid

# Parts of contents for which models have parts of their own, which nothing here computes.
SEEN = (
    "image_url",
    "image",
    "input_image",
    "input_audio",
    "audio",
    "video_url",
    "video",
    "file",
    "input_file",
    "document",
)
LANGUAGE_ALONE = "of a model that sees or hears as well, it computes the language part alone"


def text_of(where: str, given: Any, kinds: Mapping[str, str], between: str = "") -> str:
    """A text, or parts that are texts; "" for none. Raises ApiError.

    Args:
        kinds: types of parts, and for each the name of the field with its text.
        between: what stands between two parts.
    """
    if given is None:
        return ""
    if isinstance(given, str):
        return checked_text(where, given)
    if not isinstance(given, list):
        raise invalid(where, "the content must be a text, or a list of parts")
    parts = []
    for part in given:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(kinds[kind]) if isinstance(kind, str) and kind in kinds else None
        if not isinstance(text, str):
            why = f"; {LANGUAGE_ALONE}" if kind in SEEN else ""
            raise invalid(where, f"this server reads parts of type {' and '.join(kinds)} only{why}")
        parts.append(checked_text(where, text))
    return between.join(parts)


def parts_of(given: Any, known: Collection[str], others: set[str]) -> Any:
    """A content without its parts of other than the known types, which `others` gets."""
    if not isinstance(given, list):
        return given
    kinds = [one.get("type") if isinstance(one, dict) else None for one in given]
    left_out = {kind for kind in kinds if isinstance(kind, str) and kind not in known}
    others.update(left_out)
    return [one for one, kind in zip(given, kinds, strict=True) if kind not in left_out]


def word_of(where: str, item: Mapping[str, Any], key: str) -> str:
    """A field that is a text. Raises ApiError."""
    if not isinstance(item.get(key), str):
        raise invalid(where, f"{key} must be a text")
    return checked_text(where, item[key])
