"""What a cluster key costs per frame, and whether anything that was changed is ever accepted.

python benchmarks/sealing.py                      time to write and read a frame, with and without a key
python benchmarks/sealing.py --mutations 1000000  ... and so many changed frames, challenges and control requests
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from mdi.control.messages import InitRequest, ProbeRequest, ProfileRequest
from mdi.control.signing import body_hash, key_of_request, sign_request
from mdi.errors import ControlError, MdiError
from mdi.net.hello import Caller, answer_to
from mdi.net.keys import SealedSession, new_secret
from mdi.net.wire import HEADER_BYTES, Frame, FrameCodec, FrameType, Limits, SealedCodec, Slice
from mdi.spec.decode import parsed as parsed_json

LIMITS = Limits()
ONE, OTHER = bytes(range(32)), bytes(range(1, 33))


def sealed(is_aes: bool) -> tuple[FrameCodec, FrameCodec]:
    return SealedCodec(SealedSession(ONE, OTHER, is_aes), LIMITS), SealedCodec(
        SealedSession(OTHER, ONE, is_aes), LIMITS
    )


def batch(n_cols: int, n_rows: int = 1) -> Frame:
    slices = tuple(Slice(i, 5, 1, 1) for i in range(n_rows))
    return Frame(FrameType.BATCH, 7, 3, "float32", n_rows, n_cols, slices, (), bytes(4 * n_rows * n_cols))


def read(data: bytes, codec: FrameCodec) -> Frame:
    at = HEADER_BYTES

    def fill(view: memoryview) -> None:
        nonlocal at
        view[:] = data[at : at + len(view)]  # ValueError if the data is too short, as a closed connection would tell
        at += len(view)

    return codec.body(codec.header(data[:HEADER_BYTES]), fill, lambda n: memoryview(bytearray(n)))


def cost_us(codecs: tuple[FrameCodec, FrameCodec], frame: Frame, n: int = 400) -> float:
    """Microseconds to write and to read one frame, the best of five."""
    sender, receiver = codecs
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(n):
            read(b"".join(sender.parts(frame)), receiver)
        best = min(best, (time.perf_counter() - begin) / n)
    return 1e6 * best


def changed(data: bytes, draw: random.Random) -> bytes:
    """Bits flipped, cut, repeated or made up; never what it was."""
    while True:
        new = bytearray(data)
        way = draw.randrange(4)
        if way == 0 and new:
            for _ in range(draw.choice((1, 1, 2, 8))):
                new[draw.randrange(len(new))] ^= 1 << draw.randrange(8)
        elif way == 1:
            del new[draw.randrange(len(new) + 1) :]
        elif way == 2:
            at = draw.randrange(len(new) + 1)
            new[at:at] = new[: draw.randrange(40)]
            new = new[: len(data)]
        else:
            new = bytearray(draw.randbytes(draw.randrange(len(data) + 1)))
        if new != data:
            return bytes(new)


def mutate(n: int, seed: int) -> tuple[int, int, int]:
    """Accepted, raised anything but our errors, and kilobytes that the process has grown after the first tenth."""
    draw = random.Random(seed)
    secret, frame = new_secret(), batch(8)
    data, plain = b"".join(sealed(True)[0].parts(frame)), b"".join(FrameCodec().parts(frame))
    caller = Caller((secret,))
    answer, _ = answer_to(caller.call, (secret,))
    body = b'{"run": "0123456789abcdef", "leave": false}'
    request = sign_request(secret, "PUT", "/stop", len(body), body_hash(body), "00").encode()

    def is_signed(text: bytes) -> None:
        found = text.decode("latin-1")
        if key_of_request(found, (secret,), "PUT", "/stop", len(body), body_hash(body), "00") is None:
            raise MdiError
        if found.strip().lower().encode() == request:  # hex digits have two cases, and may have blanks around them
            raise MdiError

    def parsed(text: bytes) -> None:
        content = parsed_json(text, "the body", ControlError)
        for form in (InitRequest, ProfileRequest, ProbeRequest):
            form.from_json(content)

    tries: list[tuple[bytes, Callable[[bytes], object]]] = [
        (data, lambda d: read(d, sealed(True)[1])),
        (plain, lambda d: read(d, sealed(True)[1])),
        (caller.call, lambda d: answer_to(d, (secret,))),
        (answer, caller.session),
        (request, is_signed),
        (body, parsed),
    ]
    n_accepted = n_crashed = start_kb = 0
    for i in range(n):
        message, use = tries[i % len(tries)]
        if i == n // 10:
            start_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            use(changed(message, draw))
            n_accepted += 1
        except (MdiError, ValueError):
            pass
        except Exception as e:
            n_crashed += 1
            print(f"{type(e).__name__}: {e}", file=sys.stderr)
    return n_accepted, n_crashed, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start_kb


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print("microseconds to write and read a frame: payload, without a key, AES-GCM, ChaCha20-Poly1305")
    for n_cols, n_rows in ((64, 1), (2048, 1), (2048, 8), (2048, 64)):
        frame = batch(n_cols, n_rows)
        times = [cost_us(codecs, frame) for codecs in ((FrameCodec(), FrameCodec()), sealed(True), sealed(False))]
        print(f"{4 * n_cols * n_rows:>8} bytes  " + "  ".join(f"{one:8.1f}" for one in times))
    if args.mutations:
        begin = time.perf_counter()
        accepted, crashed, grown = mutate(args.mutations, args.seed)
        taken = time.perf_counter() - begin
        print(
            f"{args.mutations} changed messages: {accepted} accepted, {crashed} crashes, {grown} kB grown, {taken:.0f} s"
        )
        sys.exit(1 if accepted or crashed else 0)


if __name__ == "__main__":
    main()
