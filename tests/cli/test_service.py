"""`mdi join --install-service`, with a systemd that only records what it is asked."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from mdi.cli import join, options_of, parser_of
from mdi.cli.service import UNIT, Service, arguments_of, by_root, find_service, unit
from mdi.errors import UsageError


class Systemd:
    """Args: failing: commands that fail, by a word in them."""

    def __init__(self, *failing: str) -> None:
        self.failing, self.asked = failing, []

    def __call__(self, command: Sequence[str]) -> tuple[int, str]:
        self.asked.append(" ".join(command))
        return (1, "no") if any(word in command for word in self.failing) else (0, "")


def test_a_user_gets_a_unit_that_starts_now_and_at_boot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    systemd = Systemd()
    Service(tmp_path / "user", False, systemd).install(["--key", "k"])
    assert systemd.asked[:4] == [
        "systemctl --user daemon-reload",
        "systemctl --user daemon-reload",
        f"systemctl --user enable {UNIT}",
        f"systemctl --user restart {UNIT}",
    ]
    assert systemd.asked[4].startswith("loginctl enable-linger ")
    assert "join --key k\n" in (tmp_path / "user" / UNIT).read_text()
    assert "--uninstall-service" in capsys.readouterr().out


def test_lingering_that_is_not_allowed_is_a_line_for_sudo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Service(tmp_path, False, Systemd("loginctl")).install([])
    assert "sudo loginctl enable-linger" in capsys.readouterr().out


def test_without_a_manager_of_the_user_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as e:
        Service(tmp_path / "user", False, Systemd("daemon-reload")).install(["--key", "a b"])
    assert by_root(["--key", "a b"]) in str(e.value) and not (tmp_path / "user").exists()


def test_uninstalling_removes_the_unit_once_the_node_has_ended(tmp_path: Path) -> None:
    systemd = Systemd()
    service = Service(tmp_path, True, systemd)
    with pytest.raises(UsageError):
        service.uninstall()
    service.install([])
    refusing = Service(tmp_path, True, Systemd("disable"))
    with pytest.raises(UsageError):
        refusing.uninstall()
    assert service.path.exists()
    service.uninstall()
    assert not service.path.exists() and f"systemctl disable --now {UNIT}" in systemd.asked


def test_the_service_gets_the_flags_that_were_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parser = parser_of(join)
    typed = "10.0.0.1:8088 CODE --install-service --kv-memory 2G --chunk part --no-announce"
    options = options_of(parser, parser.parse_args(shlex.split(typed)))
    found = arguments_of(options, where=None, code=None, install_service=None, key=Path("/k"), port=8088)
    assert sorted(found) == sorted(
        ["--key", "/k", "--port", "8088", "--kv-memory", "2G", "--chunk", str(tmp_path / "part"), "--no-announce"]
    )
    again = options_of(parser, parser.parse_args(found))
    assert again.kv_memory == options.kv_memory and again.no_announce and again.where is None


ODD = ["--key", '/a b/50%$x"\\é', "", "semi;colon"]


def test_a_unit_keeps_odd_words_and_no_secrets(tmp_path: Path) -> None:
    text = unit(ODD, True, {"MDI_API_KEY": "secret", "MDI_CACHE_DIR": "/x y%", "SUDO_USER": "me"})
    assert "secret" not in text and "User=me" in text and 'Environment="MDI_CACHE_DIR=/x y%%"' in text
    assert "User=" not in unit(ODD, False, {"SUDO_USER": "me"})
    assert text.splitlines()[-1] == "WantedBy=multi-user.target"
    line = next(line for line in text.splitlines() if line.startswith("ExecStart="))
    # Read again by the rules that it was written by: specifiers and variables, then quotes.
    words = shlex.split(line.removeprefix("ExecStart=").replace("%%", "%").replace("$$", "$"))
    assert words[-len(ODD) :] == ODD


def test_systemd_replaces_nothing_in_a_unit() -> None:
    line = next(line for line in unit(["$HOME", "a$b", "50%"], True, {}).splitlines() if line.startswith("ExecStart="))
    assert line.endswith(" join $$HOME a$$b 50%%")


@pytest.mark.parametrize("end", ["\n", "\r"])
def test_a_word_with_a_line_end_is_refused(end: str) -> None:
    name, folder = f"a{end}User=root", f"/x{end}y"
    for bad, words, environment in ((name, ["--name", name], {}), (folder, [], {"MDI_CACHE_DIR": folder})):
        with pytest.raises(UsageError, match=re.escape(repr(bad)[1:-1])):
            unit(words, True, environment)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("is_system", [True, False])
def test_systemd_reads_the_unit(is_system: bool, tmp_path: Path) -> None:
    path = tmp_path / UNIT
    path.write_text(unit(ODD, is_system, {"MDI_CACHE_DIR": "/x y"}))
    done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, [line for line in done.stderr.splitlines() if UNIT in line]) == (0, [])


@pytest.mark.parametrize(("platform", "name"), [("darwin", "launchd"), ("win32", "Windows")])
def test_other_services_are_refused_by_name(platform: str, name: str) -> None:
    with pytest.raises(UsageError) as e:
        find_service(platform)
    assert name in str(e.value)
