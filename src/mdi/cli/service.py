"""`mdi join --install-service`: a unit of systemd with which this machine's node comes back after a reboot."""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mdi
from mdi.errors import UsageError
from mdi.files import replacing
from mdi.spec.options import Options
from mdi.terminal import show

UNIT = "mdi-node.service"
SYSTEM_FOLDER = Path("/etc/systemd/system")
COMMAND_S = 30.0

# Variables that the node reads; others, which may be secret, do not get into the unit.
_KEPT = ("MDI_CACHE_DIR", "MDI_KERNELS", "XDG_CACHE_HOME", "CXX")
# Kinds of services that are not written yet, by sys.platform.
_OTHERS = {"darwin": "launchd (macOS)", "win32": "services of Windows"}

# Runs a command of the system; returns its exit status and what it printed.
Runner = Callable[[Sequence[str]], tuple[int, str]]


def run_command(command: Sequence[str]) -> tuple[int, str]:
    """Exit status and output; 127 for a command that does not run here or hangs."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=COMMAND_S
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        return 127, str(e)
    return done.returncode, done.stdout.decode("utf-8", "replace").strip()


@dataclass(frozen=True)
class Service:
    """This machine's node as a service: of the system for root, else of the user.

    Args:
        folder: of the units.
        is_system: whether it is the system's, not the user's.
        run: runs a command of the system.
    """

    folder: Path
    is_system: bool
    run: Runner = run_command

    @property
    def path(self) -> Path:
        return self.folder / UNIT

    def install(self, arguments: Sequence[str]) -> None:
        """Write the unit, start it now and at each boot, and say how to undo that. Raises UsageError.

        Args:
            arguments: of `mdi join`, for the service.
        """
        status, why = self._systemctl("daemon-reload")
        if status != 0 and self.is_system:
            raise UsageError(f"systemd does not answer, so nothing was installed: {why or status}")
        if status != 0:
            raise UsageError(
                f"your user has no systemd of its own ({why or status}); a service of the system does the same: "
                f"{by_root(arguments)}"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        with replacing(self.path, UsageError) as file:
            file.write(unit(arguments, self.is_system, os.environ).encode())
        for action in ("daemon-reload", "enable", "restart"):
            status, why = self._systemctl(action, *(() if action == "daemon-reload" else (UNIT,)))
            if status != 0:
                raise UsageError(f"systemctl {action} {UNIT}: {why or status}; the unit is {self.path}")
        show(f"this machine's node is a service, {self.path}")
        show(f"its log: journalctl {'' if self.is_system else '--user '}-fu {UNIT.removesuffix('.service')}")
        self._linger()
        show(f"to undo this: {shlex.join([*_program(), 'join', '--uninstall-service'])}")

    def _linger(self) -> None:
        """Let a user's service start at boot and outlive the login; where that is not allowed, print what allows it."""
        if self.is_system:
            return
        user = getpass.getuser()
        if self.run(("loginctl", "enable-linger", user))[0] == 0:
            return
        show(f"it ends when you log out, until you allow it to stay: sudo loginctl enable-linger {shlex.quote(user)}")

    def uninstall(self) -> None:
        """Stop the service and remove its unit. Raises UsageError if there is none."""
        if not self.path.exists():
            raise UsageError(f"there is no service: {self.path} does not exist")
        status, why = self._systemctl("disable", "--now", UNIT)
        if status != 0:
            raise UsageError(f"systemctl disable --now {UNIT}: {why or status}; nothing was removed")
        self.path.unlink()
        self._systemctl("daemon-reload")
        show(f"the service has ended, and {self.path} is removed; the cluster's key and the kept weights stay")
        if not self.is_system:
            show("lingering stays as it is; `loginctl disable-linger` ends it")

    def _systemctl(self, action: str, *arguments: str) -> tuple[int, str]:
        return self.run(("systemctl", *(() if self.is_system else ("--user",)), action, *arguments))


def find_service(platform: str = sys.platform) -> Service:
    """The service of whoever runs this. Raises UsageError on systems without systemd."""
    if platform in _OTHERS or not hasattr(os, "geteuid"):
        kind = _OTHERS.get(platform, f"services of {platform}")
        raise UsageError(
            f"{kind} are not supported: only systemd's are; run `mdi join` from your system's own service manager"
        )
    if shutil.which("systemctl") is None:
        raise UsageError("this system has no systemctl: only systemd's services are supported")
    if os.geteuid() == 0:
        return Service(SYSTEM_FOLDER, True)
    settings = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return Service(settings / "systemd" / "user", False)


def unit(arguments: Sequence[str], is_system: bool, environment: Mapping[str, str]) -> str:
    """The text of the unit.

    Args:
        environment: of this process; what the node reads of it stays the same.
    """
    kept = {name: environment[name] for name in _KEPT if environment.get(name)}
    if not any(part.endswith("-packages") for part in Path(mdi.__file__).parts):  # a checkout
        kept["PYTHONPATH"] = str(Path(mdi.__file__).parents[1])
    sudo_user = environment.get("SUDO_USER")
    lines = [
        "[Unit]",
        "Description=MDI-LLM node",
        "Wants=network-online.target" if is_system else "",
        "After=network-online.target" if is_system else "",
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        "Type=exec",
        f"User={sudo_user}" if is_system and sudo_user else "",
        *(f"Environment={_quoted(f'{name}={value}')}" for name, value in sorted(kept.items())),
        f"ExecStart={' '.join(_quoted(word).replace('$', '$$') for word in [*_program(), 'join', *arguments])}",
        "# The node ends with 143 when it was asked to end.",
        "SuccessExitStatus=143",
        "Restart=always",
        "RestartSec=5",
        "TimeoutStopSec=30",
        "NoNewPrivileges=yes",
        "",
        "[Install]",
        f"WantedBy={'multi-user' if is_system else 'default'}.target",
    ]
    return "\n".join(line for line, before in zip(lines, ["", *lines], strict=False) if line or before) + "\n"


def arguments_of(options: Options, **changes: Any) -> list[str]:
    """The command line that gives these options again, in any folder; what is a flag's default is left out.

    Args:
        changes: values of options, by their names; None leaves one out.
    """
    words: list[str] = []
    for option in options.declared:
        value = changes.get(option.name, options.given.get(option.dest))
        if value is None or value is False or value == [] or (value == option.default and option.name not in changes):
            continue
        if option.type is Path:
            value = Path(value).expanduser().absolute()
        words += [option.flag] if value is True else [option.flag, str(value)]
    return words


def by_root(arguments: Sequence[str]) -> str:
    """The line that installs the same for the system, to be run once by this user."""
    return "sudo " + shlex.join([*_program(), "join", "--install-service", *arguments])


def _program() -> list[str]:
    return [sys.executable, "-m", "mdi.cli"]


def _quoted(text: str) -> str:
    """A word of a unit's line: quoted, and without specifiers (systemd.syntax(7), systemd.unit(5)). Raises UsageError."""
    if "\n" in text or "\r" in text:
        raise UsageError(f"{text[:80]!r} has a line end, which no line of a service can have")
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"' if not escaped or any(c in escaped for c in " \t'\"\\;") else escaped
