"""How texts are cut before pairs of bytes are merged: kinds of pre-tokenizers, by the names that GGUF files have for them.

Imports nothing of the project.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PreTokenizer:
    """One kind, and what its tokenizers do besides.

    Attributes:
        names: in tokenizer.ggml.pre.
        patterns: each cuts the pieces of those before; none: as GPT-2 cuts.
        has_single_digits: each digit is cut off before.
        keeps_words: a word that is a token stays whole, though no merges lead to it.
        begins: texts begin with the token for it, where the file does not say.
    """

    names: tuple[str, ...]
    patterns: tuple[str, ...] = ()
    has_single_digits: bool = False
    keeps_words: bool = False
    begins: bool = False


# GPT-2's letters for bytes: those that can be printed are their own.
_PRINTED = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
BYTES = {chr(byte): byte for byte in _PRINTED}
BYTES |= {chr(0x100 + n): byte for n, byte in enumerate(byte for byte in range(0x100) if byte not in _PRINTED)}
LETTERS = {byte: letter for letter, byte in BYTES.items()}

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_CL100K = (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_SPACES}",)
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACES}",
)
_QWEN2 = (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_SPACES}",)
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_SPACES}",
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACES}",
)
_BLOOM = (r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+",)
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
_DEEPSEEK_LLM = (
    r"[\r\n]", rf"\s?[{_LETTERS_WITH_CASE}]+", r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", r"\s+$",
    _EAST_ASIAN, r"\p{N}",
)  # fmt: skip
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}", r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    rf"{_SPACES}",
)  # fmt: skip
_UPPER, _LOWER = (rf"[{one}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for one in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
_KIMI_K2 = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_SPACES}",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")

GPT2 = PreTokenizer(("gpt-2", "default", "phi-2", "olmo", "mpt", "jina-en", "trillion", "exaone4", "a.x-4.0"))
_KINDS = (
    GPT2,
    PreTokenizer(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b"), has_single_digits=True
    ),
    PreTokenizer(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _CL100K,
        keeps_words=True, begins=True,
    ),
    PreTokenizer(("glm4", "glm5"), _CL100K, keeps_words=True),
    PreTokenizer(("chatglm-bpe", "dbrx", "smaug-bpe"), _CL100K),
    PreTokenizer(("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2"), _QWEN2),
    PreTokenizer(("qwen35",), _QWEN35),
    PreTokenizer(("tekken",), _TEKKEN, keeps_words=True, begins=True),
    PreTokenizer(("gpt-4o", "llama4", "minimax-m2"), _O200K),
    PreTokenizer(("bloom",), _BLOOM),
    PreTokenizer(("deepseek-llm",), _DEEPSEEK_LLM),
    PreTokenizer(("deepseek-coder",), _DEEPSEEK_CODER),
    PreTokenizer(("deepseek-v3",), _DEEPSEEK_V3),
    PreTokenizer(("kimi-k2",), _KIMI_K2, keeps_words=True),
)  # fmt: skip
PRE_TOKENIZERS = {name: kind for kind in _KINDS for name in kind.names}

# Of sentencepiece's kind: tokenizers with all of these marks take the blanks behind special tokens away, but not behind the
# three others. No field of the files says it.
STRIPPING = {"<|user|>", "<|assistant|>", "<|end|>"}
NOT_STRIPPED = {"<unk>", "<s>", "<|endoftext|>"}
