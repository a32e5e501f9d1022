"""Writes the tokenizer in a GGUF file's metadata as Hugging Face tokenizer files.

Reads no weights. The chat template is kept as data.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from mdi.checkpoint.folder import CHAT_TEMPLATE
from mdi.errors import CheckpointError
from mdi.files import replacing
from mdi.spec.decode import shown
from mdi.text.pretokenizers import GPT2, NOT_STRIPPED, PRE_TOKENIZERS, STRIPPING, PreTokenizer

logger = logging.getLogger("mdi")

# By tokenizer.ggml.model: whether pairs of bytes are merged, as by GPT-2, or pieces of sentencepiece's vocabularies; and of the
# latter, which are merged in the order of a list.
_MERGES_BYTES = {"gpt2": True, "llama": False, "gemma4": False}
_LISTED = {"gemma4": True}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
_SPACE = "\u2581"  # what sentencepiece writes for a space
_MAX_PIECE = 256  # characters; a longer one is not a word, and splitting it would take long
# Tokens that end a turn where the template has them, which older files do not say.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<turn|>")


def write_tokenizer(fields: dict[str, Any], directory: Path, where: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json (with the chat template) and generation_config.json.

    Args:
        fields: the file's metadata; `where` is its path, for messages.

    Raises:
        CheckpointError: there is none, or one that cannot be rebuilt, or the disk refuses.
    """
    try:
        tokenizer = made_tokenizer(fields)
        settings, ends = _settings(fields), _ends(fields)
    except Exception as e:  # the tokenizers library raises bare Exception for merges that do not fit the vocabulary
        raise CheckpointError(f"{where}: its tokenizer cannot be used: {' '.join(str(e).split())[:200]}") from None
    for name, text in (
        ("tokenizer.json", tokenizer.to_str()),
        ("tokenizer_config.json", json.dumps(settings, ensure_ascii=True)),
        ("generation_config.json", json.dumps({"eos_token_id": ends})),
    ):
        with replacing(directory / name) as file:
            file.write(text.encode())


def made_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Of a file's metadata. Raises ValueError, and the library's bare Exception."""
    whole = fields.get("tokenizer.huggingface.json")
    if isinstance(whole, str):
        return Tokenizer.from_str(whole)
    merges_bytes = _merges_bytes(fields)
    tokens = fields.get("tokenizer.ggml.tokens")
    if merges_bytes is None or not isinstance(tokens, list) or not all(isinstance(t, str) for t in tokens):
        kind = fields.get("tokenizer.ggml.model")
        raise ValueError(f"its type is {shown(kind)}, only {' and '.join(map(repr, _MERGES_BYTES))} are supported")
    if len(set(tokens)) != len(tokens):
        raise ValueError("it has a token twice")
    types = [int(n) for n in fields.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))]
    if len(types) != len(tokens):
        raise ValueError(f"it has {len(tokens)} tokens, and types of {len(types)}")
    made = _byte_level(fields, tokens) if merges_bytes else _sentencepiece(fields, tokens, types)
    strips = not merges_bytes and set(tokens) >= STRIPPING

    def added(token: str, is_special: bool) -> AddedToken:
        is_stripped = strips and token not in NOT_STRIPPED
        return AddedToken(token, special=is_special, normalized=False, rstrip=is_stripped)

    made.add_special_tokens([added(t, True) for t, n in zip(tokens, types, strict=True) if n in (CONTROL, UNKNOWN)])
    own = [t for t, n in zip(tokens, types, strict=True) if n == USER_DEFINED]
    spaced = [t if merges_bytes else t.replace(_SPACE, " ") for t in own]
    made.add_tokens([added(t, False) for t, s in zip(own, spaced, strict=True) if t == s])
    return made


def _merges_bytes(fields: dict[str, Any]) -> bool | None:
    """None if it is of another type."""
    return _MERGES_BYTES.get(str(fields.get("tokenizer.ggml.model")))


def _pre_tokenizer(fields: dict[str, Any]) -> PreTokenizer | None:
    """None if its name is unknown."""
    return PRE_TOKENIZERS.get(str(fields.get("tokenizer.ggml.pre", "default")))


def _listed_merges(fields: dict[str, Any]) -> list[tuple[str, str]]:
    merges = [merge.split(" ", 1) for merge in fields.get("tokenizer.ggml.merges", ())]
    if any(len(merge) != 2 for merge in merges):
        raise ValueError("one of its merges is not of two parts")
    return [(left, right) for left, right in merges]


def _is_listed(fields: dict[str, Any]) -> bool:
    """Whether pieces are merged in the order of a list; otherwise by their scores."""
    return _LISTED.get(str(fields.get("tokenizer.ggml.model")), False)


def _byte_level(fields: dict[str, Any], tokens: list[str]) -> Tokenizer:
    """GPT-2's kind: bytes, written as letters, merged in the order of a list."""
    merges = _listed_merges(fields)
    cut = _pre_tokenizer(fields)
    if cut is None:
        name = fields["tokenizer.ggml.pre"]
        logger.warning("the tokenizer splits texts in an unknown way (%s): they are split as by GPT-2", name)
        cut = GPT2
    made = Tokenizer(BPE({t: i for i, t in enumerate(tokens)}, merges, ignore_merges=cut.keeps_words, fuse_unk=False))
    steps: list[Any] = [pre_tokenizers.Split(Regex(one), "isolated") for one in cut.patterns]
    if cut.has_single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not cut.patterns))
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.decoder = decoders.ByteLevel()
    return made


def _sentencepiece(fields: dict[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    """Pieces in which blanks are visible, and bytes for what the vocabulary lacks."""
    ids, is_listed = {token: i for i, token in enumerate(tokens)}, _is_listed(fields)
    pairs = _listed_merges(fields) if is_listed else _merges_by_score(fields, tokens, types, ids)
    unknown = next((t for t, n in zip(tokens, types, strict=True) if n == UNKNOWN), None)
    made = Tokenizer(BPE(ids, pairs, unk_token=unknown, fuse_unk=True, byte_fallback="<0x00>" in ids))
    has_prefix = not is_listed and bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    normal: list[Any] = [normalizers.Prepend(_SPACE)] if has_prefix else []
    made.normalizer = normalizers.Sequence([*normal, normalizers.Replace(" ", _SPACE)])
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return made


def _merges_by_score(
    fields: dict[str, Any], tokens: list[str], types: list[int], ids: dict[str, int]
) -> list[tuple[str, str]]:
    """Llama 1's and 2's kind: of two neighbours those are merged first that make the piece with the best score."""
    scores = [float(score) for score in fields["tokenizer.ggml.scores"]]
    if len(scores) != len(tokens):
        raise ValueError(f"it has {len(tokens)} tokens, and scores of {len(scores)}")
    usable = {t for t, n in zip(tokens, types, strict=True) if n in (NORMAL, USER_DEFINED) and len(t) <= _MAX_PIECE}
    merges = []
    for token in usable:
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in usable and right in usable:
                merges.append((-scores[ids[token]], ids[left], ids[right], left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def _wants_bos(fields: dict[str, Any]) -> bool:
    """llama.cpp's own defaults where the file does not say."""
    cut = _pre_tokenizer(fields)
    usual = _merges_bytes(fields) is False or (cut is not None and cut.begins)
    has_bos = fields.get("tokenizer.ggml.bos_token_id") is not None
    return has_bos and bool(fields.get("tokenizer.ggml.add_bos_token", usual))


def _ends(fields: dict[str, Any]) -> list[int]:
    """Every id that ends a text or a turn."""
    found = (fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    tokens, template = fields.get("tokenizer.ggml.tokens", []), fields.get("tokenizer.chat_template")
    ends = {int(number) for number in found if number is not None}
    if isinstance(template, str) and "<|return|>" not in template:  # there <|end|> ends a part of an answer only
        ends |= {tokens.index(token) for token in _TURN_ENDS if token in template and token in tokens}
    if "<|return|>" in tokens and "<|end|>" in tokens:  # which some files say, too
        ends.discard(tokens.index("<|end|>"))
    return sorted(ends)


def _settings(fields: dict[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": _wants_bos(fields)}
    settings["add_eos_token"] = bool(fields.get("tokenizer.ggml.add_eos_token"))
    tokens = fields.get("tokenizer.ggml.tokens", [])
    for name in ("bos", "eos"):
        if (number := fields.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            settings[f"{name}_token"] = tokens[int(number)]
    if isinstance(template := fields.get("tokenizer.chat_template"), str):
        settings["chat_template"] = template
        if isinstance(for_tools := fields.get("tokenizer.chat_template.tool_use"), str):
            named = {"default": template, "tool_use": for_tools}
            settings["chat_template"] = [{"name": name, "template": source} for name, source in named.items()]
    return settings


_BYTE, _UNUSED = 6, 5
_NO_MERGE = -1e9  # the score of a piece that no merge makes
# What kinds of pre-tokenizers cut in different ways.
_PROBE = (
    "The cat's 1234567 l\u00e9gumes,DON'T  stop!!\r\n\n\t x=[3.14];  \u4e2d\u6587\u5b57 \u0410\u0411\n"
    "camelCase HTTPServer\n  end of it, and some more words that make this line long enough to stay cut in two. "
)


def tokenizer_fields(directory: Path, n_tokens: int, made: Path | None = None) -> dict[str, Any]:
    """The fields of a GGUF file for the tokenizer of a folder: the reverse of `write_tokenizer`.

    Args:
        n_tokens: rows of the embedding; what the tokenizer lacks of them is filled up.
        made: the folder's tokenizer.json, if it lies elsewhere.

    Raises:
        CheckpointError: there is no tokenizer.json, or one that GGUF files have no fields for.
    """
    path = made or directory / "tokenizer.json"
    try:
        whole, settings = json.loads(path.read_bytes()), _read_json(directory / "tokenizer_config.json")
        ends = _read_json(directory / "generation_config.json").get("eos_token_id")
        original = Tokenizer.from_file(str(path))
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory} has no tokenizer.json, from which the fields of a GGUF file are made"
        ) from None
    except Exception as e:  # the tokenizers library raises bare Exception
        raise CheckpointError(f"{path} cannot be used: {' '.join(str(e).split())[:200]}") from None
    model, added = whole.get("model", {}), whole.get("added_tokens", [])
    vocabulary = {**model.get("vocab", {}), **{entry["content"]: entry["id"] for entry in added}}
    if model.get("type") != "BPE" or max(vocabulary.values(), default=0) >= n_tokens:
        raise CheckpointError(
            f"{path}: only tokenizers of the type BPE, with ids below {n_tokens}, can be in a GGUF file"
        )
    tokens = [f"[PAD{i}]" for i in range(n_tokens)]
    types = [_UNUSED] * n_tokens
    kinds = {entry["content"]: CONTROL if entry["special"] else USER_DEFINED for entry in added}
    merges_bytes = not model.get("byte_fallback")
    for token, number in vocabulary.items():
        is_byte = not merges_bytes and len(token) == 6 and token.startswith("<0x")
        is_unknown = not merges_bytes and token == model.get("unk_token")
        tokens[number] = token
        types[number] = UNKNOWN if is_unknown else kinds.get(token, _BYTE if is_byte else NORMAL)
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges", [])]
    fields: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    if merges_bytes:
        fields |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": [" ".join(merge) for merge in merges]}
        fields["tokenizer.ggml.pre"] = _name_of(original, fields, path)
    else:
        ranks: dict[str, int] = {}
        for rank, (left, right) in enumerate(merges):
            ranks.setdefault(left + right, rank)
        scores = [-float(ranks[token]) if token in ranks else _NO_MERGE for token in tokens]
        has_prefix = "Prepend" in json.dumps(whole.get("normalizer"))
        fields |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores}
        fields["tokenizer.ggml.add_space_prefix"] = has_prefix
    again = made_tokenizer(fields)
    if again.encode(_PROBE, add_special_tokens=False).ids != original.encode(_PROBE, add_special_tokens=False).ids:
        raise CheckpointError(f"{path}: a GGUF file would split texts in another way")
    numbers = [ends] if isinstance(ends, int) else list(ends or [])
    named = {name: settings.get(f"{name}_token") for name in ("bos", "eos", "unk")}
    named["unk"] = model.get("unk_token") or named["unk"]
    found = {name: vocabulary.get(t["content"] if isinstance(t, dict) else t) for name, t in named.items() if t}
    if found.get("eos") is not None:
        numbers = [found["eos"], *(number for number in numbers if number != found["eos"])]
    for name, number in zip(("eos", "eot", "eom"), numbers, strict=False):
        fields[f"tokenizer.ggml.{name}_token_id"] = number
    for name, field in (("bos", "bos"), ("unk", "unknown")):
        if found.get(name) is not None:
            fields[f"tokenizer.ggml.{field}_token_id"] = found[name]
    bos, adds_bos = found.get("bos"), settings.get("add_bos_token")
    if adds_bos is None:
        adds_bos = original.encode("a").ids[:1] == [bos]
    fields["tokenizer.ggml.add_bos_token"] = bos is not None and bool(adds_bos)  # others add one where nothing is said
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = next((one["template"] for one in template if one.get("name") == "default"), None)
    if (directory / CHAT_TEMPLATE).is_file():
        template = (directory / CHAT_TEMPLATE).read_text(encoding="utf-8")
    return {**fields, **({"tokenizer.chat_template": template} if template else {})}


def _name_of(original: Tokenizer, fields: dict[str, Any], path: Path) -> str:
    """The name of the kind that cuts texts as a tokenizer does. Raises CheckpointError: none does."""
    wanted = original.pre_tokenizer.pre_tokenize_str(_PROBE) if original.pre_tokenizer else None
    for kind in dict.fromkeys(PRE_TOKENIZERS.values()):
        made = _byte_level({**fields, "tokenizer.ggml.pre": kind.names[0]}, fields["tokenizer.ggml.tokens"])
        if wanted is not None and made.pre_tokenizer.pre_tokenize_str(_PROBE) == wanted:
            return kind.names[0]
    raise CheckpointError(f"{path}: it cuts texts in a way for which GGUF files have no name here")


def _read_json(path: Path) -> dict[str, Any]:
    """Nothing, if there is no such file."""
    found = json.loads(path.read_bytes()) if path.is_file() else {}
    return found if isinstance(found, dict) else {}
