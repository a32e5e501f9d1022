"""Print what makes a shell complete commands, options and files of `mdi`.

examples:
  mdi completion bash > ~/.local/share/bash-completion/completions/mdi
  mdi completion zsh > ~/.zfunc/_mdi                     (a folder of fpath; then begin a new shell)
  mdi completion fish > ~/.config/fish/completions/mdi.fish

Print it again after an update.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

from mdi.errors import UsageError
from mdi.kernels.weight_formats import AUTO, MIXTURES, OWN, PACKED
from mdi.spec.options import COMMON, Options
from mdi.spec.parser import Declared, Parser

MODELS = ("model", "ckpt")  # also a GGUF file
FORMATS = (AUTO, OWN, *PACKED, *MIXTURES)


def add_arguments(parser: Parser) -> None:
    parser.options(None, "shell", *COMMON)


def run(options: Options) -> int:
    import shtab

    sys.stdout.write(shtab.complete(_whole_parser(), options.shell) + "\n")
    return 0


class _Command(Parser):
    def __init__(self, **settings: Any) -> None:
        super().__init__(Options, **settings)


def _whole_parser() -> argparse.ArgumentParser:
    """All commands as one parser, whose options say where files, folders and formats are meant."""
    import shtab

    from mdi.cli import COMMANDS

    whole = argparse.ArgumentParser(prog="mdi")
    whole.add_argument("--version", action="version", version="", help="show program's version number and exit")
    commands = whole.add_subparsers(parser_class=_Command)
    for name, (module_name, text) in COMMANDS.items():
        parser = commands.add_parser(name, help=text)
        module = importlib.import_module(module_name)
        module.add_arguments(parser)
        if first := getattr(module, "FIRST", ()):
            parser.show_first(first)
        for action in parser._actions:
            kind = action.metavar[0] if isinstance(action.metavar, tuple) else action.metavar
            if kind in ("FILE", "DIR") or action.dest in MODELS:
                is_folder = kind == "DIR" and action.dest not in MODELS
                setattr(action, "complete", shtab.DIRECTORY if is_folder else shtab.FILE)  # noqa: B010, as shtab asks
            elif kind == "FORMAT":
                option = next(one for one in parser.declared.values() if one.dest == action.dest)
                forms = FORMATS if action.dest == "quantize" else FORMATS[: -len(MIXTURES)]  # of a whole model
                action.choices = [form for form in forms if _is_taken(option, form)]
    return whole


def _is_taken(option: Declared, value: str) -> bool:
    try:
        option.value(value)
    except UsageError:
        return False
    return True
