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

# With torch, which litgpt brings.
INSTALL_ALL = "pip install -r requirements.txt or '.[all]' in the project's folder, or pip install litgpt"

# Closer codes of errors that commands raise, and that do not travel to other nodes; those that do are `control.messages.CODES`.
REASONS = {
    "adapter": "an adapter is not one that is served, or not of this model",
    "archive": "this is no file of an exported model, or a damaged one",
    "changed": "a file is not the one that another was made from",
    "column": "a table has no such column, or not of text",
    "connection": "the hub cannot be reached",
    "costly": "a chat template needs too much time or memory",
    "damaged": "a file is not as its description says",
    "device": "this machine has no such device, or not for this",
    "draft": "this model cannot guess for the other one",
    "empty": "there is nothing in it",
    "environment": "variables of the environment contradict each other",
    "exists": "a file would be replaced",
    "flags": "flags that do not go together",
    "gated": "the hub wants an account with access",
    "hub": "the hub refuses",
    "incomplete": "a download is not whole yet",
    "kernels": "only the kernels compute this, and not in this way",
    "length": "a text is too long",
    "library": "a library is not installed",
    "loaded": "the model is in use",
    "loss": "the loss is no number any more",
    "missing": "there is no such file or folder, or it lacks what is needed",
    "name": "this is no name of a model or data set",
    "no_files": "the hub has it, but none of its files can be used",
    "nodes": "a nodes file of another form",
    "offline": "it is not on this machine, and the hub is not asked",
    "other": "it belongs to another program",
    "removed": "it was removed meanwhile",
    "revision": "there is no such revision, or another one is here",
    "shape": "settings that describe no model, or another one",
    "short": "there is too little text",
    "store": "the store cannot be used",
    "style": "there is no such prompt style",
    "tensor": "a tensor is missing or has another shape",
    "template": "a chat template refuses a chat",
    "there": "a model of this name is there already",
    "unknown": "the hub has nothing of that name",
    "unreadable": "a file cannot be read as what it should be",
    "unsafe": "a file could run code, or names one outside its folder",
    "unwritable": "a file or folder cannot be written",
    "value": "a value out of its range",
    "vocabulary": "characters or ids that the model does not know",
}


class MdiError(Exception):
    """Base of all; its text is made for a person to read.

    Attributes:
        code: what happened, in a word for programs; each class has its own, and some objects a closer one.
    """

    code: str = "failed"

    def __init__(self, *args: object, code: str | None = None) -> None:
        super().__init__(*args)
        if code is not None:
            self.code = code


class UsageError(MdiError):
    """The command line, a JSON file or a prompt cannot be used as it is."""

    code = "usage"


class CheckpointError(MdiError):
    """A checkpoint, chunk or block on disk is missing, damaged or not the one that was asked for."""

    code = "weights"


class SplitError(UsageError):
    """The model cannot be cut as asked."""


class MemoryShortError(MdiError):
    """There is too little memory to read or compute something that is itself correct."""


class NoMemoryError(UsageError):
    """A stage, or the caches of one sequence, do not fit into what this node has free."""

    code = "memory"


class LimitError(UsageError):
    """Nothing fits into the memory that this process may take.

    Attributes:
        least_bytes: the limit that would do.
    """

    code = "memory"

    def __init__(self, message: str, least_bytes: int) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


class PlacementError(MdiError):
    """The model does not fit the nodes.

    Attributes:
        missing: name of each node with too little memory, and how many bytes it lacks; "" where it may be any node.
    """

    code = "memory"

    def __init__(self, message: str, missing: tuple[tuple[str, int], ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class DownloadError(MdiError):
    """The model hub did not provide the requested files."""


class StoreError(MdiError):
    """A model cannot be kept, removed, exported or imported."""


class WireError(MdiError):
    """Bytes from a ring link that are no frame which this node may accept."""

    code = "wire"


class AccessError(MdiError):
    """The other side does not have our cluster key."""

    code = "key"


class RingError(MdiError):
    """The ring could not be closed, or it broke."""

    code = "ring"


ABSENT = "absent"


class NodeLostError(RingError):
    """A node of the ring died, stalled or answered garbage.

    Attributes:
        node: name of the node that was lost, as in the nodes file ("starter", "secondary0", ...).
        code: "lost" if it is silent, ABSENT if it has never answered, else that of its own error.
    """

    def __init__(self, node: str, message: str, code: str = "lost") -> None:
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
        code: the node's error code, see `mdi.control.messages.CODES`.
    """

    code = "control"

    def __init__(self, message: str, status: int | None = None, problem: str = "", code: str = "control") -> None:
        super().__init__(message)
        self.status = status
        self.problem = problem
        self.code = code


class EngineError(MdiError):
    """The generation loop cannot continue from its state.

    Attributes:
        code: "memory" if there is none left for caches or computing.
    """

    code = "engine"

    def __init__(self, message: str, code: str = "engine") -> None:
        super().__init__(message)
        self.code = code


class KernelError(MdiError):
    """The library of kernels is missing and cannot be compiled. Callers that can do without it use plain torch."""
