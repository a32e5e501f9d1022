"""Chat with a model, on this machine or over a ring of nodes. The chat has a history.

examples:
  mdi chat Qwen/Qwen3-0.6B
  mdi chat model.Q4_K_M.gguf --key cluster.key          over the nodes that have the key
  echo "Who are you?" | mdi chat model.Q4_K_M.gguf

Ctrl-C ends an answer; /help lists the commands.
"""

from __future__ import annotations

import json
import logging
import os
import re
import select
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mdi.cancel import Cancel
from mdi.errors import Code, MdiError, UsageError
from mdi.files import replacing
from mdi.spec.options import ACCESS, COMMON, DISCOVERY, DRAWING, MODEL, RING, Options
from mdi.spec.parser import Parser
from mdi.spec.settings_file import parse_json, read_limited
from mdi.terminal import show, show_error

if TYPE_CHECKING:
    from mdi.run.run import Run
    from mdi.spec.cluster import ClusterConfig

HELP = """\
/new           forget what was said, begin a new chat
/system TEXT   what the model is told before all that you say; without a text it shows it
/save FILE     write the chat to a file, as the messages of an API
/load FILE     go on with a chat of such a file
/help          this list
/quit          end the chat, as an empty line and Ctrl-D do
A message of several lines begins and ends with \"\"\". Ctrl-C ends an answer that
takes too long. Anything else is said to the model."""
QUOTES = '"""'
LARGEST_CHAT_BYTES = 16 << 20  # of a file that is loaded

logger = logging.getLogger("mdi")


class Refused(MdiError):
    """A message that the model cannot be given. A person may type another one."""


class Reply(NamedTuple):
    text: str
    is_interrupted: bool = False
    speed: str = ""


@dataclass
class Chat:
    """What was said.

    Attributes:
        turns: (question, answer), the oldest first.
        system: what the model is told before them; "" is nothing.
    """

    turns: list[tuple[str, str]] = field(default_factory=list)
    system: str = ""

    def save(self, path: Path) -> None:
        """Write it as a list of messages. Raises UsageError if that is not possible."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for asked, answered in self.turns:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        with replacing(path, UsageError) as file:
            file.write(json.dumps(messages, indent=1, ensure_ascii=False).encode() + b"\n")

    @classmethod
    def load(cls, path: Path) -> Chat:
        """Raises UsageError: it is no file that `save` wrote."""
        try:
            found = parse_json(read_limited(path, LARGEST_CHAT_BYTES))
            messages = [(one["role"], one["content"]) for one in found]
            if not isinstance(found, list) or not all(isinstance(word, str) for one in messages for word in one):
                raise TypeError
        except OSError as e:
            raise UsageError(f"cannot read {path}: {e.strerror or e}") from None
        except (ValueError, TypeError, KeyError):
            raise UsageError(f"{path} is no chat: expected a list of messages, as /save writes it") from None
        made = cls(system=messages.pop(0)[1] if messages and messages[0][0] == "system" else "")
        if [role for role, _ in messages] != ["user", "assistant"] * (len(messages) // 2):
            raise UsageError(f"{path} is no chat: expected questions of a user, each with the answer of an assistant")
        said = [content for _, content in messages]
        made.turns = list(zip(said[::2], said[1::2], strict=True))
        return made


FIRST = (
    "--quantize", "--memory", "--sequence-length", "--n-tokens", "--temperature", "--key", "--machines", "--nodes-config",
    "--verb",
)  # fmt: skip


def add_arguments(parser: Parser) -> None:
    parser.options("model", *MODEL, quantize={"default": "auto"})
    parser.options("generation", *DRAWING, n_tokens=500)
    ring = {"help": "nodes file: chat over the ring of these nodes"}
    parser.options("several machines", *ACCESS, *DISCOVERY, "nodes_config", *RING, "stop_nodes", nodes_config=ring,
                   stop_nodes={"help": "end the secondaries' processes after the chat"})  # fmt: skip
    parser.options("output", "trace")
    parser.options(None, *COMMON)


def run(options: Options, cancel: Cancel) -> int:
    return converse(options, cancel)


def converse(options: Options, cancel: Cancel, question: str = "", is_distributed: bool = False) -> int:
    """Answer one question, or without one talk until the user ends it; returns the exit status.

    Args:
        is_distributed: find the nodes by their key, also without --nodes.
    """
    from contextlib import ExitStack

    from mdi.cli import INTERRUPTED, ignore_interrupts
    from mdi.cli.access import with_keys, with_machines
    from mdi.cli.discover import Discovery
    from mdi.cli.output import write_trace_of
    from mdi.cli.session import CONTEXT_LIMIT, nodes_of, run_options, sampling_params, with_model, with_seed
    from mdi.run.run import Run
    from mdi.spec.cluster import load_cluster, standalone

    def find() -> ClusterConfig:
        if options.nodes_config is not None:
            cluster = load_cluster(options.nodes_config)
        else:
            is_found = is_distributed or options.nodes is not None
            cluster = discovery.present_nodes() if is_found else standalone()
        cluster = with_keys(options, cluster)  # refused before anything is said
        logger.info("loading %s ...", (options.ckpt or options.chunk or Path()).name)
        return cluster

    options = with_machines(options)
    if len(options.named_adapters) > 1:
        raise UsageError("--adapter: a chat takes one adapter")
    options = with_seed(options)
    sampling_params(options)  # wrong ones are refused before anything is loaded
    limit = options.sequence_length or CONTEXT_LIMIT
    with ExitStack() as stack:
        discovery = stack.enter_context(Discovery(options, cancel))
        options = with_model(options, cancel)
        nodes = stack.enter_context(nodes_of(options, find, discovery))
        session = stack.enter_context(
            Run(
                nodes,
                run_options(options),
                limit,
                n_texts=1,
                leave=options.stop_nodes,
                on_close=ignore_interrupts,
                cancel=cancel,
            )  # fmt: skip
        )
        if options.prompt_style == "auto" and session.model.codec.prompt_style is None:
            logger.info("no chat template is known for %s: it continues your text (--prompt-style NAME wraps it in one)",
                        session.model.weights.model.name)  # fmt: skip
        params = sampling_params(options, session.model.codec.drawing)
        status = 0
        if not question:
            status = _talk(session, params, options.stop)
        elif answer(session, Chat(), question, params, options.stop, name="").is_interrupted:
            status = INTERRUPTED
        session.raise_failure()
    if options.trace is not None:
        write_trace_of(session, options.trace)
    return status


def _talk(session: Run, params: Any, stop: Sequence[str]) -> int:
    """Until the user ends it; the exit status: 1 if a program, who reads no errors, asked something that was refused."""
    status = 0
    chat = Chat()
    is_terminal = sys.stdin.isatty()
    lines = InputLines(lambda: session.failed)
    if is_terminal:
        nodes = "this machine" if session.cluster.n_nodes == 1 else f"{session.cluster.n_nodes} nodes"
        model = session.model.weights.model.name
        show(f"\nHello! This is {model} on {nodes}. Say something; /help lists commands, /quit ends.\n")
    while not session.failed:
        if is_terminal:
            print("You: ", end="", flush=True)
        said = lines.message()
        if said in ("", "/quit"):
            if session.failed:
                print()
            break
        try:
            if (obeyed := _obey(said, chat, session)) is not None:
                print(obeyed, flush=True)
                continue
            reply = answer(session, chat, said, params, stop)
            chat.turns.append((said, reply.text))
            if is_terminal and reply.speed:
                print(f"({reply.speed})\n", flush=True)
        except (Refused, UsageError) as e:
            show_error(e)
            status = 0 if is_terminal else 1
    return status


def _obey(said: str, chat: Chat, session: Run) -> str | None:
    """Execute a command with a slash; returns the answer, and None if it is a message.

    Raises:
        UsageError: it cannot be executed; the chat is as it was.
    """
    command, _, rest = said.partition(" ")
    rest = rest.strip()
    if command == "/system":
        if rest:
            session.model.codec.encode_chat([], "", rest)  # refused if the model has no place for it
            chat.system = rest
        return f"The model is told: {chat.system}" if chat.system else "The model is told nothing: /system TEXT"
    if command in ("/save", "/load"):
        if not rest:
            raise UsageError(f"{command} FILE: name a file")
        path = Path(rest).expanduser()
        if command == "/save":
            chat.save(path)
            return f"{len(chat.turns)} answers are in {path}"
        loaded = Chat.load(path)
        session.model.codec.encode_chat([], "", loaded.system)
        chat.turns, chat.system = loaded.turns, loaded.system
        return f"The chat goes on after {len(chat.turns)} answers."
    if not re.fullmatch(r"/\w+", said):
        return None
    if command == "/new":
        chat.turns.clear()
        return "All that was said is forgotten." + (" /system stays." if chat.system else "")
    return HELP if command == "/help" else f"{command} is no command.\n{HELP}"


def answer(session: Run, chat: Chat, question: str, params: Any, stop: Sequence[str], name: str = "Model: ") -> Reply:
    """Stream one answer, after a name, and after the question where the model continues it. Raises MdiError if the ring broke.

    Raises:
        Refused: the model cannot be given this question.
    """
    from mdi.text.answers.think import MARKS, content

    codec = session.model.codec
    ids = _fit(session, chat, question, params.n_tokens)
    form = codec.form
    begins_in_reasoning = form.thinks is not None and form.begins_in_reasoning(codec.decode(ids[-8:]))
    adapter = next(iter(session.adapters), "")
    try:
        session.model.check_prompt(ids)
        reasons = f"{form.thinks[0]}\n" if form.thinks and begins_in_reasoning else ""
        begin = reasons or ("" if codec.prompt_style is not None else question)
        show(name + begin, end="")
        sample = session.submit(question, ids, params, stop, lambda text: show(text or "\n", end=""), adapter=adapter)
    except UsageError as e:  # also: the nodes' caches could never hold it
        raise Refused(str(e), code=e.code) from None
    is_interrupted = False
    try:
        session.read()
    except KeyboardInterrupt:
        is_interrupted = True
        sample.cancel()
        session.read()
    except MdiError:
        print()
        raise
    marks = MARKS if form.special else form.thinks  # as InlineStream shows it
    text = content(sample.text, begins_in_reasoning, marks) if marks else sample.text
    return Reply(text, is_interrupted, _speed(sample.token_times_s))


def _speed(times_s: Sequence[float]) -> str:
    """Of an answer whose tokens came at these times."""
    if len(times_s) < 2:
        return ""
    rate = (len(times_s) - 1) / max(times_s[-1] - times_s[0], 1e-9)
    return f"{len(times_s)} tokens, {rate:.3g} tokens/s"


class InputLines:
    """Lines of stdin; while none comes, calls something else.

    Args:
        is_over: asked twice a second; once it is true, waiting ends.
    """

    def __init__(self, is_over: Callable[[], bool]) -> None:
        self._is_over = is_over
        self._read = b""

    def message(self) -> str:
        """The next line without blanks around it, or the lines between two marks; "" as `next`."""
        line = self.next().strip()
        if not line.startswith(QUOTES):
            return line
        lines = [line.removeprefix(QUOTES)]
        while not (end := lines[-1].rstrip()).endswith(QUOTES):
            if not (line := self.next()):
                break
            lines.append(line.rstrip("\r\n"))
        else:
            lines[-1] = end.removesuffix(QUOTES)
        return "\n".join(lines).strip()

    def next(self) -> str:
        """The next line; "" at the end of the input, or when it is over."""
        try:
            fd = sys.stdin.fileno()
        except (OSError, ValueError):  # not a real file
            return sys.stdin.readline()
        if sys.platform == "win32":  # Windows cannot wait for a console and something else at the same time
            return sys.stdin.readline()
        while b"\n" not in self._read:
            if self._is_over():
                return ""
            if not select.select([fd], [], [], 0.5)[0]:
                continue
            data = os.read(fd, 65536)
            if not data:
                break
            self._read += data
        line, newline, self._read = self._read.partition(b"\n")
        return (line + newline).decode(errors="replace")


def _fit(session: Run, chat: Chat, question: str, n_tokens: int) -> list[int]:
    """Prompt ids of the chat so far; its oldest turns are forgotten as far as the context demands. Raises Refused."""
    most = session.max_length - max((one.n_virtual for one in session.model.weights.adapters), default=0)
    room = max(most - n_tokens, most // 2)
    while True:
        ids = session.model.codec.encode_chat(chat.turns, question, chat.system)
        if len(ids) <= room or (not chat.turns and len(ids) <= most):
            return ids
        if not chat.turns:
            longest = session.model.spec.max_length
            more = "shorten it" if most >= longest else f"--sequence-length N allows more, up to the model's {longest}"
            raise Refused(
                f"this message has {len(ids)} tokens, and a text may have {most} here: {more}", code=Code.LENGTH
            )
        chat.turns.pop(0)
