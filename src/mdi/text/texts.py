"""Converts between words and token ids: the tokenizer of a checkpoint, prompt styles, and text that grows token by token.

It knows nothing of models, sockets or who generates the ids. It needs neither litgpt nor torch.
Of a checkpoint only data is read: no class path that it names is imported, and a process with limits renders its chat template.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdi.checkpoint.folder import CONFIG_FILE, GGUF_NOTE, model_name
from mdi.errors import CheckpointError, Code, UsageError
from mdi.spec.limits import LIMITS
from mdi.spec.prompts import refuse_surrogates
from mdi.spec.settings_file import parse_json, read_yaml
from mdi.text.answers.forms import ENDS, SPOKEN, Form, form_of, special_marks
from mdi.text.drawing import OWN, drawing_of
from mdi.text.pretokenizers import BYTES
from mdi.text.quoted import Quotes
from mdi.text.styles import DEFAULT, PromptStyle, known_styles, style_of_model
from mdi.text.tokenizer import id_list, read_tokenizer

if TYPE_CHECKING:
    from mdi.text.templates import TemplateStyle

# Names that litgpt's table counts as chat models although base models have them, too.
_BASE_MODEL = re.compile(
    r"Qwen2\.5-(?!.*Instruct)|Qwen3-.*-Base$|OLMo-.*(?<!Instruct)-hf$|CodeLlama-\d+b-(Python-)?hf$"
)
_UNDECIDED = "\ufffd"  # what bytes that are no complete character (yet) decode to

_log = logging.getLogger(__name__)


class TextCodec:
    """The tokenizer and the prompt style of a checkpoint. Close it if it has encoded prompts.

    Attributes:
        vocab_size: one more than the tokenizer's largest id (the model's own vocabulary may be padded beyond).
        eos_ids: every id that ends a text, by the tokenizer or by generation_config.json.
        stop_sequences: runs of ids that end an answer in the prompt style, other than `eos_ids`.
        special_ids: special tokens by their names, with which a text of the same letters is none.
        quotes: keep special tokens out of what is said in a chat.
        special_marks: special tokens that are marks of answers (mdi.text.answers.forms), by their ids.
        prompt_style: how prompts are written, by a style that is known or by the model's own template; None for the raw text.
        drawing: how tokens are drawn where nobody says it, see `mdi.text.drawing`.
        suppressed: ids that the model is not to write, by generation_config.json.
    """

    def __init__(
        self, tokenizer: Any, eos_ids: Iterable[int] = (), prompt_style: PromptStyle | TemplateStyle | None = None,
        drawing: Mapping[str, float] = OWN, suppressed: Iterable[int] = (),
    ) -> None:  # fmt: skip
        """Use `from_checkpoint`; this takes what `read_tokenizer` gives."""
        self._tokenizer = tokenizer
        self._processor = tokenizer.processor
        self.vocab_size, self._silent_ids, self.byte_ids = _special_ids(tokenizer)
        own = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
        self.special_marks = _special_marks(tokenizer)
        self.special_ids = _special_ids_by_name(tokenizer)
        self.quotes = Quotes(self.special_ids)
        ends = (i for i, mark in self.special_marks.items() if mark in ENDS)
        self.eos_ids = frozenset(own) | frozenset(eos_ids) | frozenset(ends)
        self.prompt_style = prompt_style
        self.drawing = drawing
        self.suppressed = tuple(sorted({i for i in suppressed if i >= 0}))
        self.stop_sequences = _stop_sequences(prompt_style, tokenizer, self.eos_ids)
        self._anchor = self._find_anchor()
        self._anchor_chars = len(self._text(self._anchor))

    @classmethod
    def from_checkpoint(
        cls, ckpt_dir: str | Path, prompt_style: str = "auto", config_name: str | None = None
    ) -> TextCodec:
        """Read the tokenizer of a LitGPT checkpoint.

        Args:
            prompt_style: see `resolve_prompt_style`.
            config_name: name of the model; None takes the one in model_config.yaml, else that of the directory.

        Raises:
            CheckpointError: there is no tokenizer, or it or a file beside it is damaged.
            UsageError: the prompt style is not known.
        """
        ckpt_dir = Path(ckpt_dir)
        generation = _read_object(ckpt_dir / "generation_config.json")
        eos_ids = id_list(generation.get("eos_token_id"))
        tokenizer = read_tokenizer(ckpt_dir, _read_object(ckpt_dir / "tokenizer_config.json"), generation)
        name = config_name if config_name is not None else _config_name(ckpt_dir)
        style, suppressed = (
            resolve_prompt_style(prompt_style, ckpt_dir, name),
            id_list(generation.get("suppress_tokens")),
        )
        return cls(tokenizer, eos_ids, style, drawing_of(generation), suppressed)

    @property
    def form(self) -> Form:
        """Of answers to prompts in the prompt style."""
        source = getattr(self.prompt_style, "source", "")  # of the model's own template
        return form_of(source, self.special_marks.values())

    @property
    def tokens(self) -> list[str]:
        """All tokens of the tokenizer, in the order of their ids."""
        if self._tokenizer.backend == "huggingface":
            known: dict[str, int] = self._processor.get_vocab(with_added_tokens=True)
            return sorted(known, key=lambda token: known[token])
        return [self._processor.id_to_piece(i) for i in range(self._processor.vocab_size())]

    def facts(self) -> dict[str, Any]:
        """Plain JSON with which, and the tokenizer's file, another process reads and writes texts as this codec does."""
        tokenizer = self._tokenizer
        found = {"backend": tokenizer.backend, "bos_id": tokenizer.bos_id, "eos_id": tokenizer.eos_id}
        found |= {"use_bos": tokenizer.use_bos, "adds_eos": tokenizer.adds_eos}
        return {**found, "eos_ids": sorted(self.eos_ids), "drawing": dict(self.drawing)}

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, behind the beginning-of-text id if the model needs one; for "" only that id, or none.

        Raises:
            UsageError: `text` holds surrogates, i.e. it came from bytes that were not UTF-8.
        """
        refuse_surrogates(text, "a prompt")
        ids: list[int] = self._tokenizer.encode(text).tolist()
        return ids

    @property
    def first_id(self) -> int | None:
        """The id that a text begins with; None if the tokenizer adds none."""
        return self._tokenizer.bos_id if self._tokenizer.use_bos else None

    def pieces(self, text: str) -> list[tuple[int, str]]:
        """The tokens of a text, without any that are added: each id with its part of the text; joined, these are the text.

        Of several tokens that make one character together, the last one has it.

        Raises:
            UsageError: as `encode`.
        """
        refuse_surrogates(text, "a text")
        found = self._tokenizer.pieces(text)
        begins = [0, *(begin for _, begin in found[1:]), len(text)]
        return [(i, text[a:b]) for (i, _), a, b in zip(found, begins, begins[1:], strict=False)]

    def encode_prompt(self, user_text: str | list[dict[str, str]]) -> list[int]:
        """Ids of `user_text` in the prompt style; a list of messages only for styles that know conversations.

        Raises:
            UsageError, CheckpointError: it is no text, or the model's own template refuses it.
        """
        if self.prompt_style is None:
            return self.encode(str(user_text))
        text = self.prompt_style.apply(user_text)
        if self.prompt_style.is_complete:
            refuse_surrogates(text, "a prompt")
            return list(self._tokenizer.encode_rendered(text))
        ids = self.encode(text)
        # Styles that write the beginning of the text themselves meet tokenizers that put it there as well.
        bos_id = self._tokenizer.bos_id
        return ids[1:] if bos_id is not None and ids[:2] == [bos_id, bos_id] else ids

    def encode_chat(self, history: Sequence[tuple[str, str]], question: str, system: str = "") -> list[int]:
        """Ids of a conversation that waits for the answer to `question`.

        Styles that know whole conversations get one; with the others the turns follow each other, each answer
        closed by the token that the model itself ends it with. Without a style all of it is one text, as it was typed:
        a turn begins on a new line, and nothing follows the question, because the model continues it.

        Args:
            history: (question, answer) of the turns before.
            system: what the model is told before all of them; "" is nothing.

        Raises:
            UsageError: there is such a message, and the style has no place for it.
        """
        style = self.prompt_style
        if system and not (style is not None and style.knows_conversations):
            raise UsageError("this model's prompts have no system message: say it in a question", code=Code.VALUE)
        if style is None:
            return self.encode("".join(f"{asked}{answer}\n" for asked, answer in history) + question)
        if (history or system) and style.knows_conversations:
            messages = [{"role": "system", "content": system}] if system else []
            for asked, answer in history:
                messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
            return self.encode_prompt([*messages, {"role": "user", "content": question}])
        closing = self.stop_sequences[0] if self.stop_sequences else sorted(self.eos_ids)[:1]
        ids: list[int] = []
        for asked, answer in history:
            ids += self.encode_prompt(asked) + self._without_bos(self.encode(answer)) + closing
        last = self.encode_prompt(question)
        return ids + (self._without_bos(last) if ids else last)

    def close(self) -> None:
        """End the process that renders the model's own template, if there is one; harmless if repeated."""
        if self.prompt_style is not None:
            self.prompt_style.close()

    def _without_bos(self, ids: list[int]) -> list[int]:
        return ids[1:] if ids and ids[0] == self._tokenizer.bos_id else ids

    def decode(self, ids: Sequence[int], continues: bool = False) -> str:
        """Text of `ids`; special tokens, and ids that the tokenizer does not have, are nothing.

        Args:
            continues: the text follows other text: Llama's tokenizers then keep a space before the first word,
                which they drop at the beginning.
        """
        return self.decode_visible(self.visible(ids), continues)

    def visible(self, ids: Iterable[int]) -> list[int]:
        """`ids` without those that are no text."""
        return [i for i in ids if 0 <= i < self.vocab_size and i not in self._silent_ids]

    def decode_visible(self, ids: list[int], continues: bool = False) -> str:
        """`decode` of ids that `visible` gave."""
        if not continues:
            return self._text(ids)
        return self._text(self._anchor + ids)[self._anchor_chars :]

    def token_bytes(self, i: int) -> bytes:
        """What a token adds to a text, which may be a part of a character."""
        text = self.decode([i], continues=True)
        if _UNDECIDED not in text:
            return text.encode()
        is_huggingface = self._tokenizer.backend == "huggingface"
        token = str(self._processor.id_to_token(i) if is_huggingface else self._processor.id_to_piece(i))
        if i in self.byte_ids:
            return bytes([int(token[3:5], 16)])
        return bytes(BYTES[c] for c in token) if all(c in BYTES for c in token) else text.encode()

    def _text(self, ids: list[int]) -> str:
        if self._tokenizer.backend == "huggingface":  # which would leave out marks of calls where they are special
            return str(self._processor.decode(ids, skip_special_tokens=False))
        return str(self._processor.decode(ids))

    def _find_anchor(self) -> list[int]:
        """A token that means "there is text before this": it decodes to itself, alone and before others."""
        for i in itertools.chain((self._piece_id("a"),), range(self.vocab_size)):
            if i is not None and i not in self._silent_ids and i not in self.byte_ids:
                text = self._processor.decode([i])
                if text and text.isascii() and text.isalnum() and self._processor.decode([i, i]).startswith(text):
                    return [i]
        return []

    def _piece_id(self, piece: str) -> int | None:
        if self._tokenizer.backend == "huggingface":
            found: int | None = self._processor.token_to_id(piece)
            return found
        return int(self._processor.piece_to_id(piece))


def resolve_prompt_style(name: str, ckpt_dir: str | Path, config_name: str) -> PromptStyle | TemplateStyle | None:
    """The prompt style to use; None for the raw text.

    Args:
        name: "none"; "auto": the checkpoint's own, i.e. that of prompt_style.yaml, else its chat template, else the style
            that is known for a chat model of this name (in LitGPT's form that one comes before the template), else none; or
            one of styles.json.

    Raises:
        UsageError: the style of the command line or prompt_style.yaml is unknown.
        CheckpointError: prompt_style.yaml is damaged.
    """
    if name == "none":
        return None
    if name != "auto":
        style = known_styles().get(name.lower())
        if style is None:
            raise UsageError(
                f"unknown prompt style {name!r}: expected auto, none, or one of {_style_names()}", code=Code.STYLE
            )
        return style
    folder = Path(ckpt_dir)
    is_gguf = (folder / GGUF_NOTE).is_file()
    path = folder / "prompt_style.yaml"
    if path.is_file() and not is_gguf:
        return _style_from_file(path)
    if _BASE_MODEL.search(config_name):
        return None
    known = style_of_model(config_name)
    if known is not None and (folder / CONFIG_FILE).is_file() and not is_gguf:
        return known
    return _own_template(folder) or known


def _own_template(folder: Path) -> TemplateStyle | None:
    """Raises CheckpointError."""
    from mdi.text.templates import TemplateStyle, read_template

    if os.name != "posix":  # a process cannot be limited
        return None
    template = read_template(folder)
    return None if template.source is None else TemplateStyle(template)


def _style_names() -> str:
    return ", ".join(sorted({style.name for style in known_styles().values()} - {"chatml"}))


def _style_from_file(path: Path) -> PromptStyle | None:
    """The style that prompt_style.yaml names as `class_path: litgpt.prompts.<class>`."""
    data = read_yaml(path)
    class_path = data.get("class_path") if isinstance(data, dict) else None
    if not isinstance(class_path, str):
        raise CheckpointError(f"{path}: expected `class_path: litgpt.prompts.<style>`, found {data!r:.80}")
    module, _, name = class_path.rpartition(".")
    is_litgpts = module in ("", "litgpt.prompts", "lit_gpt.prompts")
    if is_litgpts and name == DEFAULT:
        return None
    style = known_styles().get(name.lower()) if is_litgpts else None
    if style is None:
        raise UsageError(
            f"{path} names the prompt style {class_path!r}, which is not one of litgpt's and is not imported: give "
            f"--prompt-style none, or one of {_style_names()}",
            code=Code.STYLE,
        )
    return style


def _special_ids(tokenizer: Any) -> tuple[int, frozenset[int], frozenset[int]]:
    """One more than the largest id; the ids that are no text; the `<0x..>` ids, which are a byte each."""
    processor = tokenizer.processor
    if tokenizer.backend == "huggingface":
        size = max(processor.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if size > LIMITS["vocab_size"]:
            raise CheckpointError(
                f"the tokenizer has the token id {size - 1}; at most {LIMITS['vocab_size']} are supported"
            )
        added = processor.get_added_tokens_decoder().items()
        silent = {i for i, token in added if token.special and token.content not in SPOKEN}
        of_bytes = {processor.token_to_id(f"<0x{byte:02X}>") for byte in range(256)} - {None}
        return size, frozenset(silent), frozenset(of_bytes)
    ids = range(processor.vocab_size())
    silent = {i for i in ids if processor.is_control(i)}
    return len(ids), frozenset(silent), frozenset(i for i in ids if processor.is_byte(i))


def _special_ids_by_name(tokenizer: Any) -> dict[str, int]:
    processor = tokenizer.processor
    if tokenizer.backend != "huggingface":
        return {processor.id_to_piece(i): i for i in range(processor.vocab_size()) if processor.is_control(i)}
    added = processor.get_added_tokens_decoder().items()
    return {token.content: i for i, token in added if token.special}


def _special_marks(tokenizer: Any) -> dict[int, str]:
    return special_marks(tokenizer.processor.token_to_id) if tokenizer.backend == "huggingface" else {}


def _stop_sequences(
    style: PromptStyle | TemplateStyle | None, tokenizer: Any, eos_ids: frozenset[int]
) -> list[list[int]]:
    if style is None:
        return []
    try:
        stops = style.stop_tokens(tokenizer)
    except ValueError as e:  # a style of another tokenizer's: still a way to write prompts
        _log.warning("the prompt style %s has stop tokens that this tokenizer lacks: %s", style.class_name, e)
        return []
    # sentencepiece gives its unknown id for missing tokens.
    unknown = tokenizer.processor.unk_id() if tokenizer.backend == "sentencepiece" else None
    usable = [list(s) for s in stops if s and not any(i is None or i == unknown for i in s)]
    return [s for s in usable if not (len(s) == 1 and s[0] in eos_ids)]


def _read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint; {} if there is no such file."""
    if not path.is_file():
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        try:
            data = parse_json(text)
        except json.JSONDecodeError:
            data = parse_json(_with_right_commas(text))
    except (OSError, ValueError, RecursionError) as e:
        raise CheckpointError(f"{path} cannot be read as JSON: {' '.join(str(e).split())}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {data!r:.60}")
    return data


def _with_right_commas(text: str) -> str:
    """JSON without a comma before a closing bracket, and with one between two lines: some models were published so."""
    text = re.sub(r",(\s*[}\]])", r"\1", text)
    return re.sub(r'(?<=[\w}\]"])\s+(?=")', lambda blanks: "," * ("\n" in blanks[0]) + blanks[0], text)


def _config_name(ckpt_dir: Path) -> str:
    path = ckpt_dir / CONFIG_FILE
    if not path.is_file():
        return model_name(ckpt_dir)
    data = read_yaml(path)
    name = data.get("name") if isinstance(data, dict) else None
    return name if isinstance(name, str) else model_name(ckpt_dir)


class Detokenizer:
    """Text from ids that come a few at a time.

    All that `push` and `flush` return, joined, is `codec.decode(ids, continues)` of all ids. What the next id may still
    change is withheld: an incomplete character, or a run of single-byte tokens. Each id is decoded with the few before
    it that are needed, so its cost does not grow with the text.

    Args:
        continues: as for `TextCodec.decode`.
    """

    _WINDOW = 16
    _KEPT = 8  # tokens, i.e. at least as many bytes: UTF-8 finds its way again within four

    def __init__(self, codec: TextCodec, continues: bool = False) -> None:
        self._codec = codec
        self._continues = continues
        self._window: list[int] = []  # ids whose text is not all given out, and some before them
        self._n_shown = 0  # characters of the window's text that have been given out
        self._n_open = 0  # single-byte tokens at the window's end: one more may change how all of them read

    def push(self, ids: Sequence[int]) -> str:
        """Take the next ids; returns the text that has become final, often one token late, maybe empty."""
        for i in self._codec.visible(ids):
            self._window.append(i)
            self._n_open = self._n_open + 1 if i in self._codec.byte_ids else 0
        n_closed = len(self._window) - self._n_open
        if n_closed == 0:
            return ""
        closed, opened = self._window[:n_closed], self._window[n_closed:]
        text = self._codec.decode_visible(closed, self._continues)
        n_final = len(text) - text.endswith(_UNDECIDED)
        new = text[self._n_shown : n_final]
        if n_final == len(text):
            # Leading blanks that came to nothing stay at the beginning; one of them is as good as many.
            closed = closed[:1] if not text and not self._continues else []
            self._continues = self._continues or bool(text)
            self._n_shown = 0
        else:
            self._n_shown = n_final
            if n_closed > self._WINDOW:
                closed = closed[-self._KEPT :]
                self._continues = True
                self._n_shown = len(self._codec.decode_visible(closed, True)) - 1
        self._window = closed + opened
        return new

    def flush(self) -> str:
        """The text that was withheld, as it is, because no more ids come."""
        rest = self._codec.decode_visible(self._window, self._continues)[self._n_shown :]
        self._window, self._n_shown, self._n_open = [], 0, 0
        return rest


class StopMatcher:
    """Cuts a growing text where a stop string first becomes complete, however the text comes in pieces.

    Attributes:
        met: the stop string that has been met; "" before.

    Raises:
        UsageError: a stop string is empty.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if any(not s for s in stop):
            raise UsageError("a stop string must not be empty (--stop)")
        self._stop = tuple(stop)
        self._held = ""
        self.met = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next text.

        Returns:
            The text that is safe to show, and whether a stop string has been met; it and all after it are cut off.
        """
        if self.met:
            return "", True
        if not self._stop:
            return text, False
        text = self._held + text
        found = [(start + len(s), start, s) for s in self._stop if (start := text.find(s)) >= 0]
        if found:
            _, start, self.met = min(found)
            self._held = ""
            return text[:start], True
        longest = max(len(s) for s in self._stop)
        for start in range(max(0, len(text) - longest + 1), len(text)):
            if any(s.startswith(text[start:]) for s in self._stop):
                self._held = text[start:]
                return text[:start], False
        self._held = ""
        return text, False

    def flush(self) -> str:
        """The beginning of a stop string that was withheld and did not become one."""
        rest, self._held = self._held, ""
        return rest


class TextStream:
    """The text of one sample, from ids as they come, up to a stop string.

    Args:
        stop: strings that end the text and are removed from it.
        continues: whether the text continues other text.

    Attributes:
        is_stopped: whether a stop string has been met; nothing comes after it.
    """

    def __init__(self, codec: TextCodec, stop: Sequence[str], continues: bool) -> None:
        self._detokenizer = Detokenizer(codec, continues)
        self._matcher = StopMatcher(stop)
        self.is_stopped = False

    def push(self, ids: Sequence[int]) -> str:
        """Take the next ids; returns the text that is now safe to show."""
        text = ""
        for i in ids:
            if self.is_stopped:
                break
            text += self._match(self._detokenizer.push([i]))
        return text

    def flush(self) -> str:
        """The rest, because no more ids come."""
        text = self._match(self._detokenizer.flush())
        return text if self.is_stopped else text + self._matcher.flush()

    def _match(self, text: str) -> str:
        shown, self.is_stopped = self._matcher.push(text)
        return shown


def stop_test(codec: TextCodec, stop: Sequence[str]) -> Callable[[list[int]], bool] | None:
    """Whether the last of some ids complete a stop string; None without one. It keeps no state, as beams need it."""
    if not stop:
        return None
    n_most = max(len(one.encode()) for one in stop) + 8  # a token has a byte at least, but for a few that show nothing

    def is_stopped(ids: list[int]) -> bool:
        stream = TextStream(codec, stop, True)
        stream.push(ids[-n_most:])
        return stream.is_stopped

    return is_stopped
