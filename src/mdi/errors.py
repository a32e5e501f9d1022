"""Every error that this project raises on purpose.

    MdiError
    |-- UsageError            what the user typed or wrote: flags, JSON, prompts
    |   |-- SplitError        a model that cannot be cut as asked
    |   |-- NoMemoryError     a model, or a text of that length, that does not fit into this node's memory
    |   `-- LimitError        a limit of memory that is too low
    |-- CheckpointError       a model on disk: missing, cut short, of another shape
    |-- MemoryShortError      this machine has too little memory, or this process may not have more
    |-- PlacementError        a model that fits no node, or not as asked
    |-- DownloadError         the hub: unknown, gated, unreachable
    |-- WireError             bytes on a ring link that are no frame of ours
    |-- AccessError           a peer without our cluster key, or with another
    |-- RingError             the ring could not be formed, or a link of it was lost
    |   `-- NodeLostError     ... and we know which node it was
    |-- RingEndedError        the ring was ended in good order, here or by another node
    |-- ControlError          an HTTP exchange between two nodes
    |-- KernelError           our own kernels cannot be had: no compiler, or it does not work
    `-- EngineError           the generation loop, e.g. a slice for a cache that is gone

Low-level exceptions (OSError, struct.error, http.client's) become one of these in the module that touched them. A message
says what was found, what was expected, where, and if possible what to do; launchers print it as one line. Programs look at
the class and the `code`, which also travels (docs/protocol.md, "Error codes"); never at the words.
"""

from __future__ import annotations

from enum import Enum

# With torch, which litgpt brings.
INSTALL_ALL = "pip install -r requirements.txt or '.[all]' in the project's folder, or pip install litgpt"

HERE = False  # such a code does not travel


class Code(str, Enum):
    """What happened, for programs; its value is the word that travels.

    Attributes:
        meaning: for people who read the protocol.
        travels: whether nodes say it to each other.
    """

    meaning: str
    travels: bool

    def __new__(cls, word: str, meaning: str, travels: bool = True) -> Code:
        code = str.__new__(cls, word)
        code._value_, code.meaning, code.travels = word, meaning, travels
        return code

    BUSY = (
        "busy",
        "the node has another run that does not share it, keeps memory for a run whose ring just broke, receives the part from "
        "another sender, or measures itself: ask again in a moment",
    )
    CONTROL = "control", "the request is malformed"
    LEAVING = "leaving", "the process is ending"
    MEMORY = "memory", "the stage and its caches do not fit into the node's memory"
    DISK = "disk", "the weights do not fit on the node's disk"
    ROLE = "role", "the node has another role: it is a starter, or has no head"
    RUN = "run", "the node does not take part in this run (any more)"
    CANCELLED = "cancelled", "what was asked for is not wanted any more, or was not done in time"
    STARTING = "starting", "the starter has no run yet"
    STOPPED = "stopped", "the run was stopped on this node, and its request was late"
    USAGE = "usage", "the node has no such device, format or type"
    VERSION = "version", "the node has another version of this protocol"
    WEIGHTS = "weights", "weights are missing, damaged, or others than announced"
    WIRE = "wire", "a frame that cannot be accepted"
    RING = "ring", "the ring could not be closed, or it broke"
    LOST = "lost", "a neighbour is silent"
    ENGINE = "engine", "the computation cannot go on from its state"
    LEFT = "left", "the node was asked to end"
    UNTRUE = "untrue", "a node gave wrong rows, and no other can take its place"
    TENSORS = (
        "tensors",
        "the node does not have the tensors that a question names (any more): they have to be sent again",
    )
    STUCK = "stuck", "the node lives, but its computing does not go on"
    KEY = "key", "the other side does not have the same cluster key"
    NONCE = "nonce", "the request was signed with an expired nonce"
    FAILED = "failed", "anything else"
    # They stay in the process that raises them.
    ABSENT = "absent", "a node has never answered", HERE
    ADAPTER = "adapter", "an adapter is not one that is served, or not of this model", HERE
    ARCHIVE = "archive", "this is no file of an exported model, or a damaged one", HERE
    CHANGED = "changed", "a file is not the one that another was made from", HERE
    COLUMN = "column", "a table has no such column, or not of text", HERE
    CONNECTION = "connection", "the hub cannot be reached", HERE
    COSTLY = "costly", "a chat template needs too much time or memory", HERE
    DAMAGED = "damaged", "a file is not as its description says", HERE
    DEVICE = "device", "this machine has no such device, or not for this", HERE
    DRAFT = "draft", "this model cannot guess for the other one", HERE
    EMPTY = "empty", "there is nothing in it", HERE
    ENVIRONMENT = "environment", "variables of the environment contradict each other", HERE
    EXISTS = "exists", "a file would be replaced", HERE
    FLAGS = "flags", "flags that do not go together", HERE
    GATED = "gated", "the hub wants an account with access", HERE
    HUB = "hub", "the hub refuses", HERE
    INCOMPLETE = "incomplete", "a download is not whole yet", HERE
    KERNELS = "kernels", "only the kernels compute this, and not in this way", HERE
    LENGTH = "length", "a text is too long", HERE
    LIBRARY = "library", "a library is not installed", HERE
    LOADED = "loaded", "the model is in use", HERE
    LOSS = "loss", "the loss is no number any more", HERE
    MISSING = "missing", "there is no such file or folder, or it lacks what is needed", HERE
    NAME = "name", "this is no name of a model or data set", HERE
    NO_FILES = "no_files", "the hub has it, but none of its files can be used", HERE
    NODES = "nodes", "a nodes file of another form", HERE
    OFFLINE = "offline", "it is not on this machine, and the hub is not asked", HERE
    OTHER = "other", "it belongs to another program", HERE
    REMOVED = "removed", "it was removed meanwhile", HERE
    REVISION = "revision", "there is no such revision, or another one is here", HERE
    SHAPE = "shape", "settings that describe no model, or another one", HERE
    SHORT = "short", "there is too little text", HERE
    STORE = "store", "the store cannot be used", HERE
    STYLE = "style", "there is no such prompt style", HERE
    TEMPLATE = "template", "a chat template refuses a chat", HERE
    TENSOR = "tensor", "a tensor is missing or has another shape", HERE
    THERE = "there", "a model of this name is there already", HERE
    UNKNOWN = "unknown", "the hub has nothing of that name", HERE
    UNREADABLE = "unreadable", "a file cannot be read as what it should be", HERE
    UNSAFE = "unsafe", "a file could run code, or names one outside its folder", HERE
    UNWRITABLE = "unwritable", "a file or folder cannot be written", HERE
    VALUE = "value", "a value out of its range", HERE
    VOCABULARY = "vocabulary", "characters or ids that the model does not know", HERE

    @classmethod
    def of(cls, word: object) -> Code:
        """The code that a word of another node says; FAILED if that node has codes which this one does not know."""
        return next((code for code in cls if code.value == word), cls.FAILED)

    def __str__(self) -> str:
        return str(self.value)

    @property
    def unfit(self) -> bool:
        """The node cannot hold these blocks, however often it is asked."""
        return self in _UNFIT

    @property
    def leaves(self) -> bool:
        """The node goes away because it was asked to."""
        return self in (Code.LEFT, Code.LEAVING)

    @property
    def ended(self) -> bool:
        """Before the first ring, too, others take the node's place: it goes, or has no room."""
        return self.leaves or self is Code.DISK

    @property
    def again(self) -> bool:
        """The same may be asked again in a moment."""
        return self is Code.BUSY

    @property
    def less_fits(self) -> bool:
        """With fewer blocks, or without another model, it may fit."""
        return self is Code.MEMORY


_UNFIT = frozenset({
    Code.MEMORY, Code.DISK, Code.USAGE, Code.VERSION, Code.ROLE, Code.WEIGHTS, Code.KEY, Code.LEAVING, Code.CONTROL,
    Code.STUCK,
})  # fmt: skip


class MdiError(Exception):
    """Base of all; its text is made for a person to read.

    Attributes:
        code: what happened, for programs; each class has its own, and some objects a closer one.
    """

    code = Code.FAILED

    def __init__(self, *args: object, code: Code | None = None) -> None:
        super().__init__(*args)
        if code is not None:
            self.code = code


class UsageError(MdiError):
    """The command line, a JSON file or a prompt cannot be used as it is."""

    code = Code.USAGE


class CheckpointError(MdiError):
    """A checkpoint, chunk or block on disk is missing, damaged or not the one that was asked for."""

    code = Code.WEIGHTS


class SplitError(UsageError):
    """The model cannot be cut as asked."""


class MemoryShortError(MdiError):
    """There is too little memory to read or compute something that is itself correct."""


class NoMemoryError(UsageError):
    """A stage, or the caches of one sequence, do not fit into what this node has free."""

    code = Code.MEMORY


class LimitError(UsageError):
    """Nothing fits into the memory that this process may take.

    Attributes:
        least_bytes: the limit that would do.
    """

    code = Code.MEMORY

    def __init__(self, message: str, least_bytes: int) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


class PlacementError(MdiError):
    """The model does not fit the nodes.

    Attributes:
        missing: name of each node with too little memory, and how many bytes it lacks; "" where it may be any node.
    """

    code = Code.MEMORY

    def __init__(self, message: str, missing: tuple[tuple[str, int], ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class DownloadError(MdiError):
    """The model hub did not provide the requested files."""


class StoreError(MdiError):
    """A model cannot be kept, removed, exported or imported."""


class WireError(MdiError):
    """Bytes from a ring link that are no frame which this node may accept."""

    code = Code.WIRE


class AccessError(MdiError):
    """The other side does not have our cluster key."""

    code = Code.KEY


class RingError(MdiError):
    """The ring could not be closed, or it broke."""

    code = Code.RING


class NodeLostError(RingError):
    """A node of the ring died, stalled or answered garbage.

    Attributes:
        node: name of the node that was lost, as in the nodes file ("starter", "secondary0", ...).
        code: LOST if it is silent, ABSENT if it has never answered, else that of its own error.
    """

    def __init__(self, node: str, message: str, code: Code = Code.LOST) -> None:
        super().__init__(message)
        self.node = node
        self.code = code


class RingEndedError(MdiError):
    """The ring was ended in good order: nothing comes any more, and nothing is wrong."""


class ControlError(MdiError):
    """A control request to another node failed.

    Attributes:
        status: HTTP status of the answer; None if there was no answer.
        problem: why there was none, or none of a node, as a key of `mdi.control.reach.PROBLEMS`; "" if a node refused.
        code: of the node's own error.
    """

    code = Code.CONTROL

    def __init__(self, message: str, status: int | None = None, problem: str = "", code: Code = Code.CONTROL) -> None:
        super().__init__(message)
        self.status = status
        self.problem = problem
        self.code = code


class EngineError(MdiError):
    """The generation loop cannot continue from its state.

    Attributes:
        code: MEMORY if there is none left for caches or computing.
    """

    code = Code.ENGINE

    def __init__(self, message: str, code: Code = Code.ENGINE) -> None:
        super().__init__(message)
        self.code = code


class KernelError(MdiError):
    """The library of kernels is missing and cannot be compiled. Callers that can do without it use plain torch."""
