"""Frames between nodes with a key: whoever changes, repeats, reorders, cuts, reflects or makes one ends the link."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from mdi.errors import AccessError, WireError
from mdi.net import hello as challenge
from mdi.net.hello import CHALLENGE_BYTES, Caller, answer_to
from mdi.net.keys import SealedSession, mac
from mdi.net.wire import HEADER_BYTES, BufferPool, Frame, FrameCodec, FrameType, Limits, SealedCodec, Slice, read_frame

A, B = bytes(32), bytes(range(32))
LIMITS = Limits(max_rows=16, max_cols=4096, max_slices=8, max_payload_bytes=1 << 16)
FRAME = Frame(
    FrameType.BATCH, 7, 3, "float32", 2, 3, (Slice(1, 5, 1, 1), Slice(2, 0, 1, 0)), (9,), bytes(range(24)), ((1, 4),)
)
PING = Frame(FrameType.PING, 7)
SEED = 5


def codecs(is_aes: bool = True) -> tuple[SealedCodec, SealedCodec]:
    """Both ends of a connection."""
    one, other = bytes([1]) * 32, bytes([2]) * 32
    return SealedCodec(SealedSession(one, other, is_aes), LIMITS), SealedCodec(
        SealedSession(other, one, is_aes), LIMITS
    )


def bytes_of(frame: Frame, codec: FrameCodec) -> bytes:
    return b"".join(bytes(part) for part in codec.parts(frame))


def read(data: bytes, codec: FrameCodec, pool: BufferPool | None = None) -> Frame | None:
    """The frame that a peer which sends this, and closes, is heard to say."""
    return read_frame(cast(Any, SimpleNamespace(recv_into=io.BytesIO(data).readinto)), codec, pool)


def as_read(frame: Frame) -> Frame:
    return replace(frame, payload=memoryview(bytearray(frame.payload)))


@pytest.mark.parametrize("is_aes", [True, False])
def test_frames_arrive_in_order_in_both_directions_and_show_nothing(is_aes: bool) -> None:
    one, other = codecs(is_aes)
    pool = BufferPool(2)
    for frame in (FRAME, PING, replace(FRAME, number=4, freed=(9, 8)), Frame.message(FrameType.STOP, 7, b"over")):
        for sender, receiver in ((one, other), (other, one)):
            data = bytes_of(frame, sender)
            assert b"MDIr" not in data and bytes(range(24)) not in data
            assert read(data, receiver, pool) == as_read(frame)
    assert len(bytes_of(PING, one)) == HEADER_BYTES


def test_the_same_frame_never_looks_the_same() -> None:
    one, _ = codecs()
    assert len({bytes_of(FRAME, one) for _ in range(5)}) == 5


MISUSES: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "repeated": lambda sent: [sent[0], sent[0]],
    "left out": lambda sent: [sent[0], sent[2]],
    "reordered": lambda sent: [sent[0], sent[2], sent[1]],
    "cut": lambda sent: [sent[0], sent[1][:-1]],
    "header of another": lambda sent: [sent[0], sent[2][:HEADER_BYTES] + sent[1][HEADER_BYTES:]],
    "body of another": lambda sent: [sent[0], sent[1][:HEADER_BYTES] + sent[2][HEADER_BYTES:]],
}


@pytest.mark.parametrize("misuse", MISUSES.values(), ids=MISUSES)
def test_frames_out_of_their_place_are_refused(misuse: Callable[[list[bytes]], list[bytes]]) -> None:
    one, other = codecs()
    *good, bad = misuse([bytes_of(replace(FRAME, number=i), one) for i in range(3)])
    assert read(good[0], other) == as_read(replace(FRAME, number=0))
    with pytest.raises(WireError):
        for data in (*good[1:], bad):
            read(data, other)


def test_a_reflected_frame_is_refused() -> None:
    one, _ = codecs()
    with pytest.raises(WireError):
        read(bytes_of(FRAME, one), one)


def test_a_plain_frame_is_no_sealed_one_and_the_other_way_round() -> None:
    one, other = codecs()
    with pytest.raises(WireError):
        read(bytes_of(FRAME, FrameCodec(LIMITS)), other)
    with pytest.raises(WireError):
        read(bytes_of(FRAME, one), FrameCodec(LIMITS))


def test_no_changed_frame_is_accepted() -> None:
    draw = random.Random(SEED)
    for frame in (FRAME, PING):
        data = bytes_of(frame, codecs()[0])
        for _ in range(1500):
            changed = bytearray(data)
            for _ in range(draw.choice((1, 1, 1, 4))):
                changed[draw.randrange(len(data))] ^= draw.randrange(1, 256)
            if changed == data:
                continue
            with pytest.raises(WireError):
                read(bytes(changed), codecs()[1])
        assert read(data, codecs()[1]) == as_read(frame)


def test_a_neighbour_with_the_key_that_sends_wrong_counts_is_refused() -> None:
    lies = [
        replace(FRAME, slices=(Slice(1, 5, 1, 2), FRAME.slices[1])),
        replace(FRAME, slices=FRAME.slices[:1]),
        replace(FRAME, slices=FRAME.slices[:1] * 2),
        replace(FRAME, n_rows=3),
        replace(FRAME, n_cols=1 << 20),
        replace(FRAME, copies=((1, 1),)),
    ]
    for lie in lies:
        one, other = codecs()
        with pytest.raises(WireError):
            read(bytes_of(lie, one), other)


# The challenge


def sessions(mine: tuple[bytes, ...], theirs: tuple[bytes, ...]) -> tuple[SealedSession, SealedSession]:
    caller = Caller(mine)
    answer, session = answer_to(caller.call, theirs)
    return caller.session(answer), session


@pytest.mark.parametrize(("mine", "theirs"), [((A,), (A,)), ((A,), (B, A)), ((B, A), (A, B)), ((A, B), (A,))])
def test_who_shares_the_signing_key_meets(mine: tuple[bytes, ...], theirs: tuple[bytes, ...]) -> None:
    for sender, receiver in (ends := sessions(mine, theirs)), ends[::-1]:
        found = bytearray(5)
        receiver.open(sender.seal(b"hello"), found)
        assert found == b"hello"


def test_both_take_what_both_processors_do_well(monkeypatch: pytest.MonkeyPatch) -> None:
    caller = Caller((A,))
    monkeypatch.setattr(challenge, "has_fast_aes", lambda: not caller.call[0])
    answer, session = answer_to(caller.call, (A,))
    found = bytearray(2)
    session.open(caller.session(answer).seal(b"ok"), found)
    assert found == b"ok"


def test_another_key_is_refused_on_both_sides() -> None:
    with pytest.raises(AccessError):
        answer_to(Caller((B,)).call, (A,))
    caller = Caller((A,))
    for answer in (bytes(CHALLENGE_BYTES), b"", caller.call, answer_to(Caller((A,)).call, (A,))[0]):
        with pytest.raises(AccessError):
            caller.session(answer)


def test_a_call_that_is_played_again_opens_nothing() -> None:
    caller = Caller((A,))
    first, _ = answer_to(caller.call, (A,))
    sealed = caller.session(first).seal(b"HELLO")
    _, again = answer_to(caller.call, (A,))
    with pytest.raises(WireError):
        again.open(sealed, bytearray(5))


def test_no_changed_challenge_is_accepted() -> None:
    draw = random.Random(SEED)
    caller = Caller((A,))
    answer, _ = answer_to(caller.call, (A,))
    for _ in range(2000):
        position, value = draw.randrange(CHALLENGE_BYTES), draw.randrange(1, 256)
        for data, use in ((caller.call, lambda d: answer_to(d, (A,))), (answer, caller.session)):
            changed = bytearray(data)
            changed[position] ^= value
            with pytest.raises(AccessError):
                use(bytes(changed))


class ByHand:
    """The side that is called, by the words of docs/operating.md: it has a key and makes its messages itself."""

    def __init__(self, call: bytes, secret: bytes) -> None:
        self.private = X25519PrivateKey.generate()
        mine = b"\0" + self.private.public_key().public_bytes_raw()  # without AES: ChaCha20 on both sides
        self.call, self.answer = call, mine + mac(secret, "mdi answer", call, mine)

    def keys(self, salt: bytes | None, info: bytes | None = None) -> tuple[bytes, bytes]:
        """Of the caller's direction, and of the other."""
        shared = self.private.exchange(X25519PublicKey.from_public_bytes(self.call[1:33]))
        info = b"mdi session" + self.call + self.answer if info is None else info
        made = HKDF(SHA256(), 64, salt=salt, info=info).derive(shared)
        return made[:32], made[32:]

    def session(self, salt: bytes | None, info: bytes | None = None) -> SealedSession:
        theirs, mine = self.keys(salt, info)
        return SealedSession(mine, theirs, False)


def test_keys_of_a_session_come_from_the_secret_the_cluster_key_and_both_messages() -> None:
    caller = Caller((B,))
    other = ByHand(caller.call, B)
    session = caller.session(other.answer)
    assert other.session(B).seal(b"hello") == ChaCha20Poly1305(other.keys(B)[1]).encrypt(bytes(12), b"hello", None)
    found = bytearray(5)
    session.open(other.session(B).seal(b"hello"), found)
    assert found == b"hello"
    other.session(B).open(session.seal(b"hello"), found)
    messages = b"mdi session" + other.call + other.answer
    wrong: list[tuple[bytes | None, bytes]] = [
        (None, messages), (B[::-1], messages), (B, b"mdi session"), (B, b"mdi session" + other.call),
        (B, b"mdi session" + other.answer), (B, other.call + other.answer),
    ]  # fmt: skip
    for salt, info in wrong:
        with pytest.raises(WireError):
            caller.session(other.answer).open(other.session(salt, info).seal(b"hello"), found)


def test_frames_of_a_handshake_do_not_open_where_they_come_from() -> None:
    """Each direction has a key of its own: with one for both, what is sent back would open, and nonces would be used twice."""
    for end in sessions((A,), (A,)):
        with pytest.raises(WireError):
            end.open(end.seal(b"hello"), bytearray(5))
    one, other = sessions((A,), (A,))
    assert one.seal(b"hello") != other.seal(b"hello")


def test_a_public_value_that_makes_no_secret_is_refused() -> None:
    call = bytes(33)
    with pytest.raises(AccessError):
        answer_to(call + mac(A, "mdi call", call), (A,))
