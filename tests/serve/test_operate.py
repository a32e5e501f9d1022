"""Operators: who is one, invitations of machines, pulls."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from hub_server import HubModel, HubServer
from mdi.cli.serve_settings import read_key
from mdi.control.client import ask_to_join
from mdi.control.discovery import Guests
from mdi.errors import ControlError, UsageError
from mdi.net.invitation import VALID_S, Guest, GuestNode
from mdi.net.keys import KeyFile, new_secret, text_of, write_keys
from mdi.serve.api import make_app
from mdi.serve.api_errors import ApiError
from mdi.serve.api_state import ApiState
from mdi.serve.catalog import Catalog
from mdi.serve.engine_client import EngineClient
from mdi.serve.machines import Machines
from mdi.serve.operate import Operator, Pull
from mdi.serve.process import ServeSettings
from tiny_models import tiny_hf

USER, OPERATOR = read_key(1, "user-secret anna"), read_key(2, "operator-secret otto 3 operator")
LOCAL, AWAY = "127.0.0.1", "192.168.1.77"


def ask(
    method: str, path: str, settings: ServeSettings, client: str = LOCAL, scheme: str = "http", body: Any = None,
    **headers: str,
) -> httpx.Response:  # fmt: skip
    async def asked() -> httpx.Response:
        catalog = Catalog(Path("nowhere"), Path("nowhere"))
        app = make_app(ApiState(settings, EngineClient(lambda: None), catalog))
        transport = httpx.ASGITransport(app, client=(client, 1234))
        async with httpx.AsyncClient(transport=transport, base_url=f"{scheme}://127.0.0.1:8000") as http:
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            return await http.request(method, path, json=body, headers=given)

    return asyncio.run(asked())


OPEN = ServeSettings()
KEYS = ServeSettings(keys=(USER, OPERATOR), origins=("http://friend.example",))


@pytest.mark.parametrize(
    ("settings", "client", "headers", "status"),
    [
        (OPEN, LOCAL, {}, 200),
        (OPEN, "::1", {}, 200),
        (OPEN, AWAY, {}, 403),
        (OPEN, LOCAL, {"x_forwarded_for": AWAY}, 403),
        (OPEN, LOCAL, {"origin": "http://127.0.0.1:8000"}, 200),
        (ServeSettings(origins=("*",)), LOCAL, {"origin": "http://127.0.0.1:9000"}, 403),
        (ServeSettings(origins=("*",)), LOCAL, {"origin": "http://friend.example"}, 403),
        (KEYS, LOCAL, {}, 401),
        (KEYS, LOCAL, {"authorization": "Bearer user-secret"}, 403),
        (KEYS, AWAY, {"authorization": "Bearer operator-secret"}, 200),
        (KEYS, AWAY, {"authorization": "Bearer operator-secret", "origin": "http://friend.example"}, 403),
    ],
)
def test_who_is_an_operator(settings: ServeSettings, client: str, headers: dict[str, str], status: int) -> None:
    answer = ask("GET", "/api/models", settings, client, **headers)
    assert answer.status_code == status
    assert (ask("DELETE", "/api/machines", settings, client, **headers).status_code == 503) == (status == 200)
    if status != 401:
        assert ask("GET", "/api/ring", settings, client, **headers).json()["is_operator"] == (status == 200)


@pytest.mark.parametrize(
    ("client", "scheme", "status", "code"),
    [(AWAY, "http", 403, "not_private"), (AWAY, "https", 503, "engine_ended"), (LOCAL, "http", 503, "engine_ended")],
)
def test_a_code_is_shown_on_https_or_on_the_own_machine(client: str, scheme: str, status: int, code: str) -> None:
    """503: the engine was asked, which is not there."""
    answer = ask("POST", "/api/machines", KEYS, client, scheme, authorization="Bearer operator-secret")
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"do": "pull", "model": "--help"}, 400), ({"do": "pull", "model": "../../etc"}, 400), ({"do": "pull"}, 400),
        ({"do": "remove", "model": "a/b"}, 400), ([], 400), ({"do": "pull", "model": "a/" + "b" * 5000}, 413),
        ({"do": "load", "model": "a/b"}, 404),
    ],
)  # fmt: skip
def test_what_an_operator_may_not_ask(body: Any, status: int) -> None:
    assert ask("POST", "/api/models", OPEN, body=body).status_code == status


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("long-secret", ("key1", 0, "user")),
        ("long-secret operator", ("key1", 0, "operator")),
        ("long-secret anna 5", ("anna", 5, "user")),
        ("long-secret anna -5 operator", ("anna", -5, "operator")),
        ("long-secret anna user", ("anna", 0, "user")),
    ],
)
def test_roles_of_keys(line: str, wanted: tuple[str, int, str]) -> None:
    key = read_key(1, line)
    assert (key.name, key.priority, key.role) == wanted


def test_a_role_that_there_is_not() -> None:
    with pytest.raises(UsageError):
        read_key(1, "long-secret anna 5 root")
    with pytest.raises(UsageError, match="^API key 1: expected at least 8 characters without blanks$"):
        read_key(1, "sekret")


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def machines(tmp_path: Path) -> Any:
    write_keys(tmp_path / "key", (new_secret(),))
    clock, guests = Clock(), Guests(tmp_path / "nodes")
    made = Machines(KeyFile(tmp_path / "key"), LOCAL, guests=guests, clock=clock)
    yield made, clock, guests, KeyFile(tmp_path / "key")
    made.close()


def where(told: dict[str, Any]) -> tuple[int, str]:
    """Port and code of the line for a board."""
    _, _, place, code = told["line"].split()
    return int(place.rpartition(":")[2]), code


def test_a_machine_joins_once_and_the_log_has_no_code(machines: Any, caplog: pytest.LogCaptureFixture) -> None:
    made, _, guests, keys = machines
    caplog.set_level(logging.DEBUG)
    told = made.invite("otto")
    port, code = where(told)
    assert (
        told["seconds_left"] == VALID_S
        and len(told["qr"]) == len(told["qr"][0])
        and set("".join(told["qr"])) == {"0", "1"}
    )
    guest = Guest(code, GuestNode("board", LOCAL, 8088, 5088))
    assert guest.open(ask_to_join(LOCAL, port, guest.request)).decode() == text_of(keys.keys)
    assert made.state() == {"is_open": False, "seconds_left": 0, "last": "joined"}
    assert [node.name for node in guests.nodes()] == ["board"]
    with pytest.raises(ControlError):
        ask_to_join(LOCAL, port, Guest(code).request)
    assert "otto" in caplog.text and "board" in caplog.text
    assert code not in caplog.text and code.replace("-", "") not in caplog.text


@pytest.mark.parametrize("how", ["revoked", "too late", "another"])
def test_an_invitation_that_is_over(machines: Any, how: str) -> None:
    made, clock, _, _ = machines
    port, code = where(made.invite("otto"))
    if how == "revoked":
        made.revoke("otto")
    elif how == "another":
        made.invite("otto")
    else:
        clock.now_s += VALID_S + 1
    state = made.state()
    assert state["is_open"] == (how == "another") and state["last"] == ("" if how == "another" else how)
    with pytest.raises(ControlError):
        ask_to_join(LOCAL, port, Guest(code).request)


def test_without_a_key_nobody_is_invited() -> None:
    with pytest.raises(UsageError):
        Machines().invite("otto")
    assert Machines().state()["is_open"] is False


def test_a_pull_that_succeeds_puts_the_model_into_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf, _ = tiny_hf(tmp_path / "hf")
    files = {path.name: path.read_bytes() for path in hf.iterdir()}
    with HubServer({"org/tiny": HubModel(files)}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        pull = Pull("org/tiny")
        asyncio.run(pull.run(tmp_path / "models"))
    assert (pull.state, pull.done) == ("done", 1.0), pull.text
    assert {name: (tmp_path / "models" / "org" / "tiny" / name).read_bytes() for name in files} == files


def test_a_pull_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HubServer({}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        pull = Pull("org/unknown")
        asyncio.run(pull.run(tmp_path))
    assert pull.state == "failed" and "org/unknown" in pull.text


def test_a_pull_is_stopped_and_reads_its_progress(tmp_path: Path) -> None:
    pull = Pull("org/name")
    pull.note("", "Fetching 5 files:  40%|####      | 2/5", "\x1b[A")
    assert pull.done == 0.4

    async def scenario() -> None:
        running = asyncio.create_task(pull.run(tmp_path))
        while pull.process is None:
            await asyncio.sleep(0)
        pull.stop()
        await running

    asyncio.run(scenario())
    assert pull.state == "stopped" and pull.process is not None and pull.process.returncode != 0


def test_two_models_are_pulled_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        ending: dict[str, asyncio.Event] = {}

        async def run(pull: Pull, home: Path) -> None:
            await ending.setdefault(pull.name, asyncio.Event()).wait()
            pull.state = "done"

        monkeypatch.setattr(Pull, "run", run)
        operator = Operator(ApiState(OPEN, EngineClient(lambda: None), Catalog(tmp_path, tmp_path)))
        operator.pull("org/one")
        operator.pull("org/two")
        operator.pull("org/one")  # is under way
        with pytest.raises(ApiError) as caught:
            operator.pull("org/three")
        assert caught.value.status == 409 and list(operator.pulls) == ["org/one", "org/two"]
        await asyncio.sleep(0)
        ending["org/one"].set()
        while operator.pulls["org/one"].state == "running":
            await asyncio.sleep(0)
        operator.pull("org/three")
        await asyncio.sleep(0)
        for name in ("org/two", "org/three"):
            ending[name].set()
        while any(pull.state == "running" for pull in operator.pulls.values()):
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(scenario())
