"""How long a text may be, and which prompts a model can continue."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mdi.errors import UsageError


def context_length(config: Any, longest: int, wanted: int | None) -> int:
    """Tokens that a sequence may have.

    Args:
        config: of the model; `longest` is what that allows.
        wanted: by the user; None leaves it to the model.

    Raises:
        UsageError: it is more than the model was made for.
    """
    if wanted is None:
        return longest
    if not 1 <= wanted <= config.block_size:
        raise UsageError(
            f"--sequence-length {wanted}: {config.name or 'the model'} has a context of {config.block_size}"
        )
    return wanted


def check_prompt(prompt_ids: Sequence[int], config: Any, n_context: int, directory: Path) -> None:
    """Raises UsageError if the prompt is empty, does not fit the context, or has tokens that the model does not know."""
    if not prompt_ids:
        raise UsageError("a prompt without any token cannot be continued: give it some text")
    if len(prompt_ids) > n_context:
        raise UsageError(
            f"a prompt has {len(prompt_ids)} tokens, but the context holds {n_context}: shorten it, or choose a larger "
            "--sequence-length if the model allows it"
        )
    if max(prompt_ids) >= config.padded_vocab_size:
        raise UsageError(
            f"a prompt has the token {max(prompt_ids)}, but the model knows {config.padded_vocab_size} tokens: the "
            f"tokenizer in {directory} belongs to another model"
        )
