"""Tokenizers: characters, and what lies in a GPT-2 directory. (NanoGPT's BPE is the one of src/prepare_data.py.)

All are tokenizers of the `tokenizers` library in the end, so that texts, data sets and checkpoints are handled as elsewhere.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mdi.errors import CheckpointError, Code, UsageError
from mdi.spec.cluster import read_json
from mdi.text.texts import TextCodec
from mdi_training.vocabulary import Vocabulary, load_vocabulary

END_OF_TEXT = "<|endoftext|>"


def character_vocabulary(texts: Iterable[str]) -> Vocabulary:
    """One token for each character that occurs, by code point (the thesis counts 65 in Tiny Shakespeare)."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    characters = sorted(set().union(*texts))
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return _vocabulary(tokenizer, {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False})


def _vocabulary(tokenizer: Any, config: dict[str, Any]) -> Vocabulary:
    with tempfile.TemporaryDirectory(prefix="mdi-tokens-") as folder:
        _write(Path(folder), tokenizer, config)
        return load_vocabulary(Path(folder))


def _write(folder: Path, tokenizer: Any, config: dict[str, Any]) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


class CharCodec(TextCodec):
    """A codec that says which character a model of characters does not know."""

    def encode(self, text: str) -> list[int]:
        try:
            return super().encode(text)
        except UsageError:
            raise
        except Exception as e:  # tokenizers raises bare Exception
            known = self._processor.get_vocab()
            unknown = sorted({c for c in text if c not in known})
            raise UsageError(
                f"the prompt has {unknown[0]!r}, but the model knows only the {len(known)} characters of its text"
                if unknown
                else f"the prompt cannot be encoded: {e}",
                code=Code.VOCABULARY,
            ) from None


def gpt2_codec(directory: Path, prompt_style: str) -> TextCodec:
    """The tokenizer of a GPT-2 directory: tokenizer.json, or vocab.json and merges.txt.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    if (directory / "tokenizer.json").is_file():
        codec = TextCodec.from_checkpoint(directory, prompt_style)
    else:
        codec = _from_merges(directory, prompt_style)
    config = directory / "config.json"  # not where the model was trained here
    eos_id = read_json(config).get("eos_token_id") if config.is_file() else None
    if type(eos_id) is int and eos_id < codec.vocab_size:
        codec.eos_ids |= {eos_id}
    return codec


def _from_merges(directory: Path, prompt_style: str) -> TextCodec:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab, merges = directory / "vocab.json", directory / "merges.txt"
    if not (vocab.is_file() and merges.is_file()):
        raise CheckpointError(
            f"no tokenizer in {directory}: expected tokenizer.json, or vocab.json and merges.txt", code=Code.MISSING
        )
    try:
        tokenizer = Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    except Exception as e:  # tokenizers raises bare Exception
        raise CheckpointError(
            f"the tokenizer in {directory} cannot be used: {' '.join(str(e).split())}", code=Code.UNREADABLE
        ) from None
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    config = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": False}
    if tokenizer.token_to_id(END_OF_TEXT) is not None:
        tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
        config["eos_token"] = END_OF_TEXT
    with tempfile.TemporaryDirectory(prefix="mdi-tokens-") as folder:
        _write(Path(folder), tokenizer, config)
        return TextCodec.from_checkpoint(folder, prompt_style)
