"""An open run: `with Session(...) as session`, then `submit` and `read` as often as needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from mdi.errors import NodeLostError, UsageError
from mdi.session.node_source import NodeSource
from mdi.spec.options import StarterOptions

if TYPE_CHECKING:
    from mdi.engine.sequence import SamplingParams
    from mdi.node.model_family import ModelFamily
    from mdi.node.sample import OnText, Sample
    from mdi.node.starter import StarterNode
    from mdi.node.starter_ports import StarterPorts


class Session:
    """One run of one model: opened, its nodes are found, the blocks placed and loaded, and the ring is closed.

    Left with an error, or not: the run is ended on all nodes, and everything is given back. What it measured can still be
    asked of `starter`. A session is opened once.

    Args:
        nodes: the nodes of the run; they outlive the session.
        options: the user's choices.
        n_tokens: that a text may have beyond the longest prompt.
        prompts: texts that will be submitted, or their ids; placement and caches are made for these.
        n_texts: at the same time; None: as many as prompts.
        family: makes that of the model; None is litgpt's.
        leave: end the processes of all secondaries as well, once the session is left without an error.
        on_close: called when the session begins to end.
        ports: that it shares with other sessions of this process; None: its own.

    Attributes:
        prompt_ids: of `prompts`, once it is open.
    """

    def __init__(
        self, nodes: NodeSource, options: StarterOptions, n_tokens: int, prompts: Sequence[str | Sequence[int]] = (),
        n_texts: int | None = None, family: Callable[[], ModelFamily] | None = None, leave: bool = False,
        on_close: Callable[[], None] = lambda: None, ports: StarterPorts | None = None,
    ) -> None:  # fmt: skip
        self._nodes = nodes
        self.options = options
        self._n_tokens = n_tokens
        self._prompts = prompts
        self._n_texts = n_texts or len(prompts)
        self._family = family
        self._leave = leave
        self._on_close = on_close
        self._ports = ports
        self._starter: StarterNode | None = None
        self._is_open = False
        self.prompt_ids: list[list[int]] = []

    def open(self) -> None:
        """Raises MdiError; nothing is left open then."""
        cluster = self._nodes.cluster()
        from mdi.node.starter import StarterNode

        starter = StarterNode(
            cluster, self.options, None if self._family is None else self._family(), self._nodes.newcomers, self._ports
        )
        try:
            starter.open()
            self.prompt_ids = [self._ids(starter, i, prompt) for i, prompt in enumerate(self._prompts)]
            length = max(map(len, self.prompt_ids), default=0) + self._n_tokens
            starter.place(self._n_texts, length, self._nodes.check)
            starter.prepare(length, self._nodes.check)
            starter.start()
        except BaseException:
            self._on_close()
            starter.close()
            raise
        self._starter, self._is_open = starter, True

    @staticmethod
    def _ids(starter: StarterNode, index: int, prompt: str | Sequence[int]) -> list[int]:
        """Raises UsageError if the prompt does not fit the context."""
        ids = starter.codec.encode_prompt(prompt) if isinstance(prompt, str) else list(prompt)
        try:
            starter.check_prompt(ids)
        except UsageError as e:
            raise UsageError(f"prompt {index}: {e}") from None
        return ids

    @property
    def was_open(self) -> bool:
        """Whether the ring has been closed, now or before: then there is a `starter`."""
        return self._starter is not None

    @property
    def starter(self) -> StarterNode:
        """The parts of the run and its metrics; from `open` on, also after `close`."""
        assert self._starter is not None
        return self._starter

    def submit(
        self, prompt: str, prompt_ids: Sequence[int], params: SamplingParams, stop: Sequence[str] = (),
        on_text: OnText | None = None, before: Sequence[int] = (), finish_reason: str | None = None,
    ) -> Sample:  # fmt: skip
        """Have a text continued, whose events `read` takes; see `Texts.submit`. `Sample.cancel` ends it."""
        return self.starter.submit(prompt, prompt_ids, params, stop, on_text, None, before, finish_reason)

    def read(self) -> None:
        """Until all texts that were submitted have ended. Raises what ended the engine before: MdiError."""
        self.starter.generate()

    @property
    def failed(self) -> bool:
        """Whether an error has ended the run, so that no text continues or begins."""
        return self.starter.failed

    def raise_failure(self) -> None:
        """Raise what has ended the run, if that was an error: MdiError."""
        self.starter.raise_failure()

    def close(self, error: BaseException | None = None) -> None:
        """End the run, and give everything back; harmless if repeated.

        Args:
            error: that was in the way, if one was.
        """
        if not self._is_open:
            return
        self._is_open = False
        self._on_close()
        try:
            if isinstance(error, NodeLostError):
                self.starter.mark_broken()
            self.starter.end(leave=self._leave and error is None)
        finally:
            self.starter.close()

    def __enter__(self) -> Session:
        self.open()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)
