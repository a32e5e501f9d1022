"""Keeps track of models: which are loaded, which requests use them, and which one is unloaded for another.

A request for a model that is not loaded loads it beside the others. If the memory is not enough, the least recently used
model is unloaded as soon as its requests are done, and so on until there is enough.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mdi.errors import Code, MdiError
from mdi.serve.api_errors import ApiError
from mdi.serve.catalog import Catalog
from mdi.serve.engine_client import EngineClient
from mdi.text.answers.forms import Form, form_of
from mdi.text.quoted import Quotes
from mdi.text.templates import ChatTemplate, read_template
from mdi.text.texts import TextCodec
from mdi.text.tokenizer import FileTokenizer, panics_as_errors

LOAD_WAIT_S = 60.0  # how long a request waits for its model, before it gets 503
LONGEST_LOAD_S = 24 * 3600.0  # weights may have to be sent to every node
RETRY_S = "2"
MOST_NAMED = 8  # models in an error
SHORTENED = 4  # a tokenizer may first make a text shorter: put accents on their letters, drop blanks


@dataclass(frozen=True)
class LoadedModel:
    """Attributes:
    context: tokens that a text may have, prompt included.
    n_vocabulary: ids that the model knows.
    n_virtual: tokens that adapters take before those of a text, by their names.
    width: numbers of a row.
    pooling: how its texts are embedded; no_pooling: why they are not.
    adapter: name of the one that its texts are computed with; "": none.
    tool_parser: see mdi.text.answers.forms.form_of.
    most_characters: a text with more has too many tokens, whatever it says.
    """

    name: str
    tokenizer: ServedTokenizer
    codec: TextCodec
    template: ChatTemplate
    context: int
    n_vocabulary: int
    most_characters: int
    n_virtual: dict[str, int]
    width: int = 0
    pooling: str | None = None
    no_pooling: str = ""
    adapter: str = ""
    tool_parser: str = ""

    def form_of(self, template: ChatTemplate) -> Form:
        """Of its answers to chats in this template."""
        return form_of(template.source, self.codec.special_marks.values(), self.tool_parser)

    @property
    def asked_name(self) -> str:
        """The name that a request has for it."""
        return self.adapter or self.name

    @classmethod
    def of(cls, facts: dict[str, Any]) -> LoadedModel:
        """Made from the engine process's report; CheckpointError if its files are damaged."""
        tokenizer = ServedTokenizer(facts["tokenizer"])
        codec = TextCodec(tokenizer, facts["tokenizer"]["eos_ids"], drawing=facts["tokenizer"]["drawing"])
        template = read_template(Path(facts["tokenizer"]["directory"]))
        source = f"{template.source}{template.for_chat(True).source}"  # chats are quoted for all marks that it writes
        marks = (name for name in tokenizer.own_tokens() if name in source and name.strip() and not name.isalnum())
        codec.quotes = Quotes({*codec.special_ids, *marks})
        context = facts["context"]
        most = SHORTENED * context * tokenizer.longest_token
        return cls(
            facts["name"], tokenizer, codec, template, context, facts["n_vocabulary"], most, facts["n_virtual"],
            facts["width"], facts["pooling"], facts["no_pooling"],
        )  # fmt: skip

    def with_adapter(self, name: str) -> LoadedModel:
        """The same for texts with an adapter."""
        return replace(self, adapter=name, context=self.context - self.n_virtual.get(name, 0))


@dataclass
class _Use:
    """Of one model: by how many requests, and when one last began or ended."""

    n: int = 0
    last_s: float = field(default_factory=time.monotonic)

    @property
    def idle_s(self) -> float:
        return 0.0 if self.n else time.monotonic() - self.last_s


class Models:
    """Belongs to one event loop.

    Args:
        refuse: raises ApiError when the server is ending.
    """

    def __init__(
        self, engine: EngineClient, catalog: Catalog, refuse: Callable[[], None], tool_parser: str = ""
    ) -> None:
        self._engine = engine
        self._catalog = catalog
        self._refuse = refuse
        self._tool_parser = tool_parser
        self._read: dict[str, tuple[dict[str, Any], LoadedModel]] = {}
        self._uses: dict[str, _Use] = {}
        self._loader: asyncio.Task[None] | None = None
        self._adapting = asyncio.Lock()
        self._adapters = catalog.adapters  # that the engine has
        self._leaving_adapters: set[str] = set()
        self._unloading: set[asyncio.Task[None]] = set()
        self.loading = ""
        self.leaving: set[str] = set()  # no new request may use them

    @property
    def latest(self) -> str:
        """The one that was used last, of those that serve if there are any; "" before there was one."""
        state = self._engine.state
        known = sorted(state.models, key=lambda name: (state.is_serving(name), self._use(name).last_s))
        return known[-1] if known else ""

    def progress_error(self, name: str = "") -> ApiError:
        """Why there is no answer yet, and the progress."""
        status = self._engine.state.statuses.get(name, self._engine.status)
        return ApiError(
            503, f"{status['model'] or 'the model'}: {status['text']}", "model_" + status["state"],
            headers={"retry-after": RETRY_S}, details={"progress": status},
        )  # fmt: skip

    @asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[LoadedModel]:
        """The model of a request, which stays loaded meanwhile; "" is the last used one.

        Raises:
            ApiError: there is none of that name, or it is not loaded in time.
        """
        asked = self._catalog.meant(name)
        is_adapter = asked in self._catalog.adapters
        name = self._catalog.model_of(asked or self.latest)
        deadline, was_tried = time.monotonic() + LOAD_WAIT_S, False
        while (loaded := self._serving(name)) is None:
            self._check(name)
            if self._loader is None:
                if was_tried:
                    raise self.progress_error(name)
                self.loading = name
                self._loader = asyncio.create_task(self._load(name))
            was_tried = was_tried or self.loading == name
            if time.monotonic() > deadline:
                raise self.progress_error(name)
            await self._wait(1.0)
        if is_adapter:
            self._check(asked)  # it may have been unloaded meanwhile
        uses = [self._use(one) for one in {name, asked if is_adapter else name}]
        for use in uses:
            use.n += 1
            use.last_s = time.monotonic()
        try:
            yield loaded.with_adapter(asked) if is_adapter else loaded
        finally:
            for use in uses:
                use.n -= 1
                use.last_s = time.monotonic()
            if not all(use.n for use in uses):
                self._engine.notify()

    async def load_adapter(self, name: str, folder: str) -> None:
        """Have a further adapter of the first model, on all its nodes. Raises ApiError."""
        self._check("")
        await self._adapt(name, folder)

    async def unload_adapter(self, name: str) -> None:
        """No new request gets it; it is unloaded when those under way are done. Raises ApiError."""
        self._check("")
        if name not in self._catalog.adapters:
            raise ApiError(404, f"there is no adapter {name[:100]!r}", "model_not_found", "adapter")
        self._leaving_adapters.add(name)
        self._show_adapters()
        try:
            while self._use(name).n and not self._engine.is_gone:
                await self._wait(1.0)
            await self._adapt(name, None)
        finally:
            self._leaving_adapters.discard(name)
            self._show_adapters()

    async def _adapt(self, name: str, folder: str | None) -> None:
        if self._adapting.locked():
            raise ApiError(409, "another adapter is being loaded or unloaded: wait until that is done", "busy")
        async with self._adapting:
            told = await self._engine.ask("adapt", {"adapter": name, "folder": folder}, LONGEST_LOAD_S)
        self._adapters = tuple(told["adapters"])
        self._show_adapters()
        n_virtual = self._engine.state.models[self._catalog.first_name]["n_virtual"]
        n_virtual.clear()
        n_virtual.update(told["n_virtual"])  # which the model that was read from it has, too

    def _show_adapters(self) -> None:
        """To requests: what the engine has, without those that are being unloaded."""
        self._catalog.adapters = tuple(one for one in self._adapters if one not in self._leaving_adapters)

    def load(self, name: str) -> None:
        """Begin to load a model, beside the others or in the place of some. Raises ApiError."""
        self._check_model(name)
        if self._loader is not None:
            raise ApiError(409, f"{self.loading} is being loaded: wait until it is ready", "busy")
        if not self._engine.state.is_serving(name):
            self.loading = name
            self._loader = asyncio.create_task(self._load(name))

    def unload(self, name: str) -> None:
        """Begin to unload a model: no request gets it any more, and those under way are finished. Raises ApiError."""
        self._check_model(name)
        if not self._engine.state.is_serving(name):
            raise ApiError(409, f"{name} is not loaded", "not_loaded")
        if name not in self.leaving:
            task = asyncio.create_task(self._give_up(name))
            self._unloading.add(task)
            task.add_done_callback(self._unloading.discard)

    def idle_s(self, name: str) -> float:
        """Seconds since a model was used last; 0 if it is in use."""
        return self._use(name).idle_s

    def _use(self, name: str) -> _Use:
        return self._uses.setdefault(name, _Use())

    def _serving(self, name: str) -> LoadedModel | None:
        """The model, if it is loaded and will not be unloaded for another one."""
        state = self._engine.state
        if self._engine.is_gone or not state.is_serving(name) or name in self.leaving:
            return None
        facts = state.models[name]
        if name not in self._read or self._read[name][0] is not facts:
            self._forget(name)
            try:
                self._read[name] = facts, replace(LoadedModel.of(facts), tool_parser=self._tool_parser)
            except MdiError as e:
                raise ApiError(500, f"{name} cannot be used: {e}", e.code) from e
        return self._read[name][1]

    def _forget(self, name: str) -> None:
        """Forget what was read of a model that is not loaded any more."""
        if (read := self._read.pop(name, None)) is not None:
            read[1].template.close()

    def close(self) -> None:
        """When the server ends."""
        for name in list(self._read):
            self._forget(name)

    def _check(self, name: str) -> None:
        self._refuse()
        if name and name not in self._catalog.names():
            raise ApiError(
                404,
                f"there is no model {name[:100]!r}; there are {', '.join(self._catalog.names()[:MOST_NAMED])}",
                "model_not_found",
                "model",
            )
        if not self._engine.state.models:  # the first one is still being loaded
            raise self.progress_error()

    def _check_model(self, name: str) -> None:
        self._check(name)
        if name in self._catalog.adapters:
            raise ApiError(409, f"{name} is an adapter, which comes with its model", "adapter", "model")

    async def _load(self, name: str) -> None:
        """Load a model; unload others for it if needed."""
        try:
            while (code := await self._ask("load", name)) and (code.less_fits or code.again):
                if not (victim := self._victim(name)):
                    break
                await self._give_up(victim)
        finally:
            self._loader = None
            self._engine.notify()

    def _victim(self, name: str) -> str:
        """The model to unload: the one unused for longest; of those in use, the one with the oldest last request."""
        state = self._engine.state
        others = [one for one in state.models if state.is_serving(one) and one != name]
        return min(others, key=lambda one: (self._use(one).n > 0, self._use(one).last_s), default="")

    async def _give_up(self, name: str) -> None:
        """Once no request uses it any more; for two that give up the same one, once."""
        if name in self.leaving:
            while name in self.leaving:
                await self._wait(1.0)
            return
        self.leaving.add(name)
        try:
            while self._use(name).n and not self._engine.is_gone:
                await self._wait(1.0)
            await self._ask("unload", name)
            self._forget(name)
        finally:
            self.leaving.discard(name)
            self._engine.notify()

    async def _ask(self, what: str, name: str) -> Code | None:
        """The error code; None if it is done, or if the engine is gone."""
        try:
            told = await self._engine.ask(what, {"model": name}, LONGEST_LOAD_S)
        except ApiError:
            return None
        return Code.of(told["code"]) if told["code"] else None

    async def _wait(self, timeout_s: float) -> None:
        await asyncio.wait([waiting := asyncio.ensure_future(self._engine.wait_for_change())], timeout=timeout_s)
        waiting.cancel()

    async def give_up_unused(self, limit_s: float | None) -> None:
        """Unload models that were not used for so long; None: never."""
        while limit_s is not None:
            await asyncio.sleep(min(1.0, limit_s))
            for name in list(self._engine.state.models):
                is_idle = self._engine.state.is_serving(name) and self.idle_s(name) > limit_s
                if is_idle and self._loader is None:
                    await self._give_up(name)


class ServedTokenizer(FileTokenizer):
    """A tokenizer made from the engine process's report.

    Args:
        facts: see TextCodec.facts; with the directory.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        super().__init__(Path(facts["directory"]), facts)

    def ids_of(self, text: str, adds_special: bool = True) -> list[int]:
        """As FileTokenizer's, but as a batch: only then does the library release the interpreter's lock."""
        if self.backend == "huggingface":
            with panics_as_errors():
                return list(self.processor.encode_batch_fast([text], add_special_tokens=adds_special)[0].ids)
        return super().ids_of(text, adds_special)

    @property
    def longest_token(self) -> int:
        """Its length in characters."""
        if self.backend == "huggingface":
            return max(map(len, self.processor.get_vocab()), default=1)
        return max(len(self.processor.id_to_piece(i)) for i in range(self.processor.vocab_size()))
