"""The tokenizer of a data set: trained here (byte-level BPE), or taken from a model.

Gives ids for text and the files that a checkpoint needs beside its weights. Prompts and decoding while generating are
not its business.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from mdi.errors import Code, UsageError
from mdi.spec.settings_file import parse_json
from mdi_training.storage import missing

EOS_TOKEN = "<|endoftext|>"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json")
# 256 bytes, so that any text can be encoded, and the end-of-text token.
MIN_VOCAB_SIZE = 257


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer, and the files to put beside the weights so that litgpt's Tokenizer reads the same.

    Attributes:
        size: one more than the largest id.
        eos_id: id of the end-of-text token; None if the tokenizer names none.
    """

    size: int
    eos_id: int | None
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    _files: dict[str, bytes] = field(repr=False)

    def files(self) -> dict[str, bytes]:
        return dict(self._files)


def train_vocabulary(texts: Iterable[str], vocab_size: int) -> Vocabulary:
    """Byte-level BPE without normalization: any text encodes, and decodes to exactly itself.

    The vocabulary comes out smaller than asked for if the text has too few pairs to merge.

    Raises:
        UsageError: `vocab_size` does not leave room for the 256 bytes and the end-of-text token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < MIN_VOCAB_SIZE:
        raise UsageError(
            f"--vocab-size {vocab_size} is too small, expected at least {MIN_VOCAB_SIZE} (all bytes and one)",
            code=Code.VALUE,
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # litgpt reads "tokenizer_class" without checking that it exists.
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS_TOKEN,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    files = {
        "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
        "tokenizer_config.json": json.dumps(config, indent=2).encode() + b"\n",
    }
    return _from_json(files)


def load_vocabulary(path: Path) -> Vocabulary:
    """The tokenizer of a folder (tokenizer.json, else tokenizer.model) or of such a file.

    Raises:
        UsageError: it does not exist, or cannot be read as a tokenizer.
    """
    if not path.exists():
        raise UsageError(missing(path, "the tokenizer"), code=Code.MISSING)
    folder = path if path.is_dir() else path.parent
    names = ("tokenizer.json", "tokenizer.model") if path.is_dir() else (path.name,)
    name = next((name for name in names if (folder / name).is_file()), None)
    if name is None:
        raise UsageError(f"{path} holds no tokenizer, expected {' or '.join(names)}", code=Code.MISSING)
    files = {n: (folder / n).read_bytes() for n in TOKENIZER_FILES[2:] if (folder / n).is_file()}
    content = (folder / name).read_bytes()
    try:
        if name.endswith(".model"):
            return _from_sentencepiece({"tokenizer.model": content, **files})
        return _from_json({"tokenizer.json": content, **files})
    except Exception as err:  # tokenizers raises bare Exception, sentencepiece RuntimeError
        raise UsageError(f"{folder / name} cannot be read as a tokenizer: {err}", code=Code.UNREADABLE) from err


def vocabulary_of(files: dict[str, bytes]) -> Vocabulary:
    """The vocabulary whose `files` these are."""
    return _from_json(files) if "tokenizer.json" in files else _from_sentencepiece(files)


def _from_json(files: dict[str, bytes]) -> Vocabulary:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    eos = parse_json(files.get("tokenizer_config.json", b"{}")).get("eos_token")
    if isinstance(eos, dict):
        eos = eos.get("content")
    return Vocabulary(
        size=max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
        eos_id=None if eos is None else tokenizer.token_to_id(eos),
        encode=lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        _files=files,
    )


def _from_sentencepiece(files: dict[str, bytes]) -> Vocabulary:
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_proto=files["tokenizer.model"])
    return Vocabulary(
        size=processor.vocab_size(),
        eos_id=processor.eos_id() if processor.eos_id() >= 0 else None,
        encode=processor.encode,
        decode=processor.decode,
        _files=files,
    )
