"""The tables of flags in docs/configuration.md, made of what the commands declare."""

from __future__ import annotations

import argparse
import importlib
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from mdi import cli
from mdi.cli import COMMANDS, parser_of
from mdi.spec import options

# Name of a table -> the fields of Options that it has, whatever the command; or the commands whose other options it has.
BY_FIELDS = {
    "common": options.COMMON,
    "access": (*options.ACCESS, *options.DISCOVERY, "dial", "no_announce"),
    "model": (*options.MODEL, *options.PARALLEL),
    "server": options.SERVER,
    "generation": options.GENERATION,
    "output": options.OUTPUT,
    "ring": (
        "nodes_config", "place", *options.RING, *options.RESUME, "stop_nodes", "spares", "devices", "pin", "compare",
        "cache_dir", "cache_size",
    ),
}  # fmt: skip
BY_COMMANDS = {
    "access": ("key", "join", "job", "nodes"),
    "ring": ("starter", "secondary", "local-ring", "demo", "sample", "chat", "serve"),
    "plan": ("plan", "doctor", "explain"),
    "models": ("run", "score", "pull", "list", "rm", "cache", "export", "import", "prepare-model"),
}
# What is left of these has no table: their `--help` (`--help-all`) shows it.
WITHOUT_TABLE = ("prepare-data", "train", "finetune", "mem-monitor", "plot-tok-time", "completion")
TABLE = re.compile(r"(<!-- flags: (\w+) -->\n).*?(?=<!-- end -->)", re.DOTALL)
HEAD = "| flag | commands | default | does |\n|---|---|---|---|\n"
BRIEF = ("train", "mem-monitor", "plot-tok-time")  # commands whose help says defaults in brackets at its end
SRC = str(Path(cli.__file__).resolve().parents[2])


class Row(NamedTuple):
    """An option, as some commands have it."""

    flags: str
    default: str
    does: str


def row_of(parser: argparse.ArgumentParser, action: argparse.Action) -> Row:
    """The default is what the help says of it, at "%(default)s" alone in brackets, or after "default:"."""
    formatter = parser._get_formatter()
    if action.option_strings:
        value = "" if action.nargs == 0 else formatter._format_args(action, action.dest.upper())
        flags = f"{', '.join(action.option_strings)} {value}".strip()
    else:
        flags = formatter._metavar_formatter(action, action.dest)(1)[0]
    words, default = action.help or "", "off" if action.nargs == 0 else ""
    if "%(default)" in words:
        default = formatter._expand_help(argparse.Action([], action.dest, default=action.default, help="%(default)s"))
        words = re.sub(r" \((?:default: )?%\(default\)\w\)", "", words)
    elif found := re.search(r"[ ;(]*\bdefault: ((?:[^()]|\([^()]*\))*)\)?", words):
        default = found[1]
        words = words[: found.start()] + words[found.end() :]
    elif action.nargs != 0 and (found := re.search(r" \(([^()]*)\)$", words)) and parser.prog in BRIEF:
        default, words = found[1], words[: found.start()]
    does = formatter._expand_help(argparse.Action([], action.dest, default=action.default, help=words)) if words else ""
    return Row(flags, default.replace(SRC, "src").replace("%%", "%"), does.replace(SRC, "src"))


def tables() -> dict[str, str]:
    """All of them, by name; options in the order of the commands and of their declarations."""
    found: dict[str, dict[Row, list[str]]] = defaultdict(lambda: defaultdict(list))
    for command, (module, _) in COMMANDS.items():
        parser = parser_of(importlib.import_module(module), command)
        fields = {option.dest: option.name for option in parser.declared.values()}
        for action in parser._actions:
            if action.dest in ("help", "help_all", "version") or action.help == argparse.SUPPRESS:
                continue
            field = fields.get(action.dest, action.dest if action.dest in options.COMMON else None)
            places = [name for name, names in BY_FIELDS.items() if field in names]
            places += [name for name, commands in BY_COMMANDS.items() if command in commands]
            if places or command not in WITHOUT_TABLE:
                found[places[0]][row_of(parser, action)].append(command)
    return {name: HEAD + "".join(_lines(rows)) for name, rows in found.items()}


def _lines(rows: dict[Row, list[str]]) -> list[str]:
    """Those of one flag follow each other."""
    flags = list(dict.fromkeys(row.flags for row in rows))
    lines = []
    for row in sorted(rows, key=lambda row: flags.index(row.flags)):
        commands = "all" if len(rows[row]) == len(COMMANDS) else ", ".join(rows[row])
        cells = (f"`{row.flags}`", commands, row.default, row.does)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return lines


def with_tables(text: str) -> str:
    """The document with each table that stands between its marks as it should be."""
    made = tables()
    assert {name for _, name in TABLE.findall(text)} == made.keys()
    return TABLE.sub(lambda mark: mark[1] + made[mark[2]], text)
