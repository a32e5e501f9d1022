"""The tokenizer of the loaded model in the API process, without litgpt and torch: the engine process's report about it, and the
library that reads its file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mdi.tokenizer_file import FileTokenizer, panics_told


class ServedTokenizer(FileTokenizer):
    """A tokenizer made from the engine process's report.

    Args:
        facts: see TextCodec.facts; with the directory.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        super().__init__(Path(facts["directory"]), facts)

    def ids_of(self, text: str, adds_special: bool = True) -> list[int]:
        """As FileTokenizer's, but as a batch: only then does the library release the interpreter's lock."""
        if self.backend == "huggingface":
            with panics_told():
                return list(self.processor.encode_batch_fast([text], add_special_tokens=adds_special)[0].ids)
        return super().ids_of(text, adds_special)

    @property
    def longest_token(self) -> int:
        """Its length in characters."""
        if self.backend == "huggingface":
            return max(map(len, self.processor.get_vocab()), default=1)
        return max(len(self.processor.id_to_piece(i)) for i in range(self.processor.vocab_size()))

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of a text that a chat template has written: special tokens are in it by their names, and none are added."""
        if self.backend == "huggingface":
            return self.ids_of(text, adds_special=False)
        names = {self.processor.id_to_piece(i): i for i in self._control_ids()}
        if not names:
            return list(self.processor.encode(text))
        found: list[int] = []
        for part in re.split("(" + "|".join(map(re.escape, sorted(names, key=len, reverse=True))) + ")", text):
            found += [names[part]] if part in names else self.processor.encode(part) if part else []
        return found

    def _control_ids(self) -> list[int]:
        return [i for i in range(self.processor.vocab_size()) if self.processor.is_control(i)]
