"""A board joins by a code: once, in time, and nobody else."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from cluster_keys import key_file
from mdi.cli import key as cli_key
from mdi.cli import main
from mdi.cli.join import fetch
from mdi.control.discovery import Guests
from mdi.control.exchange import HttpAnswer, exchange, prepared
from mdi.control.server import ControlServer, StatusOnly
from mdi.errors import AccessError, ControlError, UsageError
from mdi.net.invitation import VALID_S, Guest, GuestNode, Invitation, Invitations, code_bytes, new_code
from mdi.net.keys import KeyFile, text_of

CONTENT = b"the keys"
DEADLINE_S = 30.0


class Inviting(StatusOnly):
    def status(self, run: str | None) -> dict[str, Any]:
        return {"name": "invitation", "version": "9", "state": "IDLE"}


NODE = GuestNode("board", "192.0.2.7", 8088, 5088)


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    return key_file(tmp_path / "cluster.key")


@pytest.fixture
def invitation(keys: KeyFile) -> Invitation:
    return Invitation(text_of(keys.keys).encode())


@pytest.fixture
def port(keys: KeyFile, invitation: Invitation) -> Iterator[int]:
    server = ControlServer(Inviting(), "127.0.0.1", 0, "invitation", keys, invitation)
    yield server.port
    server.close()


def test_the_code_may_be_typed_in_any_way() -> None:
    code = new_code()
    assert code_bytes(code.lower().replace("-", " ")) == code_bytes(code)
    for wrong in ("", "ABCD", code + "A", "€" * 16, code[:-1] + "9"):
        with pytest.raises(UsageError):
            code_bytes(wrong)


def test_who_has_the_code_gets_the_content_once() -> None:
    invitation = Invitation(CONTENT)
    for wrong in (new_code(), new_code()):
        with pytest.raises(AccessError):
            invitation.answer(Guest(wrong).request)
    guest = Guest(invitation.code)
    assert guest.open(invitation.answer(guest.request)) == CONTENT and invitation.used.is_set()
    with pytest.raises(AccessError):
        invitation.answer(Guest(invitation.code).request)


def test_an_invitation_ends_by_itself() -> None:
    now = 0.0
    invitation = Invitation(CONTENT, lambda: now)
    now = VALID_S + 1
    with pytest.raises(AccessError):
        invitation.answer(Guest(invitation.code).request)


def test_somebody_in_between_reads_and_changes_nothing() -> None:
    """It puts a public value of its own in the place of the guest's or of the host's, or changes what comes back."""
    draw = random.Random(5)
    code = new_code()
    for _ in range(300):
        invitation = Invitation(CONTENT)
        guest, between = Guest(invitation.code), Guest(code)
        with pytest.raises(AccessError):
            invitation.answer({**guest.request, "public": between.request["public"]})
        answer = invitation.answer(guest.request)
        with pytest.raises(AccessError):
            between.open(answer)
        which = draw.choice(list(answer))
        data = bytearray(bytes.fromhex(answer[which]))
        data[draw.randrange(len(data))] ^= draw.randrange(1, 128)  # X25519 looks away from the highest bit of a value
        with pytest.raises(AccessError):
            guest.open({**answer, which: data.hex()})


def answer_made_by_hand(request: dict[str, str], salt: bytes | None, content: bytes) -> dict[str, str]:
    """What a host says that derives the key as docs/operating.md describes it, with these bytes for those of the code."""
    private = X25519PrivateKey.generate()
    mine, theirs = private.public_key().public_bytes_raw(), bytes.fromhex(request["public"])
    shared = private.exchange(X25519PublicKey.from_public_bytes(theirs))
    key = HKDF(SHA256(), 32, salt=salt, info=b"mdi join answer" + theirs + mine).derive(shared)
    return {"public": mine.hex(), "sealed": ChaCha20Poly1305(key).encrypt(bytes(12), content, None).hex()}


def test_a_host_that_does_not_know_the_code_gives_nobody_a_key() -> None:
    """Somebody in between answers with messages of its own, which are right but for the code, and names its own key."""
    code = new_code()
    guest = Guest(code)
    for salt in (None, b"", bytes(10), bytes(32), code_bytes(new_code()), bytes.fromhex(guest.request["proof"])):
        with pytest.raises(AccessError):
            guest.open(answer_made_by_hand(guest.request, salt, b"the key of somebody else"))
    assert guest.open(answer_made_by_hand(guest.request, code_bytes(code), CONTENT)) == CONTENT


def test_an_answer_to_another_guest_with_the_same_code_does_not_open() -> None:
    code = new_code()
    guest, other = Guest(code), Guest(code)
    with pytest.raises(AccessError):
        guest.open(answer_made_by_hand(other.request, code_bytes(code), CONTENT))


def post_join(port: int, body: bytes) -> HttpAnswer:
    return exchange(prepared("POST", "127.0.0.1", port, "/join", body), "127.0.0.1", port, DEADLINE_S, DEADLINE_S)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b"null", b'{"public": 1, "proof": 2}', b'{"public": "00", "proof": ""}']
)
def test_what_is_no_request_is_refused(body: bytes, port: int, invitation: Invitation) -> None:
    found = post_join(port, body)
    assert found.status in (400, 401) and not invitation.used.is_set()
    assert "Traceback" not in json.loads(found.body)["error"]


def test_a_board_fetches_the_keys_over_the_network(
    port: int, invitation: Invitation, keys: KeyFile, tmp_path: Path
) -> None:
    path = tmp_path / "board" / "cluster.key"
    with pytest.raises(ControlError) as caught:
        fetch("127.0.0.1", port, new_code(), path)
    assert caught.value.code == AccessError.code and not path.exists()
    fetch("127.0.0.1", port, invitation.code, path)
    assert KeyFile(path).keys == keys.keys
    with pytest.raises(ControlError):
        fetch("127.0.0.1", port, invitation.code, tmp_path / "another")


def test_the_key_of_another_cluster_is_kept(port: int, invitation: Invitation, tmp_path: Path) -> None:
    other = key_file(tmp_path / "other.key")
    before = other.path.read_bytes()
    where = f"127.0.0.1:{port}"
    assert main(["join", where, invitation.code, "--key", str(other.path), "--no-start"]) == 2
    assert other.path.read_bytes() == before and not invitation.used.is_set(), "the code is still good"
    assert main(["join", where, invitation.code, "--key", str(tmp_path / "new.key"), "--no-start"]) == 0


def test_nobody_is_invited_by_a_node_of_a_run(keys: KeyFile) -> None:
    server = ControlServer(Inviting(), "127.0.0.1", 0, "secondary0", keys)
    try:
        assert post_join(server.port, b"{}").status == 404
    finally:
        server.close()


def test_key_and_join_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, theirs = tmp_path / "cluster.key", tmp_path / "board.key"
    assert main(["key", str(path)]) == 0
    first = KeyFile(path).keys
    assert main(["key", str(path)]) == 2 and KeyFile(path).keys == first
    for step, n_keys in (("--add", 2), ("--switch", 2), ("--drop", 1)):
        assert main(["key", str(path), step]) == 0
        assert len(KeyFile(path).keys) == n_keys
    assert KeyFile(path).keys != first
    capsys.readouterr()

    told: list[str] = []
    is_reported = threading.Event()

    def show(text: str) -> None:
        told.append(text)
        is_reported.set()

    monkeypatch.setattr(cli_key, "show", show)
    status: list[int] = []
    free = ControlServer(Inviting(), "127.0.0.1", 0, "x")
    port = free.port
    free.close()
    thread = threading.Thread(
        target=lambda: status.append(main(["key", str(path), "--invite", "--listen", f"127.0.0.1:{port}"]))
    )
    thread.start()
    assert is_reported.wait(DEADLINE_S)
    assert main(["join", *told[0].split()[-2:], "--key", str(theirs), "--no-start"]) == 0
    thread.join(DEADLINE_S)
    assert status == [0] and KeyFile(theirs).keys == KeyFile(path).keys


@pytest.mark.parametrize(
    "argv",
    [
        ["join", "127.0.0.1:1"],
        ["join"],
        ["join", "nowhere", "ABCD"],
        ["join", "127.0.0.1:1", "ABCD"],
        ["key", "/nowhere/x", "--add"],
    ],
)
def test_wrong_usage_ends_with_2(argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main(argv) == 2


def test_one_code_is_for_so_many_boards() -> None:
    codes: list[str] = []
    invitations = Invitations(CONTENT, codes.append, 2)
    first = Guest(codes[0])
    assert first.open(invitations.answer(first.request)) == CONTENT
    with pytest.raises(AccessError):  # somebody has recorded it
        invitations.answer(first.request)
    second = Guest(codes[0])
    assert second.open(invitations.answer(second.request)) == CONTENT
    with pytest.raises(AccessError):
        invitations.answer(Guest(codes[0]).request)
    invitations.renew()
    assert len(codes) == 1, "no more may join"


def test_the_host_learns_where_a_guest_s_node_will_be() -> None:
    codes: list[str] = []
    met: list[tuple[GuestNode, str]] = []
    invitations = Invitations(CONTENT, codes.append, 4, on_guest=lambda node, addr: met.append((node, addr)))
    told = Guest(codes[-1], NODE)
    assert told.open(invitations.answer(told.request, "192.0.2.9")) == CONTENT
    assert met == [(NODE, "192.0.2.9")]
    silent = Guest(codes[-1])
    assert silent.open(invitations.answer(silent.request, "192.0.2.9")) == CONTENT
    assert len(met) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"addr": "192.0.2.8"},
        {"port": 8089},
        {"ring_port": 5089},
        {"name": "other"},
        {"addr": "a name"},
        {"port": "8088"},
    ],
)
def test_only_who_has_the_code_says_where_a_node_is(change: dict[str, Any]) -> None:
    """Somebody in between changes it: the guest gets its key, and the host looks for it nowhere."""
    met: list[GuestNode] = []
    invitation = Invitation(CONTENT, on_guest=lambda node, addr: met.append(node))
    guest = Guest(invitation.code, NODE)
    request = guest.request
    assert guest.open(invitation.answer({**request, "node": {**request["node"], **change}})) == CONTENT
    assert not met


@pytest.mark.parametrize("change", [{"port": 0}, {"ring_port": 65536}, {"name": "n" * 41}, {"addr": "board.local"}])
def test_what_is_no_place_of_a_node_is_ignored(change: dict[str, Any]) -> None:
    met: list[GuestNode] = []
    invitation = Invitation(CONTENT, on_guest=lambda node, addr: met.append(node))
    guest = Guest(invitation.code, replace(NODE, **change))
    assert guest.open(invitation.answer(guest.request)) == CONTENT
    assert not met


def test_a_board_says_over_the_network_where_its_node_will_be(keys: KeyFile, tmp_path: Path) -> None:
    codes: list[str] = []
    guests = Guests(tmp_path / "nodes")
    content = text_of(keys.keys).encode()
    server = ControlServer(
        Inviting(), "127.0.0.1", 0, "starter", keys, Invitations(content, codes.append, 1, on_guest=guests.add)
    )
    try:
        fetch("127.0.0.1", server.port, codes[0], tmp_path / "board.key", NODE)
    finally:
        server.close()
    assert KeyFile(tmp_path / "board.key").keys == keys.keys
    (found,) = Guests(tmp_path / "nodes").nodes()
    assert guests.nodes() == [found], "a later run knows it, too"
    assert (found.name, found.addr, found.port, found.ring_port) == ("board", "192.0.2.7", 8088, 5088)


def test_a_code_that_is_too_old_is_replaced() -> None:
    codes: list[str] = []
    now = [0.0]
    invitations = Invitations(CONTENT, codes.append, 1, lambda: now[0])
    invitations.renew()
    assert len(codes) == 1
    now[0] = VALID_S + 1
    invitations.renew()
    with pytest.raises(AccessError):
        invitations.answer(Guest(codes[0]).request)
    guest = Guest(codes[1])
    assert guest.open(invitations.answer(guest.request)) == CONTENT
