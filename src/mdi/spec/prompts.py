"""The user's prompts: texts, or files with one per paragraph."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path

from mdi.errors import Code, UsageError
from mdi.spec.cluster import nearest_existing
from mdi.spec.settings_file import TEXT_LIMIT_BYTES, read_limited

DEFAULT_PROMPT = "Who are you?"
DEFAULT_N_SAMPLES = 3  # of a single prompt

_log = logging.getLogger(__name__)


def read_prompts(values: Sequence[str], n_samples: int | None = None, default: int = DEFAULT_N_SAMPLES) -> list[str]:
    """One prompt per sample.

    Args:
        values: texts, or `FILE:path` for a text file with a prompt per paragraph; none is "Who are you?".
        n_samples: prompts are repeated in turn or, with a warning, left out to make so many. None: one sample per
            prompt, but `default` samples of a single prompt.

    Raises:
        UsageError: a prompt is empty, a file cannot be used, or `n_samples` is under 1.
    """
    if n_samples is not None and n_samples < 1:
        raise UsageError(f"the number of samples must be at least 1, got {n_samples}", code=Code.VALUE)
    prompts: list[str] = []
    for value in values or (DEFAULT_PROMPT,):
        prompts += _paragraphs(value[len("FILE:") :]) if value.startswith("FILE:") else [_checked(value)]
    if n_samples is None:
        n_samples = default if len(prompts) == 1 else len(prompts)
    if n_samples < len(prompts):
        _log.warning(
            "--n-samples is %d: %d of the %d prompts are left out", n_samples, len(prompts) - n_samples, len(prompts)
        )
    return [prompts[i % len(prompts)] for i in range(n_samples)]


def _checked(prompt: str) -> str:
    if not prompt:
        raise UsageError("the prompt is empty: give some text, or FILE:path for a file of prompts", code=Code.EMPTY)
    refuse_surrogates(prompt, "the prompt")
    return prompt


def _paragraphs(name: str) -> list[str]:
    if not name:
        raise UsageError("FILE: needs the path of a text file right after the colon", code=Code.MISSING)
    path = Path(name).expanduser()
    if path.is_dir():
        raise UsageError(f"{path} is a directory: expected a text file with a prompt per paragraph", code=Code.MISSING)
    try:
        text = read_limited(path, TEXT_LIMIT_BYTES).decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError(
            f"no such prompt file: {path} (the nearest that exists is {nearest_existing(path)})", code=Code.MISSING
        ) from None
    except UnicodeDecodeError as e:
        raise UsageError(
            f"the prompt file {path} is not UTF-8 text: byte {e.start} is {e.object[e.start]:#04x}",
            code=Code.UNREADABLE,
        ) from None
    except (OSError, ValueError) as e:
        raise UsageError(f"cannot read the prompt file {path}: {e}", code=Code.UNREADABLE) from None
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    prompts = [p.strip() for p in re.split(r"\n[^\S\n]*\n", text) if p.strip()]
    if not prompts:
        raise UsageError(f"the prompt file {path} is empty: expected one prompt per paragraph", code=Code.EMPTY)
    return prompts


def refuse_surrogates(text: str, what: str) -> None:
    """Raises UsageError if a text came from bytes that were not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise UsageError(
            f"{what} is not valid Unicode text: found {text[e.start]!r} at character {e.start}", code=Code.UNREADABLE
        ) from None
