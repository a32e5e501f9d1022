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

from mdi.spec.options import COMMON, Options
from mdi.spec.parser import Parser


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
    """All commands as one parser, whose options say where files and folders are meant."""
    import shtab

    from mdi.cli import COMMANDS

    whole = argparse.ArgumentParser(prog="mdi")
    commands = whole.add_subparsers(parser_class=_Command)
    for name, (module, text) in COMMANDS.items():
        parser = commands.add_parser(name, help=text)
        importlib.import_module(module).add_arguments(parser)
        for action in parser._actions:
            kind = action.metavar[0] if isinstance(action.metavar, tuple) else action.metavar
            if kind in ("FILE", "DIR"):
                setattr(action, "complete", shtab.FILE if kind == "FILE" else shtab.DIRECTORY)  # noqa: B010, as shtab asks
    return whole
