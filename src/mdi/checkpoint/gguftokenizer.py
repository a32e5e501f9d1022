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

from mdi.checkpoint.gguf import shown_field
from mdi.errors import CheckpointError
from mdi.files import replacing

logger = logging.getLogger("mdi")

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "\u2581"  # what sentencepiece writes for a space
_MAX_PIECE = 256  # characters; a longer one is not a word, and splitting it would take long
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_EAST_ASIAN = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_LETTERS_WITH_CASE = (  # those of some Unicode version
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-"
    "\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-"
    "\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-"
    "\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-"
    "\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-"
    "\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-"
    "\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
# How texts are cut before pairs are merged, by tokenizer.ggml.pre: each expression cuts the pieces of those before. Names that
# are not here are cut as by GPT-2.
_CUTS: dict[str, tuple[str, ...]] = {
    "llama-bpe": (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_SPACES}",
    ),
    "qwen2": (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_SPACES}",),
    "qwen35": (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_SPACES}",
    ),
    "tekken": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACES}",
    ),
    "gpt-4o": (  # of o200k
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{_CONTRACTIONS}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{_CONTRACTIONS}?"
        rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACES}",
    ),
    "bloom": (r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+",),
    "deepseek-llm": (
        r"[\r\n]", rf"\s?[{_LETTERS_WITH_CASE}]+", r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", r"\s+$",
        _EAST_ASIAN, r"\p{N}",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}"),
}  # fmt: skip
# Names of the same.
_SAME = {
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), "llama-bpe"),
    **dict.fromkeys(("deepseek-r1-qwen", "kormo", "megrez", "stablelm2"), "qwen2"),
    **dict.fromkeys(("llama4", "minimax-m2"), "gpt-4o"),
    **dict.fromkeys(("dbrx", "smaug-bpe"), "chatglm-bpe"),
    "glm5": "glm4",
    **dict.fromkeys(("default", "phi-2", "olmo", "mpt", "jina-en", "trillion", "exaone4", "a.x-4.0"), "gpt-2"),
    **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell", "minerva-7b"), "smollm"),
}
_CUTS["glm4"] = _CUTS["chatglm-bpe"] = _CUTS["llama-bpe"]
_WHOLE_WORDS_FIRST = ("llama-bpe", "tekken", "glm4")
_BEGIN_WITH_BOS = ("llama-bpe", "tekken")
# Tokens that end a turn where the template has them, which older files do not say.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>")


def write_tokenizer(fields: dict[str, Any], directory: Path, where: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json (with the chat template) and generation_config.json.

    Args:
        fields: the file's metadata; `where` is its path, for messages.

    Raises:
        CheckpointError: there is none, or one that cannot be rebuilt, or the disk refuses.
    """
    try:
        tokenizer = _tokenizer(fields)
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


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    whole = fields.get("tokenizer.huggingface.json")
    if isinstance(whole, str):
        return Tokenizer.from_str(whole)
    kind = fields.get("tokenizer.ggml.model")
    tokens = fields.get("tokenizer.ggml.tokens")
    if kind not in ("gpt2", "llama") or not isinstance(tokens, list) or not all(isinstance(t, str) for t in tokens):
        raise ValueError(f"its type is {shown_field(kind)}, only 'gpt2' and 'llama' are supported")
    if len(set(tokens)) != len(tokens):
        raise ValueError("it has a token twice")
    types = [int(n) for n in fields.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))]
    if len(types) != len(tokens):
        raise ValueError(f"it has {len(tokens)} tokens, and types of {len(types)}")
    made = _byte_level(fields, tokens) if kind == "gpt2" else _sentencepiece(fields, tokens, types)
    # What follows these tokens of Phi 3 loses its blanks; the file does not say it.
    strips = kind == "llama" and fields.get("general.architecture") == "phi3"

    def added(token: str, is_special: bool) -> AddedToken:
        is_stripped = strips and token not in ("<unk>", "<s>", "<|endoftext|>")
        return AddedToken(token, special=is_special, normalized=False, rstrip=is_stripped)

    made.add_special_tokens([added(t, True) for t, n in zip(tokens, types, strict=True) if n in (_CONTROL, _UNKNOWN)])
    own = [t for t, n in zip(tokens, types, strict=True) if n == _USER_DEFINED]
    spaced = [t.replace(_SPACE, " ") if kind == "llama" else t for t in own]
    made.add_tokens([added(t, False) for t, s in zip(own, spaced, strict=True) if t == s])
    return made


def _cut(fields: dict[str, Any]) -> str:
    name = str(fields.get("tokenizer.ggml.pre", "default"))
    return _SAME.get(name, name)


def _byte_level(fields: dict[str, Any], tokens: list[str]) -> Tokenizer:
    """GPT-2's kind: bytes, written as letters, merged in the order of a list."""
    merges = [tuple(merge.split(" ", 1)) for merge in fields.get("tokenizer.ggml.merges", ())]
    if any(len(merge) != 2 for merge in merges):
        raise ValueError("one of its merges is not of two parts")
    cut = _cut(fields)
    made = Tokenizer(
        BPE({t: i for i, t in enumerate(tokens)}, merges, ignore_merges=cut in _WHOLE_WORDS_FIRST, fuse_unk=False)
    )
    steps: list[Any] = []
    if cut in _CUTS:
        steps += [pre_tokenizers.Split(Regex(one), "isolated") for one in _CUTS[cut]]
    elif cut == "smollm":
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    elif cut != "gpt-2":
        logger.warning("the tokenizer splits texts in an unknown way (%s): they are split as by GPT-2", cut)
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut not in _CUTS))
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.decoder = decoders.ByteLevel()
    return made


def _sentencepiece(fields: dict[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    """Llama 1's and 2's kind: of two neighbours those are merged first that make the piece with the best score."""
    scores = [float(score) for score in fields["tokenizer.ggml.scores"]]
    if len(scores) != len(tokens):
        raise ValueError(f"it has {len(tokens)} tokens, and scores of {len(scores)}")
    ids = {token: i for i, token in enumerate(tokens)}
    usable = {t for t, n in zip(tokens, types, strict=True) if n in (_NORMAL, _USER_DEFINED) and len(t) <= _MAX_PIECE}
    merges = []
    for token in usable:
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in usable and right in usable:
                merges.append((-scores[ids[token]], ids[left], ids[right], left, right))
    merges.sort()
    unknown = next((t for t, n in zip(tokens, types, strict=True) if n == _UNKNOWN), None)
    pairs = [(left, right) for *_, left, right in merges]
    made = Tokenizer(BPE(ids, pairs, unk_token=unknown, fuse_unk=True, byte_fallback="<0x00>" in ids))
    has_prefix = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    normal: list[Any] = [normalizers.Prepend(_SPACE)] if has_prefix else []
    made.normalizer = normalizers.Sequence([*normal, normalizers.Replace(" ", _SPACE)])
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return made


def _wants_bos(fields: dict[str, Any]) -> bool:
    """llama.cpp's own defaults where the file does not say."""
    usual = fields.get("tokenizer.ggml.model") == "llama" or _cut(fields) in _BEGIN_WITH_BOS
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
