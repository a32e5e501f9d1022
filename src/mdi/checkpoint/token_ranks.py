"""Makes a tokenizer.json of `tiktoken.model`, the only tokenizer that Kimi's models come with: ranks of byte strings.

The classes and splitting patterns of such tokenizers are Python beside the file, which is never executed: the one pattern that
is published with this class is known here.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from pathlib import Path
from typing import Any

from mdi.checkpoint.folder import MADE_TOKENIZERS, RANKS
from mdi.checkpoint.gguftokenizer import CONTROL, NORMAL, USER_DEFINED, made_tokenizer
from mdi.errors import CheckpointError
from mdi.files import default_cache_dir, replacing
from mdi.spec.settings_file import parse_json
from mdi.text.pretokenizers import LETTERS
from mdi.units import size

_CLASS = "TikTokenTokenizer"
_CUT = "kimi-k2"  # see mdi.text.pretokenizers
_N_SPECIAL = 256  # behind the ranks
_N_BYTES = 256
_LONGEST = 4096  # bytes of a token; one of blanks has 256 or so
_MOST_BYTES = 16_000_000  # of a file; Kimi's has less than 3 MB
# Of all tokens, the squares of their lengths: so long `_halves` takes, at most half a minute. Real ones have 5 to 20 million.
_MOST_SQUARES = 50_000_000
_VERSION = 2  # of what is made

Ranks = dict[bytes, int]


def made_of_ranks(directory: Path) -> Path:
    """The tokenizer.json that is made of a folder's ranks, in the cache folder: what others wrote is left as it is.

    Raises:
        CheckpointError: the ranks are damaged, or of another kind, or the disk refuses.
    """
    path = directory / RANKS
    try:
        stored, settings = _content(path), _content(directory / "tokenizer_config.json")
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} needs the tokenizer_config.json beside it, which names its special tokens"
        ) from None
    except OSError as e:
        raise CheckpointError(f"cannot read {e.filename}: {e.strerror}") from None
    key = hashlib.sha256(b"".join(hashlib.sha256(one).digest() for one in (stored, settings))).hexdigest()
    made = default_cache_dir() / MADE_TOKENIZERS / f"{key[:32]}-{_VERSION}" / "tokenizer.json"
    if not made.is_file():
        try:
            text = made_tokenizer(_fields(_ranks(stored), parse_json(settings.decode()))).to_str()
        except Exception as e:  # the tokenizers library raises bare Exception
            raise CheckpointError(f"{path} cannot be used: {' '.join(str(e).split())[:200]}") from None
        with replacing(made, makes_folder=True) as file:
            file.write(text.encode())
    return made


def _content(path: Path) -> bytes:
    """Raises CheckpointError, OSError."""
    if (n_bytes := path.stat().st_size) > _MOST_BYTES:
        raise CheckpointError(f"{path} cannot be used: it has {size(n_bytes)}, and may have {size(_MOST_BYTES)}")
    return path.read_bytes()


def _ranks(stored: bytes) -> Ranks:
    """Of lines of a byte string in base64 and its rank, which is its id. Raises ValueError."""
    found: Ranks = {}
    for number, line in enumerate(stored.splitlines()):
        if not line:  # as tiktoken
            continue
        token, _, rank = line.partition(b" ")
        try:
            found[base64.b64decode(token, validate=True)] = int(rank)
        except (binascii.Error, ValueError):
            raise ValueError(f"line {number + 1} is not a byte string in base64 and its rank") from None
    if max(map(len, found), default=0) > _LONGEST:
        raise ValueError(f"it has a token of more than {_LONGEST} bytes")
    if sum(len(token) ** 2 for token in found) > _MOST_SQUARES:
        raise ValueError("its tokens are too long")
    if sorted(found.values()) != list(range(len(found))):
        raise ValueError("its ranks are not 0, 1, 2 and so on, each once")
    if not all(bytes([byte]) in found for byte in range(_N_BYTES)):
        raise ValueError("it lacks single bytes")
    return found


def _fields(ranks: Ranks, settings: Any) -> dict[str, Any]:
    """Those that a GGUF file has for the same tokenizer. Raises ValueError and others for settings that are not as expected."""
    if settings.get("tokenizer_class") != _CLASS:
        raise ValueError(
            f"tokenizer_config.json does not name the class {_CLASS}, so that its splitting pattern is not known"
        )
    n, named = len(ranks), {int(i): one for i, one in (settings.get("added_tokens_decoder") or {}).items()}
    if not all(n <= i < n + _N_SPECIAL for i in named):
        raise ValueError(f"ids of its special tokens are not {n} to {n + _N_SPECIAL - 1}, those behind the ranks")
    special = [named.get(i, {"content": f"<|reserved_token_{i}|>"}) for i in range(n, n + _N_SPECIAL)]
    words = {token: "".join(LETTERS[byte] for byte in token) for token in sorted(ranks, key=ranks.__getitem__)}
    kinds = [CONTROL if one.get("special", True) else USER_DEFINED for one in special]
    pairs = (halves for token in words if len(token) > 1 and (halves := _halves(token, ranks)) is not None)
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": _CUT,
        "tokenizer.ggml.tokens": [*words.values(), *(one["content"] for one in special)],
        "tokenizer.ggml.token_type": [NORMAL] * n + kinds,
        "tokenizer.ggml.merges": [f"{words[left]} {words[right]}" for left, right in pairs],
    }  # fmt: skip


def _halves(token: bytes, ranks: Ranks) -> tuple[bytes, bytes] | None:
    """The two tokens that are joined last where this one is made of its bytes; None if they cannot be joined to it.

    Of neighbours those are joined that make the token of the lowest rank. What happens within a token does not depend on
    what is around it, so these two are the only neighbours that ever become this token.
    """
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        rank, at = min((ranks.get(parts[i] + parts[i + 1], len(ranks)), i) for i in range(len(parts) - 1))
        if rank == len(ranks):
            return None
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]
