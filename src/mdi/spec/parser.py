"""Makes a command's parser, and its checked options, from the fields of a dataclass; a mistake is one line, as all errors.

A field is an option if its annotation has an `Option`; its type, default and range (`msgspec.Meta`) are those of the field:

    frames: Annotated[Annotated[int, Meta(ge=1)] | None, Option("frames in flight", metavar="N")] = None
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import difflib
import functools
import math
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from mdi.errors import UsageError
from mdi.spec.decode import Meta

T = TypeVar("T")
UNSET: Any = object()


@dataclasses.dataclass(frozen=True)
class Option:
    """How a field is given on a command line.

    Attributes:
        help: as argparse has it: `%(default)s` is the default.
        brief: what --help shows in place of a long help, where --help-all shows that.
        flags: "--name" of the field's name if empty; one without dashes is a positional argument.
        metavar, choices, nargs: as argparse has them; nargs "append" is a flag that may be repeated, and choices may be a
            function, for what takes long to import.
        read: makes the field's value of its text; also gets the flag's name, for errors. Raises UsageError.
        convert: makes what is compared with the choices of the text.
        default: as it is typed, if that is another one than the field's.
        const: the value of a flag without its argument (nargs "?").
        fact: what `combinations` calls it, if that is not its flag, which another command has for something else.
    """

    help: str
    flags: tuple[str, ...] = ()
    metavar: str | tuple[str, ...] | None = None
    choices: Sequence[str] | Callable[[], Sequence[str]] | None = None
    nargs: str | None = None
    read: Callable[[str, str], Any] | None = None
    convert: Callable[[str], Any] | None = None
    default: Any = UNSET
    const: str | None = None
    fact: str | None = None
    brief: str = ""


@dataclasses.dataclass(frozen=True)
class Declared:
    """An option with its field: a name, a type without None, limits, and a default."""

    name: str
    option: Option
    type: Any
    limits: Meta | None
    default: Any

    @property
    def flags(self) -> tuple[str, ...]:
        return self.option.flags or (f"--{self.name.replace('_', '-')}",)

    @property
    def flag(self) -> str:
        """The first long name."""
        return next((flag for flag in self.flags if flag.startswith("--")), self.flags[0])

    @property
    def fact(self) -> str:
        return self.option.fact or self.flag

    @property
    def dest(self) -> str:
        return self.flag.lstrip("-").replace("-", "_")

    def add_to(self, group: argparse._ActionsContainer) -> None:
        option = self.option
        settings: dict[str, Any] = {"help": option.help, "metavar": option.metavar, "choices": option.choices}
        if callable(option.choices):
            settings["choices"] = option.choices()
        default = self.default if option.default is UNSET else option.default
        if self.type is bool and option.read is None:
            settings = {"help": option.help, "action": "store_true"}
        elif option.nargs == "append":
            settings |= {"action": "append", "default": list(default or ())}
        else:
            is_text = option.read is not None or get_origin(self.type) is tuple
            inner = next(iter(get_args(self.type)), str)
            settings["type"] = (
                option.convert or str if option.read or option.convert else inner if is_text else self.type
            )
            settings |= {"nargs": option.nargs, "const": option.const} if option.nargs else {}
            settings["default"] = list(default) if isinstance(default, tuple) else default
        if not self.flags[0].startswith("-"):
            settings.pop("default", None)
        group.add_argument(*self.flags, **settings)

    def value(self, raw: Any) -> Any:
        """The checked value of what was typed. Raises UsageError."""
        if raw is None:
            return self.default
        if self.option.read is not None and isinstance(raw, str):
            return self.option.read(raw, self.flag)
        if self.limits is not None and self.type in (int, float):
            self._check(raw)
        return tuple(raw) if isinstance(raw, list) else raw

    def _check(self, value: float) -> None:
        assert self.limits is not None
        low, above, high = self.limits.ge, self.limits.gt, self.limits.le
        is_low = (low is not None and value < low) or (above is not None and value <= above)
        if is_low or (high is not None and value > high) or not math.isfinite(value):
            if high is not None:
                wanted = (
                    f"from {low or 0:g} to {high:g}" if above is None else f"more than {above:g} and at most {high:g}"
                )
            else:
                wanted = (
                    f"more than {above:g}" if above is not None else "0 or more" if low == 0 else f"at least {low:g}"
                )
            raise UsageError(f"{self.flag} must be {wanted}, got {value:g}")


@functools.cache
def declared(cls: Any) -> dict[str, Declared]:
    """All options of a dataclass, and of those in its fields, by the names of their fields."""
    found: dict[str, Declared] = {}
    hints = get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        hint, option, limits = hints[field.name], None, None
        while get_origin(hint) in (Annotated, Union, types.UnionType):
            if get_origin(hint) is Annotated:
                hint, *notes = get_args(hint)
                option = next((note for note in notes if isinstance(note, Option)), option)
                limits = next((note for note in notes if isinstance(note, Meta)), limits)
            else:
                hint = next(arg for arg in get_args(hint) if arg is not type(None))
        if option is not None:
            found[field.name] = Declared(field.name, option, hint, limits, field.default)
        elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
            found |= declared(hint)
    return found


def made(cls: type[T], options: Iterable[Declared], given: Mapping[str, Any]) -> T:
    """An object of what was typed.

    Args:
        options: of the command.
        given: values as they were typed, by the flag's name; one of a field's own name is its value.
    """
    known = {option.name: option for option in options}
    hints, values = get_type_hints(cls), {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if (option := known.get(field.name)) is not None:
            if option.dest in given:
                values[field.name] = option.value(given[option.dest])
        elif dataclasses.is_dataclass(hint := hints[field.name]) and isinstance(hint, type):
            values[field.name] = made(hint, known.values(), given)
        elif field.name in given and field.name not in {option.dest for option in known.values()}:
            # A default that the command sets.
            other, raw = declared(cls).get(field.name), given[field.name]  # type: ignore[arg-type]
            values[field.name] = raw if other is None else other.value(raw)
    return cls(**values)


class Parser(argparse.ArgumentParser):
    """Its help text is a module's docstring.

    Args:
        cls: of the options, whose fields `options` names.
        words: that stand in braces in help texts, such as folders.
    """

    def __init__(self, cls: type | None = None, words: Mapping[str, str] | None = None, **settings: Any) -> None:
        super().__init__(
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, add_help=False, **settings
        )
        self.first: Sequence[str] = ()
        self.add_argument("-h", "--help", action=_Help, help="show this help message and exit")
        self.register("type", int, _whole_number)
        self.register("type", float, _number)
        self._cls, self._words = cls, words or {}
        self._named: dict[str, argparse._ActionsContainer] = {}
        self.declared: dict[str, Declared] = {}

    def options(self, title: str | None, *names: str, is_one: bool = False, **changes: Mapping[str, Any] | Any) -> None:
        """Add options, in a group of that title.

        Args:
            is_one: whether they exclude each other.
            changes: of a name, for this command alone: fields of its Option, or its default. With a help of its own it has no
                other brief one than what is given with it.
        """
        assert self._cls is not None
        group: argparse._ActionsContainer = self
        if title is not None:
            group = self._named.get(title) or self._named.setdefault(title, self.add_argument_group(title))
        group = group.add_mutually_exclusive_group() if is_one else group
        for name in names:
            option, change = declared(self._cls)[name], changes.get(name, {})
            if not isinstance(change, Mapping):
                option, change = dataclasses.replace(option, default=change), {}
            text = str(change.get("help", option.option.help))
            for word, stands_for in self._words.items():
                text = text.replace(f"{{{word}}}", stands_for)
            text = text or argparse.SUPPRESS
            brief = change.get("brief", "" if "help" in change else option.option.brief)
            change = {**change, "help": text, "brief": brief}
            option = dataclasses.replace(option, option=dataclasses.replace(option.option, **change))
            option.add_to(group)
            self.declared[name] = option

    def show_first(self, flags: Sequence[str]) -> None:
        """Have --help show these options alone, and what has no flag; --help-all shows every one. For after all are added."""
        self.first = flags
        usage = self._get_formatter()
        usage.add_usage(None, [one for one in self._actions if not one.option_strings], [])
        self._first_usage = f"{usage.format_help().strip()} [options]"
        self.add_argument("--help-all", action="help", help="show all options and exit")

    def first_help(self) -> str:
        """The help that --help shows."""
        if not self.first:
            return self.format_help()
        found = self._get_formatter()
        shown = [self._option_string_actions[flag] for flag in (*self.first, "--help-all")]
        others = [one for one in self._actions if not one.option_strings]
        found.add_text(self._first_usage)
        found.add_text(self.description)
        for group in (*self._action_groups[2:], *self._action_groups[:2]):  # those with titles of their own first
            found.start_section(group.title)
            found.add_arguments([self._in_brief(one) for one in group._group_actions if one in shown or one in others])
            found.end_section()
        return found.format_help()

    def _in_brief(self, action: argparse.Action) -> argparse.Action:
        briefs = {one.dest: one.option.brief for one in self.declared.values() if one.option.brief}
        found = copy.copy(action)
        found.help = briefs.get(action.dest, action.help)
        return found

    def error(self, message: str) -> NoReturn:
        if near := self._nearest(message):
            message += f"; is {near} meant?"
        every = "--help-all" if self.first else "--help"
        self.exit(2, f"error: {message} ({self.prog} {every} explains all arguments)\n")

    def _nearest(self, message: str) -> str | None:
        """The flag, or the choice of a flag, that is most like the one that an error of argparse refuses."""
        if unknown := re.match(r"unrecognized arguments: (?:.* )?(--[\w-]+)", message):
            near = difflib.get_close_matches(
                unknown[1], [flag for flag in self._option_string_actions if len(flag) > 2], 1
            )
        elif wrong := re.match(r"argument (\S+?)(?:/\S+)?: invalid choice: '(.{1,60}?)'", message):
            action = self._option_string_actions.get(wrong[1])
            near = difflib.get_close_matches(wrong[2], list(action.choices or ()) if action is not None else (), 1)
        else:
            return None
        return next(iter(near), None)


class _Help(argparse.Action):
    def __init__(self, **settings: Any) -> None:
        super().__init__(nargs=0, default=argparse.SUPPRESS, **settings)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        assert isinstance(parser, Parser)
        sys.stdout.write(parser.first_help())
        parser.exit()


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text[:60]!r}") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text[:60]!r}") from None
