"""The control port of a node with a cluster key: strangers learn its name, and what they send is not read."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster_keys import key_file
from mdi.control import exchange as control_exchange
from mdi.control.client import ControlClient
from mdi.control.exchange import HttpAnswer, exchange, prepared
from mdi.control.messages import InitRequest, PartSpec
from mdi.control.server import ControlServer, StatusOnly
from mdi.control.signing import (
    BODY_HEADER,
    NONCE_HEADER,
    NONCE_S,
    SIGNATURE_HEADER,
    Gate,
    NoncesGiven,
    body_hash,
    is_answer,
    sign_answer,
    sign_request,
)
from mdi.errors import AccessError, ControlError
from mdi.model.plain import ModelConfig
from mdi.net.keys import KeyFile, new_secret, write_keys
from mdi.spec.cluster import NodeConfig
from mdi.spec.extent import Extent
from mdi.spec.model_id import ModelId

DEADLINE_S = 30.0
REQUEST = InitRequest(
    run="0123456789abcdef", epoch="0123456789abcdef", index=1, names=("starter", "secondary0"), placement="p",
    next_addr="127.0.0.1", next_port=1, model=ModelId("tiny", ModelConfig(n_layer=5), "c", "float32"),
    blocks=(1, 2), parts=(PartSpec("block.1", "1" * 64, 10),), extent=Extent(9),
)  # fmt: skip
RUN = "0123456789abcdef"
STATUS = {"name": "secondary0", "version": "9", "state": "IDLE", "model": "secret"}


class Noting(StatusOnly):
    """Notes the runs that it is told to end."""

    def __init__(self) -> None:
        self.stopped: list[str] = []

    def status(self, run: str | None) -> dict[str, Any]:
        return dict(STATUS, run=run)

    def stop(self, run: str, leave: bool, ring: str | None = None) -> None:
        self.stopped.append(run)


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    return key_file(tmp_path / "cluster.key")


@pytest.mark.parametrize(
    "request_", [b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\nX: =?utf-8?b?////?=\r\n\r\n"]
)
def test_a_request_that_no_page_gets_tells_nothing_of_the_program(
    served: tuple[Noting, ControlServer], request_: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", served[1].port), DEADLINE_S) as sock:
        sock.sendall(request_)
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert int(head.split()[1]) in (400, 500) and json.loads(body).keys() == {"error", "code"}
    assert b"Traceback" not in answer and b".py" not in answer


@pytest.fixture
def served(keys: KeyFile) -> Iterator[tuple[Noting, ControlServer]]:
    node = Noting()
    server = ControlServer(node, "127.0.0.1", 0, "secondary0", keys)
    yield node, server
    server.close()


@pytest.fixture
def node(served: tuple[Noting, ControlServer]) -> Noting:
    return served[0]


@pytest.fixture
def port(served: tuple[Noting, ControlServer]) -> int:
    return served[1].port


def client_of(port: int, keys: KeyFile | None) -> ControlClient:
    return ControlClient(NodeConfig("secondary0", "127.0.0.1", port, 0), keys)


def send(port: int, method: str, target: str, body: bytes = b"", headers: dict[str, str] | None = None) -> HttpAnswer:
    request = prepared(method, "127.0.0.1", port, target, body)
    request.headers.update(headers or {})
    return exchange(request, "127.0.0.1", port, DEADLINE_S, DEADLINE_S)


def signed(port: int, secret: bytes, body: bytes, method: str = "PUT", target: str = "/stop") -> dict[str, str]:
    nonce = send(port, "GET", "/").headers[NONCE_HEADER]
    hashed = body_hash(body)
    signature = sign_request(secret, method, target, hashed, nonce)
    return {NONCE_HEADER: nonce, SIGNATURE_HEADER: signature, BODY_HEADER: hashed}


STOP = json.dumps({"run": RUN}).encode()


def test_who_has_the_key_is_served(node: Noting, port: int, keys: KeyFile) -> None:
    client = client_of(port, keys)
    assert client.status() == dict(STATUS, run=None)
    client.stop(RUN)
    with pytest.raises(ControlError) as caught:  # its own words arrive, too
        client.init(REQUEST)
    assert (caught.value.status, caught.value.code) == (409, "role")
    assert node.stopped == [RUN]


def test_a_stranger_learns_name_version_and_state(port: int) -> None:
    assert json.loads(send(port, "GET", "/").body) == {key: STATUS[key] for key in ("name", "version", "state")}


@pytest.mark.parametrize(
    "where", ["POST /init", f"PUT /parts/{'a' * 64}?run={RUN}&offset=0", "PUT /stop", "POST /profile", "POST /probe",
              "PUT /echo", "GET /nothing", "PUT /stop?x=1"],
)  # fmt: skip
def test_everything_else_answers_401_before_a_body_is_read(where: str, node: Noting, port: int) -> None:
    method, target = where.split()
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as sock:
        sock.sendall(f"{method} {target} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n".encode())
        answer = sock.recv(65536)  # nothing of the body has been sent
    assert answer.split(b" ")[1] == b"401"
    assert not node.stopped


@pytest.mark.parametrize("has_key", [True, False])
def test_another_key_or_none_is_told_in_one_line(has_key: bool, port: int, node: Noting, tmp_path: Path) -> None:
    client = client_of(port, key_file(tmp_path / "other") if has_key else None)
    for ask in (client.status, lambda: client.stop(RUN)):
        with pytest.raises(ControlError) as caught:
            ask()
        assert (caught.value.code, caught.value.problem) == (AccessError.code, "key")
        assert len(str(caught.value).splitlines()) == 1 and "--key" in str(caught.value)
    assert not node.stopped


def test_a_node_without_a_key_is_not_believed(keys: KeyFile) -> None:
    server = ControlServer(Noting(), "127.0.0.1", 0, "secondary0")
    try:
        with pytest.raises(ControlError) as caught:
            client_of(server.port, keys).status()
        assert caught.value.code == AccessError.code
    finally:
        server.close()


def test_a_request_is_good_once_and_as_it_was_signed(node: Noting, port: int, keys: KeyFile) -> None:
    headers = signed(port, keys.first, STOP)
    other = STOP.replace(b"0", b"1")
    longer = {**headers, BODY_HEADER: body_hash(other)}
    for body, target, changed in (
        (other, "/stop", headers), (other, "/stop", longer), (STOP, "/stop?run=x", headers), (STOP, "/init", headers)
    ):  # fmt: skip
        fresh = signed(port, keys.first, STOP) if changed is headers else changed
        assert send(port, "PUT", target, body, fresh).status == 401
    assert not node.stopped
    assert send(port, "PUT", "/stop", STOP, headers).status == 200
    assert send(port, "PUT", "/stop", STOP, headers).status == 401
    assert node.stopped == [RUN]


def test_a_nonce_of_another_node_or_of_before_a_restart_is_refused(node: Noting, port: int, keys: KeyFile) -> None:
    server = ControlServer(Noting(), "127.0.0.1", 0, "secondary0", keys)
    try:
        headers = signed(server.port, keys.first, STOP)
    finally:
        server.close()
    answer = send(port, "PUT", "/stop", STOP, headers)
    assert answer.status == 401 and json.loads(answer.body)["code"] == "nonce"
    client = client_of(port, keys)
    client.nonces.keep(headers[NONCE_HEADER])
    client.stop(RUN)  # asks for another one, and succeeds
    assert node.stopped == [RUN]


def test_nonces_grow_old_and_strangers_leave_nothing_behind() -> None:
    now = 0.0
    nonces = NoncesGiven(lambda: now)
    given = [nonces.give() for _ in range(1000)]
    assert len(set(given)) == 1000 and not nonces.used
    assert all(map(nonces.is_fresh, given)) and nonces.use(given[0]) and not nonces.use(given[0])
    now = NONCE_S + 1
    assert not nonces.is_fresh(given[0])
    now = 3 * NONCE_S
    assert nonces.use(nonces.give()) and len(nonces.used) == 1


def headers_for(nonce: str, secret: bytes) -> dict[str, str]:
    """Of a signed `PUT /stop`."""
    hashed = body_hash(STOP)
    signature = sign_request(secret, "PUT", "/stop", hashed, nonce)
    return {
        NONCE_HEADER: nonce, SIGNATURE_HEADER: signature, BODY_HEADER: hashed, "Content-Length": str(len(STOP)),
    }  # fmt: skip


def test_a_request_that_is_played_again_is_refused_for_as_long_as_its_nonce_is_good(keys: KeyFile) -> None:
    now = 1000.0
    gate = Gate(keys, "secondary0", lambda: now)

    def nonce() -> str:
        return gate.headers(None, 200, b"")[NONCE_HEADER]

    request = headers_for(nonce(), keys.first)
    late = headers_for(nonce(), keys.first)
    assert gate.ask("PUT", "/stop", request, "127.0.0.1") is not None
    for age_s in (0.0, 1.0, 59.0, 60.5, 61.0, 90.0, 119.0, NONCE_S, NONCE_S + 0.5, 3 * NONCE_S):
        now = 1000.0 + age_s
        gate.ask("PUT", "/stop", headers_for(nonce(), keys.first), "127.0.0.1")  # others ask meanwhile
        with pytest.raises(ControlError) as caught:
            gate.ask("PUT", "/stop", request, "127.0.0.1")
        assert caught.value.code == "nonce"
        if age_s == 119.0:
            assert gate.ask("PUT", "/stop", late, "127.0.0.1") is not None, "one that was not used is still good"


def test_who_changes_the_next_nonce_of_an_answer_is_not_believed(
    node: Noting, port: int, keys: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody in between could else decide with which nonces the next requests are signed."""
    client = client_of(port, keys)
    client.stop(RUN)
    other = send(port, "GET", "/").headers[NONCE_HEADER]

    def change(*args: Any) -> HttpAnswer:
        found = exchange(*args)
        assert SIGNATURE_HEADER in found.headers
        return replace(found, headers={**found.headers, NONCE_HEADER: other})

    monkeypatch.setattr(control_exchange, "exchange", change)
    with pytest.raises(ControlError) as caught:
        client.stop(RUN)
    assert (caught.value.code, caught.value.problem) == (AccessError.code, "key")
    assert client.nonces.take() is None, "what it names is not used"


@pytest.mark.parametrize("changed", ["request", "status", "body", "nonce"])
def test_a_signed_answer_belongs_to_its_request_and_covers_all_of_itself(changed: str) -> None:
    fields: dict[str, Any] = {"request": "signature", "status": 200, "body": b"{}", "nonce": "12"}
    secret = bytes(32)
    signature = sign_answer(secret, *fields.values())
    assert is_answer(signature, secret, *fields.values())
    fields[changed] = {"request": "another", "status": 409, "body": b"[]", "nonce": "13"}[changed]
    assert not is_answer(signature, secret, *fields.values())


def test_keys_change_under_a_node_that_runs(node: Noting, port: int, keys: KeyFile, tmp_path: Path) -> None:
    """The node is one step behind or before its starter, each time."""
    old, new = keys.first, new_secret()
    theirs = key_file(tmp_path / "starter.key", old)
    client = client_of(port, theirs)
    for step in ((old, new), (new, old), (new,)):
        write_keys(keys.path, step)
        client.stop(RUN)
        write_keys(theirs.path, step)
        client.stop(RUN)
    assert len(node.stopped) == 6
    write_keys(theirs.path, (old,))
    with pytest.raises(ControlError):
        client.stop(RUN)


def test_strangers_cost_one_line_a_minute(keys: KeyFile, caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    gate = Gate(keys, "secondary0", lambda: now)
    with caplog.at_level("INFO", "mdi"):
        for _ in range(1000):
            gate.refusal("10.0.0.1")
        assert len(caplog.records) == 1
        now = 61.0
        gate.refusal("10.0.0.1")
    assert len(caplog.records) == 2 and "1000" in caplog.records[1].getMessage()


def test_no_changed_request_or_answer_is_accepted(node: Noting, port: int, keys: KeyFile) -> None:
    draw = random.Random(5)
    gate = Gate(keys, "secondary0")
    nonce = gate.headers(None, 200, b"")[NONCE_HEADER]
    hashed = body_hash(STOP)
    good = [
        "PUT",
        "/stop",
        nonce,
        sign_request(keys.first, "PUT", "/stop", hashed, nonce),
        hashed,
    ]
    for _ in range(3000):
        fields = list(good)
        which = draw.randrange(len(fields))
        text = list(fields[which])
        text[draw.randrange(len(text))] = chr(draw.randrange(33, 127))
        fields[which] = "".join(text)
        if [*map(str.lower, fields)] == [*map(str.lower, good)]:
            continue
        method, target, *rest = fields
        headers = dict(zip((NONCE_HEADER, SIGNATURE_HEADER, BODY_HEADER), rest, strict=True))
        with pytest.raises(ControlError):
            gate.ask(method, target, headers, "127.0.0.1")
    headers = dict(zip((NONCE_HEADER, SIGNATURE_HEADER, BODY_HEADER), good[2:], strict=True))
    assert gate.ask("PUT", "/stop", headers, "127.0.0.1") is not None
