"""What a starter asks the nodes of its ring to do with prefixes that stay on their disks (kept_prefixes).

A task travels as a frame of its own, in the order of the frames with rows, and each node answers it in the thread that
computes: nothing else touches caches.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from mdi.errors import WireError
from mdi.model.caches import PAGE
from mdi.net.wire import Frame, FrameType
from mdi.spec.decode import Meta, Number, Whole, decode, one_of

FIND, FILL, FILLED, KEEP, FETCH, OWNERS = "find", "fill", "filled", "keep", "fetch", "owners"
KEY_BYTES = 16  # of a page's key, see memory.page_keys
OWNER = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}")  # the folder of one

NAME = re.compile(r"[0-9a-f]{40}\.kv")  # of a file
FETCH_BYTES = 5 << 20  # of files that one frame carries: a frame has 8 MB at most

_COLUMNS = 1024  # of a frame that carries a task

Text = Annotated[str, Meta(max_length=1 << 22)]
LongText = Annotated[str, Meta(max_length=1 << 23)]


@dataclass(frozen=True)
class PrefixTask:
    """What the nodes of a ring are asked to do with one prefix, and what they have answered so far.

    Attributes:
        kind: FIND ends of which every node has all files; FILL the caches of a sequence up to position `stop`, which a
            node passes on before it does it, so that all read at once; say whether they are FILLED; KEEP the positions
            [start, stop) of a sequence; FETCH from other nodes the files that lack here of what blocks have up to
            position `stop`, states only with `is_end`; remove the folders of all other OWNERS.
        seq_id, n_evictions: of the sequence.
        owner: name of a folder; of OWNERS several, with spaces between.
        keys: of the prefix's pages, from the first one on, in hex.
        run_pages: of a run.
        ends: bit i says that a prefix may end behind page i; in hex.
        is_end: of KEEP: whether the text ends there, so that states are kept as well; of FETCH: whether all that there is ends
            there.
        is_done: whether all nodes so far could do it.
        row_read_s: of FIND: seconds that the slowest of the nodes so far needs to read a position of the longest end; 0 where
            that was not measured.
        some: of FIND: ends of which a node has the files of one of its blocks; in hex.
        n_rounds: of FETCH, that are left up to `stop`; of FIND: for which files may be fetched afterwards.
        wanted: of FETCH: names of files that nodes lack, with spaces between.
        files: of FETCH, see `attached`.
    """

    kind: Annotated[str, one_of((FIND, FILL, FILLED, KEEP, FETCH, OWNERS))]
    seq_id: Whole = 0
    n_evictions: Whole = 0
    owner: Text = ""
    keys: Text = ""
    run_pages: Annotated[int, Meta(ge=1, le=1 << 16)] = 1
    start: Whole = 0
    stop: Whole = 0
    ends: Text = "0"
    is_end: bool = False
    is_done: bool = True
    row_read_s: Number = 0.0
    some: Text = "0"
    n_rounds: Whole = 0
    wanted: Text = ""
    files: LongText = ""

    @property
    def pages(self) -> list[bytes]:
        whole = bytes.fromhex(self.keys)
        return [whole[i : i + KEY_BYTES] for i in range(0, len(whole), KEY_BYTES)]

    @property
    def goes_ahead(self) -> bool:
        """Whether a node passes it on before it does its part."""
        return self.kind == FILL

    @property
    def possible(self) -> int:
        """`ends` as a number."""
        return int(self.ends, 16)

    @property
    def attached(self) -> dict[str, bytes]:
        """The files that travel with the task, sealed as they are, by their names."""
        words = self.files.split(" ") if self.files else []
        return {name: base64.b64decode(data, validate=True) for name, data in zip(words[::2], words[1::2], strict=True)}

    def with_files(self, wanted: Sequence[str], files: Mapping[str, bytes]) -> PrefixTask:
        """The task with others of them."""
        words = [word for name, data in files.items() for word in (name, base64.b64encode(data).decode())]
        return replace(self, wanted=" ".join(wanted), files=" ".join(words))

    def frame(self, epoch: int, number: int) -> Frame:
        data = json.dumps({name: value for name, value in vars(self).items()}).encode()
        n_rows = -(-len(data) // _COLUMNS)
        return Frame(
            FrameType.BATCH, epoch, number, n_rows=n_rows, n_cols=_COLUMNS, payload=data.ljust(n_rows * _COLUMNS)
        )

    @classmethod
    def of(cls, frame: Frame) -> PrefixTask:
        """Raises WireError if the frame has none."""
        try:
            found = decode(cls, json.loads(bytes(frame.payload)), "a task", WireError)
            n, is_wrong = len(bytes.fromhex(found.keys)) // KEY_BYTES, min(int(found.ends, 16), int(found.some, 16)) < 0
            names = [*found.wanted.split(), *found.attached]
        except (ValueError, binascii.Error) as e:
            raise WireError(f"a frame without rows has no task that can be read: {e}") from None
        has_place = found.kind not in (FILL, FILLED, KEEP, FETCH) or 0 <= found.start < found.stop <= n * PAGE
        is_wrong = is_wrong or not all(map(NAME.fullmatch, names))
        if is_wrong or not has_place or found.stop % PAGE or not all(map(OWNER.fullmatch, found.owner.split(" "))):
            raise WireError(f"a task {found.kind} for positions {found.start} to {found.stop} of {n} pages")
        return found


class RingPrefixes:
    """The kept prefixes of one ring, as its starter sees them.

    Args:
        answer: the starter's own, see KeptFiles.
        seed: of all keys: what the numbers of caches depend on besides ids and adapter.
        run_pages: see the function.
        owner_folder: see Secrets; without the realm.
        owners: all that there are; of any others the files go. (): nobody knows.

    Attributes:
        seed, run_pages: as given.
        owners: the task for that.
    """

    def __init__(
        self, answer: Callable[[PrefixTask], PrefixTask], seed: str, run_pages: int, owner_folder: Callable[[str], str],
        owners: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._answer, self.seed = answer, seed
        self.run_pages, self._owner_folder = run_pages, owner_folder
        self.owners = PrefixTask(OWNERS, owner=" ".join(map(owner_folder, owners))) if owners else None

    def task(self, kind: str, kept_for: str, keys: Sequence[bytes], **of: Any) -> PrefixTask:
        """A task; `kept_for` is that of a sequence."""
        folder = self._owner_folder(kept_for.partition("/")[2])
        return PrefixTask(kind, owner=folder, keys=b"".join(keys).hex(), run_pages=self.run_pages, **of)

    def answer(self, task: PrefixTask) -> PrefixTask:
        """The task with the starter's own answer."""
        return self._answer(task)
