"""The tokenizer of a checkpoint, read without litgpt and torch. Gives the ids of litgpt's Tokenizer."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mdi.checkpoint.folder import RANKS, TOKENIZERS, tokenizer_file
from mdi.errors import CheckpointError, Code
from mdi.spec.cluster import nearest_existing

_ANCHOR = "\u263a"  # a character that no word has
_WORD = "\u2581"  # what tokenizers of sentencepiece put before the first word of a text
_PIECES, _PIECE, _TYPE, _USER_DEFINED = 1, 1, 3, 4  # of a model of sentencepiece: fields, and a kind of pieces


class Ids(list[int]):
    def tolist(self) -> list[int]:
        return list(self)


@contextlib.contextmanager
def panics_as_errors() -> Iterator[None]:
    """CheckpointError instead of a panic in the library, as by a regular expression of the file that would take for ever."""
    try:
        yield
    except BaseException as e:  # a panic is no Exception, and its class has no name that could be imported
        if type(e).__name__ != "PanicException":
            raise
        reason = " ".join(str(e).split())[:200]
        raise CheckpointError(f"the model's tokenizer cannot cut this text up into tokens: {reason}") from None


class FileTokenizer:
    """The part of litgpt's Tokenizer that `TextCodec` uses, with the same ids.

    Args:
        directory: of the checkpoint.
        facts: see TextCodec.facts.

    Attributes:
        processor: the library's object that has read the file.
    """

    def __init__(self, directory: Path, facts: Mapping[str, Any]) -> None:
        self.backend: str = facts["backend"]
        self.bos_id: int | None = facts["bos_id"]
        self.eos_id: int | None = facts["eos_id"]
        self.use_bos: bool = facts["use_bos"]
        self.adds_eos: bool = facts.get("adds_eos", False)
        self.processor: Any
        if self.backend == "huggingface":
            from tokenizers import Tokenizer

            self.processor = Tokenizer.from_file(str(tokenizer_json(directory) or directory / "tokenizer.json"))
            # Settings left over from training would cut or fill up prompts in silence.
            self.processor.no_truncation()
            self.processor.no_padding()
        else:
            try:
                from sentencepiece import SentencePieceProcessor
            except ModuleNotFoundError:
                raise CheckpointError(
                    f"{directory} has a tokenizer.model and no tokenizer.json, which sentencepiece reads: "
                    "pip install sentencepiece",
                    code=Code.LIBRARY,
                ) from None
            self.processor = SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))

    def encode(self, text: str) -> Ids:
        ids = self.ids_of(text)
        if self.use_bos and self.bos_id is not None:
            if ids[:1] != [self.bos_id]:
                ids = [self.bos_id, *ids]
        elif self.bos_id is not None and ids[:1] == [self.bos_id]:
            ids = ids[1:]
        if self.eos_id is not None and ids[-1:] == [self.eos_id]:
            ids = ids[:-1]
        return Ids(ids)

    def embedded_ids(self, text: str) -> list[int]:
        """Of a whole text, as models that embed texts have it: with all that the tokenizer puts around it, its end, too."""
        ids = self.ids_of(text)
        if self.use_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        if self.adds_eos and self.eos_id is not None and ids[-1:] != [self.eos_id]:
            ids = [*ids, self.eos_id]
        return ids

    def ids_of(self, text: str, adds_special: bool = True) -> list[int]:
        """As the library gives them."""
        if self.backend == "huggingface":
            with panics_as_errors():
                return list(self.processor.encode(text, add_special_tokens=adds_special).ids)
        return list(self.processor.encode(text))

    def pieces(self, text: str) -> list[tuple[int, int]]:
        """All of a text, without ids that are added: of each token its id, and the character that it begins with."""
        if self.backend == "huggingface":
            with panics_as_errors():
                found = self.processor.encode(text, add_special_tokens=False)
            return [(i, begin) for i, (begin, _) in zip(found.ids, found.offsets, strict=True)]
        return [(piece.id, piece.begin) for piece in self.processor.encode(text, out_type="immutable_proto").pieces]

    def encode_rendered(self, text: str, is_within: bool = False) -> list[int]:
        """Ids of a text that a chat template has written: special tokens are in it by their names, and none are added.

        Args:
            is_within: see `ids_within`.
        """
        begin = self.ids_within if is_within else partial(self.ids_of, adds_special=False)
        names = {} if self.backend == "huggingface" else {self.processor.id_to_piece(i): i for i in self._control_ids()}
        if not names:
            return begin(text)
        first, *others = re.split("(" + "|".join(map(re.escape, sorted(names, key=len, reverse=True))) + ")", text)
        found = begin(first) if first else []
        for part in others:
            found += [names[part]] if part in names else self.processor.encode(part) if part else []
        return found

    def ids_within(self, text: str) -> list[int]:
        """Of a text that begins within a line: without a word mark before it that is not in the text."""
        ids, anchor = (self.ids_of(one, adds_special=False) for one in (text, _ANCHOR))
        if not anchor or not self.piece(anchor[0]).startswith(_WORD):
            return ids
        both = self.ids_of(_ANCHOR + text, adds_special=False)
        return both[len(anchor) :] if both[: len(anchor)] == anchor else ids

    def piece(self, i: int) -> str:
        """The token with this id, as the tokenizer has it."""
        of = self.processor.id_to_token if self.backend == "huggingface" else self.processor.id_to_piece
        return str(of(i))

    def own_tokens(self) -> list[str]:
        """Tokens that a text has wherever their letters stand in it, and that are not special."""
        if self.backend == "huggingface":
            added = self.processor.get_added_tokens_decoder().values()
            return [token.content for token in added if not token.special]
        model = self.processor.serialized_model_proto()
        pieces = [dict(_fields(bytes(piece))) for number, piece in _fields(model) if number == _PIECES]
        return [bytes(one[_PIECE]).decode() for one in pieces if one.get(_TYPE) == _USER_DEFINED]

    def _control_ids(self) -> list[int]:
        return [i for i in range(self.processor.vocab_size()) if self.processor.is_control(i)]

    def token_to_id(self, token: str) -> int:
        """Raises ValueError if the token does not exist."""
        is_huggingface = self.backend == "huggingface"
        found = self.processor.token_to_id(token) if is_huggingface else self.processor.piece_to_id(token)
        if found is None:
            raise ValueError(f"there is no token {token!r}")
        return int(found)


def tokenizer_json(directory: Path) -> Path | None:
    """The file of a folder, or the one that is made of its `tiktoken.model`; None if its tokenizer is another, or missing.

    Raises:
        CheckpointError: see `mdi.checkpoint.token_ranks`.
    """
    used = tokenizer_file(directory)
    if used == directory / RANKS:
        from mdi.checkpoint.token_ranks import made_of_ranks  # which needs a library that other folders do not need

        return made_of_ranks(directory)
    return used if used == directory / "tokenizer.json" else None


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values of the fields of a message in the form of protocol buffers; of a fixed width, as bytes."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte, at = message[at], at + 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        key = number()
        if key & 7 == 0:
            yield key >> 3, number()
        else:
            n_bytes = {1: 8, 5: 4}[key & 7] if key & 7 != 2 else number()
            yield key >> 3, message[at : at + n_bytes]
            at += n_bytes


def read_tokenizer(directory: Path, config: Mapping[str, Any], generation: Mapping[str, Any]) -> FileTokenizer:
    """The tokenizer of a checkpoint, with the settings in its other files.

    Args:
        config, generation: content of tokenizer_config.json and generation_config.json; {} if missing.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    used = tokenizer_file(directory)
    if used is None:
        found = (
            "nothing of the kind" if directory.is_dir() else f"no such directory; {nearest_existing(directory)} exists"
        )
        raise CheckpointError(f"no tokenizer in {directory}: expected {' or '.join(TOKENIZERS)}, found {found}")
    backend = "sentencepiece" if used.name == "tokenizer.model" else "huggingface"
    unknown = {"backend": backend, "bos_id": None, "eos_id": None, "use_bos": False}
    try:
        tokenizer = FileTokenizer(directory, unknown)
        _find_special_ids(tokenizer, config, generation)
    except CheckpointError:
        raise
    except Exception as e:  # tokenizers raises bare Exception
        raise CheckpointError(f"the tokenizer {used} cannot be used: {' '.join(str(e).split())}") from e
    tokenizer.adds_eos = bool(config.get("add_eos_token"))
    has_own = backend == "huggingface" and "add_bos_token" not in config and tokenizer.bos_id is not None
    # A tokenizer that adds the id itself is a better source than names.
    is_first = has_own and tokenizer.processor.encode("").ids[:1] == [tokenizer.bos_id]
    tokenizer.use_bos = (_is_bos_wanted(directory, config) or is_first) and tokenizer.bos_id is not None
    return tokenizer


def _find_special_ids(tokenizer: FileTokenizer, config: Mapping[str, Any], generation: Mapping[str, Any]) -> None:
    if tokenizer.backend == "sentencepiece":  # which says -1 for "none"
        ids = (tokenizer.processor.bos_id(), tokenizer.processor.eos_id())
        tokenizer.bos_id, tokenizer.eos_id = (i if i >= 0 else None for i in ids)
        return
    found: list[int | None] = []
    for which in ("bos", "eos"):
        token = config.get(f"{which}_token")
        if isinstance(token, dict):
            token = token.get("content")
        found.append(
            tokenizer.token_to_id(token) if token is not None else _first_id(generation.get(f"{which}_token_id"))
        )
    tokenizer.bos_id, tokenizer.eos_id = found


def _first_id(value: Any) -> int | None:
    """Of a field that may be absent, a number or a list of numbers."""
    return next(iter(id_list(value)), None)


def id_list(value: Any) -> list[int]:
    """The ids of a field that may be absent, a number or a list of numbers."""
    values = value if isinstance(value, list) else [value]
    return [i for i in values if isinstance(i, int) and not isinstance(i, bool)]


def _is_bos_wanted(directory: Path, config: Mapping[str, Any]) -> bool:
    """Whether texts begin with the beginning-of-text id, by litgpt's rules; without a tokenizer_config.json they do not."""
    if not config and not (directory / "tokenizer_config.json").is_file():
        return False
    if directory.stem.startswith(("Meta-Llama-3", "Llama-3")):
        return True
    if directory.stem.startswith("SmolLM2") and directory.name.endswith("Instruct"):
        return True
    return bool(config.get("add_bos_token", config.get("tokenizer_class") == "LlamaTokenizer"))
