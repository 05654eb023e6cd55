"""The routes under /v1, and /health. Every refusal is a sentence, in the form that clients of this interface know."""

import asyncio
import json
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from cutaway.errors import CutawayError
from cutaway.generate import QueueFull
from cutaway.serve.models import MOST_LOADED, Models
from cutaway.serve.openai.answers import Answer, ChatAnswer, CompletionAnswer, event
from cutaway.serve.openai.asked import Asked, chat_asked, completion_asked
from cutaway.serve.openai.driver import Driver, Flow
from cutaway.serve.openai.prepare import Prepared, prepared
from cutaway.serve.openai.refusals import Refused
from cutaway.serve.owner import Owner

if TYPE_CHECKING:
    from cutaway.model import Model

Endpoint = Callable[[Request], Awaitable[Response]]
BODY_SECONDS = 30.0  # within which a body must have arrived
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]
_NO_ONE_THERE = Response(status_code=499)  # of a request whose client has left: nobody reads it
_log = logging.getLogger("cutaway.serve")


class OpenAI:
    """The endpoints, on the models and the owner thread of one server.

    Of each model `at_once` responses share passes and `waiting` more may queue; past that, requests get 429.
    """

    def __init__(self, models: Models, owner: Owner, default: str, at_once: int = 8, waiting: int = 32) -> None:
        self._models, self._owner, self._default = models, owner, default
        self._at_once, self._waiting = at_once, waiting
        self._drivers: OrderedDict[str, Driver] = OrderedDict()
        self._retired: list[Driver] = []  # of models that were loaded anew, whose last responses are under way
        self._since = int(time.time())

    def routes(self) -> list[Route]:
        """Everything under /v1, what is not there included, and /health."""
        table: list[tuple[str, str, Endpoint]] = [
            ("GET", "/health", self.health),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{name:path}", self.model),
            ("POST", "/v1/completions", self.completions),
            ("POST", "/v1/chat/completions", self.chats),
        ]
        routes = [Route(path, _answering(endpoint), methods=[method]) for method, path, endpoint in table]
        taken = {path: method for method, path, _ in table if "{" not in path}

        async def nothing_there(request: Request) -> Response:
            path = request.url.path
            if path in taken:
                raise Refused(f"{path} takes {taken[path]}, not {request.method}.", 405)
            raise Refused(f"There is nothing at {path[:80]}; there are {', '.join(taken)}.", 404)

        return [*routes, Route("/v1/{rest:path}", _answering(nothing_there), methods=_METHODS)]

    def close(self) -> None:
        """Cancel what is under way."""
        for driver in (*self._drivers.values(), *self._retired):
            driver.close()

    async def health(self, request: Request) -> Response:
        """200 once the model that the server was started with can answer, 503 before, and where it cannot."""
        entries = await asyncio.to_thread(self._models.entries)
        state = next((entry.state for entry in entries if entry.name == self._default), "absent")
        batches = [driver.batch for driver in self._drivers.values()]
        told = {
            "status": "ok" if state == "ready" else state,
            "model": self._default,
            "running": sum(batch.running for batch in batches),
            "waiting": sum(batch.waiting for batch in batches),
        }
        return _json(told, 200 if state == "ready" else 503)

    async def models(self, request: Request) -> Response:
        entries = await asyncio.to_thread(self._models.entries)
        names = [entry.name for entry in entries if entry.state not in ("absent", "failed")]
        names.sort(key=lambda name: name != self._default)
        return _json({"object": "list", "data": [self._described(name) for name in names]})

    async def model(self, request: Request) -> Response:
        return _json(self._described(await self._checked(request.path_params["name"])))

    async def completions(self, request: Request) -> Response:
        return await self._respond(request, completion_asked(await _body(request)), CompletionAnswer)

    async def chats(self, request: Request) -> Response:
        return await self._respond(request, chat_asked(await _body(request)), ChatAnswer)

    async def _respond(
        self, request: Request, asked: Asked, answer_kind: "Callable[[Model, Asked, Prepared], Answer]"
    ) -> Response:
        model = await self._loaded(asked.model)
        ready = await asyncio.to_thread(prepared, model, asked)
        if len(ready.requests) > self._waiting:
            raise Refused(
                f"{len(ready.requests)} responses are more than the {self._waiting} that may wait.", param="n"
            )
        answer = answer_kind(model, asked, ready)
        try:
            flow = self._driver(asked.model, model).submit(ready.requests, whole=not asked.stream)
        except QueueFull as error:
            raise Refused(str(error), 429, code="queue_full") from None
        if asked.stream:
            return Streamed(flow, _streamed(flow, answer))
        return await _gathered(request, flow, answer)

    async def _checked(self, name: str) -> str:
        try:
            return await asyncio.to_thread(self._models.check, name)
        except CutawayError as error:
            raise Refused(str(error), 404, param="model", code="model_not_found") from None

    async def _loaded(self, name: str) -> "Model":
        await self._checked(name)
        try:
            return await asyncio.shield(self._models.begin(name))
        except CutawayError as error:
            raise Refused(f"{name} cannot be loaded: {error}", 503, param="model") from None

    def _driver(self, name: str, model: "Model") -> Driver:
        """The model's batch. Those of models that nobody has used for longest are let go of, as the models are."""
        held = self._drivers.get(name)
        if held is None or held.model is not model:
            if held is not None:
                held.retire()
                self._retired = [driver for driver in (*self._retired, held) if not driver.idle]
            self._drivers[name] = Driver(model, self._owner, self._at_once, self._waiting)
            idle = [other for other, driver in self._drivers.items() if driver.idle and other != name]
            for other in idle[: max(0, len(self._drivers) - MOST_LOADED - 1)]:
                self._drivers.pop(other).close()
        self._drivers.move_to_end(name)
        return self._drivers[name]

    def _described(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._since, "owned_by": "cutaway"}


class Streamed(StreamingResponse):
    """A stream of events; a client that leaves ends the work at once, wherever the stream stands."""

    def __init__(self, flow: Flow, events: AsyncIterator[bytes]) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._flow = flow

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._flow.close()


async def _streamed(flow: Flow, answer: Answer) -> AsyncIterator[bytes]:
    try:
        for begun in answer.begun(len(flow.tickets)):
            yield begun
        async for index, step in flow:
            if piece := answer.piece(index, step):
                yield piece
        yield answer.ended(flow.reused(answer.n))
    except Exception as error:
        yield event(_failed(error).body)


async def _gathered(request: Request, flow: Flow, answer: Answer) -> Response:
    """The whole response, unless the client leaves before it is there."""

    async def gather() -> None:
        async for index, step in flow:
            answer.take(index, step)

    gathering = asyncio.ensure_future(gather())
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({gathering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not gathering.done():
            return _NO_ONE_THERE
        await gathering
        return _json(answer.whole(len(flow.tickets), flow.reused(answer.n)))
    finally:
        flow.close()
        gathering.cancel()
        leaving.cancel()


async def _left(request: Request) -> None:
    """Return when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> bytes:
    try:
        return await asyncio.wait_for(request.body(), BODY_SECONDS)
    except TimeoutError:
        raise Refused(f"The request's body did not arrive within {BODY_SECONDS:g} seconds.", 408) from None


def _answering(endpoint: Endpoint) -> Endpoint:
    """The endpoint, its refusals and failures turned into JSON."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ClientDisconnect:
            return _NO_ONE_THERE
        except Exception as error:
            return _failed(error).response()

    return answer


def _failed(error: BaseException) -> Refused:
    """What is told of an error: a refusal is one already, other sentences are told, and the rest is only logged."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, CutawayError):
        return Refused(str(error), 500)
    if isinstance(error, MemoryError):
        return Refused("Memory ran out; a shorter prompt or fewer responses need less.", 500, code="out_of_memory")
    _log.error("A request failed.", exc_info=error)
    return Refused("The server failed on this request; its log says where.", 500)


def _json(data: dict[str, Any], status: int = 200) -> Response:
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return Response(text, status, {"Cache-Control": "no-store"}, "application/json")
