"""The commands: `mdi <command>`, and the launchers in src/ that are one command each.

Only the parsing of arguments happens here; torch and litgpt are imported by a command's `run`, so that `--help` is quick
and a missing library is reported in one line.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import importlib
import inspect
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import mdi
from mdi.cancel import Cancel
from mdi.errors import INSTALL_ALL, MdiError, UsageError
from mdi.spec.options import Options
from mdi.spec.parser import Parser, declared
from mdi.terminal import JSON, VARIABLE, LineFormatter, TerminalHandler, form_of, formatter, show_error

# command -> (module with add_arguments and run, one line of help)
COMMANDS = {
    "run": ("mdi.cli.run", "answer or chat with a model, which is fetched if it is not here"),
    "starter": ("mdi.cli.starter", "run a model over a ring of nodes, from its first node"),
    "secondary": ("mdi.cli.secondary", "run a secondary, which waits for a starter"),
    "key": ("mdi.cli.key", "make the key of a cluster, change it, or invite a board"),
    "join": ("mdi.cli.join", "make this machine a node of a cluster, with the code of an invitation"),
    "job": ("mdi.cli.job", "run a command over the processes that Slurm, MPI, torchrun, Kubernetes or Ray started"),
    "nodes": ("mdi.cli.nodes", "list the nodes of a cluster that are in this network"),
    "prepare-model": ("mdi.cli.prepare_model", "download, convert and split a checkpoint"),
    "doctor": ("mdi.cli.doctor", "examine a cluster before a run, and say what is wrong"),
    "local-ring": ("mdi.cli.local_ring", "run a whole ring on this machine"),
    "demo": ("mdi.cli.demo", "see a ring of three nodes write, on this machine, with a small model that is included"),
    "sample": ("mdi.cli.sample", "generate text on this machine alone"),
    "chat": ("mdi.cli.chat", "chat with a model, on this machine or over a ring"),
    "serve": ("mdi.cli.serve", "serve models to programs and people, with OpenAI's and Anthropic's APIs"),
    "pull": ("mdi.cli.pull", "download a model and make it ready"),
    "list": ("mdi.cli.list_models", "list the models that are ready"),
    "rm": ("mdi.cli.rm", "remove a model from the disk"),
    "cache": ("mdi.cli.cache", "show and clean the cache folder: weights, kernels, records"),
    "export": ("mdi.cli.export", "write a model to one file, for a machine without a network"),
    "import": ("mdi.cli.import_model", "make a model ready from such a file"),
    "score": ("mdi.cli.score", "say how probable a text is for a model: perplexity, bits per byte"),
    "train": ("mdi_training.train_command", "train a model from scratch, or a checkpoint further"),
    "finetune": (
        "mdi_training.finetune_command",
        "adapt a model to examples, while its nodes keep their blocks as they are",
    ),
    "plan": ("mdi.cli.plan", "say beforehand whether a model fits some nodes, and how fast it will be"),
    "explain": ("mdi.cli.explain", "say why a run was not faster, from the file that --trace wrote"),
    "prepare-data": ("mdi_training.prepare_data_command", "make training data and a tokenizer from text"),
    "plot-tok-time": ("mdi_tools.plot_tok_time_command", "draw time over tokens for several node counts"),
    "completion": ("mdi.cli.completion", "print what makes a shell complete commands, options and files"),
    "mem-monitor": ("mdi_tools.mem_monitor_command", "run a command and record its memory"),
}

# In the order in which `mdi --help` shows them.
GROUPS = {
    "use a model": ("run", "chat", "serve", "sample", "score", "demo"),
    "several machines": (
        "starter", "secondary", "join", "key", "nodes", "local-ring", "job", "doctor",
    ),
    "models": ("pull", "list", "rm", "export", "import", "prepare-model", "cache"),
    "train": ("finetune", "train", "prepare-data"),
    "look": ("plan", "explain", "plot-tok-time", "mem-monitor", "completion"),
}  # fmt: skip

# Commands that one Ctrl-C ends; in a chat it ends an answer, and training has its own use for it.
ENDED_AT_ONCE = (
    "starter", "secondary", "key", "join", "job", "nodes", "local-ring", "demo", "sample", "score", "doctor", "plan", "explain",
    "serve", "pull", "export", "import",
)  # fmt: skip

# How threads of OpenMP wait for their next piece of work, by the libraries that torch comes with: GNU's (Linux) and LLVM's
# or Intel's (macOS, Windows). They spin for milliseconds by default, and so take the core from the thread that they wait
# for as soon as another program computes.
WAIT_POLICY = {"GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
WAIT_VARIABLES = (*WAIT_POLICY, "OMP_WAIT_POLICY")

# Exit statuses, as shells have them.
INTERRUPTED, TERMINATED = 130, 143

logger = logging.getLogger("mdi")


class Terminated(KeyboardInterrupt):
    """SIGTERM: ends a run in the same good order as Ctrl-C."""


class Acknowledged(int):
    """The exit status of a process that others have ended, which 130 and 143 do not say: it goes at once."""


def main(argv: list[str] | None = None) -> int:
    """The console command `mdi`."""
    args = sys.argv[1:] if argv is None else argv
    if args and args[0] in COMMANDS:
        return launch(args[0], args[1:], prog=f"mdi {args[0]}")
    width = max(map(len, COMMANDS))
    lines = "\n\n".join(
        "\n".join([f"{title}:", *(f"  {name:<{width}}  {COMMANDS[name][1]}" for name in names)])
        for title, names in GROUPS.items()
    )
    parser = Parser(
        prog="mdi",
        description="Model-distributed inference: one language model over a ring of small machines.",
        epilog=f"{lines}\n\n`mdi <command> --help` explains each.",
    )
    parser.add_argument("--version", action="version", version=f"MDI-LLM {mdi.__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="command", help="what to do")
    if not args:
        parser.print_help()
        return 2
    if near := difflib.get_close_matches(args[0], COMMANDS, 1):
        parser.error(f"there is no command {args[0][:60]!r}: is `mdi {near[0]}` meant?")
    parser.parse_args(args[:1])
    return 0


def leave(status: int) -> NoReturn:
    """End this process at once, after everything has been closed.

    One that was interrupted goes at once: the interpreter would take seconds to take torch down, and wait for ever for a
    thread that a library was just running.
    """
    if status not in (INTERRUPTED, TERMINATED) and not isinstance(status, Acknowledged):
        sys.exit(status)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def launch(
    command: str, argv: list[str] | None = None, prog: str | None = None, module_name: str = "",
    show: Callable[[MdiError | str], None] | None = None,
) -> int:  # fmt: skip
    """Parse the arguments of one command and run it; returns the exit status.

    Args:
        module_name: of a command that is not in COMMANDS: a module with add_arguments and run.
        show: called with the error of a failed command; None prints it in one line.
    """
    set_wait_policy()
    module = importlib.import_module(module_name or COMMANDS[command][0])
    parser = parser_of(module, prog)
    # words may follow flags: `mdi run NAME --n-tokens 9 PROMPT`
    args = parser.parse_intermixed_args(argv) if "words" in parser.declared else parser.parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a model writes what no terminal of another encoding can show
            stream.reconfigure(errors="replace")
    is_ended_at_once = getattr(module, "IS_ENDED_AT_ONCE", command in ENDED_AT_ONCE)
    try:
        with _log_lines(command, args), _signals(is_ended_at_once):
            try:
                with _cancelled_at_the_end() as cancel:
                    waits = {"cancel": cancel} if "cancel" in inspect.signature(module.run).parameters else {}
                    status: int = module.run(options_of(parser, args), **waits)
                return status
            except Exception as e:
                return _status_of(e, bool(getattr(args, "debug", False)), show or show_failure)
    except KeyboardInterrupt as e:  # also one that came while the handlers were set, or after the command
        return TERMINATED if isinstance(e, Terminated) else INTERRUPTED


@contextlib.contextmanager
def _cancelled_at_the_end() -> Iterator[Cancel]:
    """The token of a command that waits for others: whatever still works for it ends with it, also after Ctrl-C."""
    cancel = Cancel()
    try:
        yield cancel
    finally:
        cancel.cancel()


def _status_of(error: Exception, is_debugging: bool, show: Callable[[MdiError | str], None]) -> int:
    """The exit status of a failed command, whose error is shown. With --debug, a defect passes through."""
    if isinstance(error, BrokenPipeError):  # the reader of our output went away, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    if isinstance(error, MdiError):
        if is_debugging:
            logger.exception("failed")
        show(error)
        return 2 if isinstance(error, UsageError) else 1
    missing = error.name or "" if isinstance(error, ModuleNotFoundError) else None
    if is_debugging or (missing is not None and missing.startswith("mdi")):
        raise error
    if missing is not None:
        print(
            f"error: the library {missing!r} is not installed in {sys.executable}: run {INSTALL_ALL}; "
            "or `make venv` there, and then .venv/bin/python",
            file=sys.stderr,
        )
    elif isinstance(error, MemoryError):
        show("out of memory: free some, raise the limit of this process, or choose a smaller format (--quantize)")
    else:  # a defect, or a machine at its limits: memory, a driver, a disk
        reason = (str(error).splitlines() or [""])[0]
        show(f"{type(error).__name__}: {reason} (-d shows where)")
    return 1


@contextlib.contextmanager
def _signals(is_ended_at_once: bool) -> Iterator[None]:
    """SIGTERM ends a command in good order, and Ctrl-C one that it ends at once."""
    handlers: dict[signal.Signals, Any] = {
        signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.getsignal(signal.SIGINT)
    }  # fmt: skip
    try:
        _on_signal(signal.SIGTERM, _raise_terminated)
        if is_ended_at_once and handlers[signal.SIGINT] is signal.default_int_handler:
            _on_signal(signal.SIGINT, _raise_interrupted)
        yield
    except KeyboardInterrupt:
        handlers.update(dict.fromkeys(handlers, signal.SIG_IGN))  # nothing may disturb the interpreter's own end either
        raise
    finally:
        for number, handler in handlers.items():
            _on_signal(number, handler)


def show_failure(message: MdiError | str) -> None:
    """Print the one line that says why the command failed, as its log lines look."""
    if os.environ.get(VARIABLE) == JSON:
        logger.error("%s", message)
    else:
        show_error(message)


def set_wait_policy() -> None:
    """Let idle compute threads sleep, here and in child processes. The user's own settings stay.

    OpenMP reads the environment when torch is imported; later it is too late.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in WAIT_VARIABLES):
        os.environ.update(WAIT_POLICY)


def parser_of(module: Any, prog: str | None = None) -> Parser:
    """The parser of a command, a module with add_arguments and, of many options, the FIRST that --help shows."""
    words = {"ckpt_folder": "models/ in your data folder"}
    parser = Parser(Options, words, prog=prog, description=module.__doc__)
    parser.add_argument("--version", action="version", version=f"MDI-LLM {mdi.__version__}")
    module.add_arguments(parser)
    if first := getattr(module, "FIRST", ()):
        parser.show_first(first)
    return parser


def options_of(parser: Parser, args: argparse.Namespace) -> Any:
    """The checked options of what was typed; `args` itself where a command has flags of its own. Raises MdiError."""
    own, given = tuple(parser.declared.values()), vars(args)
    known = {option.dest for option in (*own, *declared(Options).values())} | {
        field.name for field in dataclasses.fields(Options)
    }
    if not given.keys() <= known:
        return args
    try:
        return Options(declared=own).with_given(given)
    except UsageError as e:
        if given.get("json") and "no_stream" in given:  # a program reads what a run prints
            from mdi.cli.output import print_json

            print_json({"error": str(e), "samples": []})
        raise


def ignore_interrupts() -> None:
    """For the end of a command, which is to happen in good order."""
    _on_signal(signal.SIGINT, signal.SIG_IGN)


def heed_interrupts() -> None:
    """After `ignore_interrupts`, if the command continues."""
    _on_signal(signal.SIGINT, _raise_interrupted)


def launchers() -> Path | None:
    """The folder with a file for each command, src/ of a checkout; None where the package is installed."""
    src = Path(__file__).resolve().parents[2]
    return src if (src / "starter.py").is_file() else None


def called(command: str) -> str:
    """How a command is called here: "starter.py" in a checkout, else "mdi starter"."""
    return f"mdi {command}" if launchers() is None else f"{command.replace('-', '_')}.py"


def output_dir(name: str) -> Path:
    """Folder for files without a given path: src/<name> in a checkout, else ./<name>."""
    return (launchers() or Path.cwd()) / name


def default_nodes_config() -> Path:
    src = Path(__file__).resolve().parents[2]
    return src / "settings_distr" / "configuration.json"


@contextlib.contextmanager
def _log_lines(command: str, args: argparse.Namespace) -> Iterator[None]:
    """Log lines as the flags say, here and in child processes. Restores everything afterwards, and closes its file."""
    is_debugging, is_verbose = bool(getattr(args, "debug", False)), bool(getattr(args, "verb", False))
    inherited = os.environ.get(VARIABLE)
    form = os.environ[VARIABLE] = form_of(command, bool(getattr(args, "log_json", False)), os.environ)
    _set_up_logging(command, form, is_verbose, is_debugging, bool(getattr(args, "quiet", False)))
    try:
        yield
    finally:
        for handler in logger.handlers:
            handler.close()
        logger.handlers = []
        logger.setLevel(logging.NOTSET)
        logger.propagate = True
        os.environ.pop(VARIABLE, None)
        if inherited is not None:
            os.environ[VARIABLE] = inherited


def _set_up_logging(command: str, form: str, is_verbose: bool, is_debugging: bool, is_quiet: bool) -> None:
    handler = TerminalHandler(sys.stderr)
    handler.setLevel(logging.DEBUG if is_debugging else logging.WARNING if is_quiet else logging.INFO)
    handler.setFormatter(formatter(form, is_verbose))
    # It warns of a home that cannot be written, even if no figure is drawn.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    logger.handlers = [handler]
    logger.setLevel(logging.DEBUG if is_debugging or is_verbose else logging.INFO)
    logger.propagate = False
    if is_debugging:
        path = output_dir("logs") / f"logs_{command.replace('-', '_')}_{os.getpid()}.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file_handler = logging.FileHandler(path, encoding="utf-8")
        except OSError as e:
            logger.warning("no debug log: %s", e)
            return
        file_handler.setFormatter(LineFormatter("%(asctime)s %(levelname)s %(threadName)s %(name)s: %(message)s"))
        logger.addHandler(file_handler)
        logger.info("debug log: %s", path)


def _on_signal(number: signal.Signals, handler: object) -> None:
    with contextlib.suppress(ValueError, TypeError):  # not in the main thread, as in tests; not a handler of Python's
        signal.signal(number, handler)  # type: ignore[arg-type]


def _raise_terminated(signum: int, frame: FrameType | None) -> None:
    _ignore_both()
    raise Terminated


def _raise_interrupted(signum: int, frame: FrameType | None) -> None:
    _ignore_both()
    with contextlib.suppress(OSError):  # not through a stream, because the interrupted code may hold its lock
        os.write(2, b"\ninterrupted: ending ...\n")
    raise KeyboardInterrupt


def _ignore_both() -> None:
    """Once is enough: what comes again while things are brought to an end in good order would break that off."""
    _on_signal(signal.SIGTERM, signal.SIG_IGN)
    _on_signal(signal.SIGINT, signal.SIG_IGN)
