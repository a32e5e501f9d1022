"""Common parts of all endpoints: a request's body, its turn, its deadline, and its errors."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.types import Receive, Scope, Send

from mdi.serve.api_errors import ApiError
from mdi.serve.api_state import ApiState
from mdi.serve.asgi_exchange import ClientGone, Exchange
from mdi.serve.models import LoadedModel
from mdi.serve.parameters import CommonFields

logger = logging.getLogger("mdi")


class EndpointJob(ABC):
    """A parsed request: what to generate, and how to answer. See completions.py and chat.py.

    Attributes:
        fields: those that all requests have.
        n_texts: that it asks for.
    """

    fields: CommonFields
    n_texts: int

    @abstractmethod
    async def run(self, api: ApiState, model: LoadedModel, exchange: Exchange) -> None:
        """Have the texts generated, and answer with them."""


class Endpoint:
    """An ASGI application that answers one path.

    Args:
        parse: makes a Job of the body. Raises ApiError.
    """

    def __init__(self, api: ApiState, parse: Callable[[Any], EndpointJob]) -> None:
        self._api = api
        self._parse = parse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        try:
            job = await exchange.parsed(self._parse)
            await exchange.beside_client(self._limited(job, exchange))
        except ClientGone:
            return
        except ApiError as e:
            await exchange.fail(e)
        except RecursionError:  # what could just be read may be too deep to be written again
            await exchange.fail(ApiError(400, "the body is nested too deeply", "invalid_json"))
        except Exception:
            logger.exception("a request failed")
            await exchange.fail(ApiError(500, "the server failed; its log has the reason", "internal"))

    def _limited(self, job: EndpointJob, exchange: Exchange) -> Coroutine[Any, Any, None]:
        work = self._run(job, exchange)
        return work if job.fields.deadline_s is None else _within(work, job.fields.deadline_s)

    async def _run(self, job: EndpointJob, exchange: Exchange) -> None:
        api, key = self._api, exchange.key
        owner, priority = ("", 0) if key is None else (key.name, key.priority)
        if (grammar := job.fields.grammar) is not None:
            await api.schemas.check(grammar["schema"])
        async with (
            api.models.using(job.fields.model) as model,
            api.queue(model.name).entered(owner, priority, job.n_texts),
        ):
            await job.run(api, model, exchange)


async def _within(work: Coroutine[Any, Any, None], deadline_s: float) -> None:
    try:
        await asyncio.wait_for(work, deadline_s)
    except asyncio.TimeoutError:  # noqa: UP041 - another class before Python 3.11
        raise ApiError(504, f"it was not finished within {deadline_s:g} s", "deadline") from None
