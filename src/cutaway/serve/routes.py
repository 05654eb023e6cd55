"""The page's routes: models, runs, tensors, cells. Every refusal is a sentence in JSON."""

import asyncio
import json
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cutaway.errors import CutawayError
from cutaway.points import Point, parse_point
from cutaway.reading import Unreadable, parsed
from cutaway.serve import cards
from cutaway.serve.edits import edits_of
from cutaway.serve.export import EXPORTS, exported
from cutaway.serve.heads import atlas
from cutaway.serve.look import Look
from cutaway.serve.models import Models
from cutaway.serve.owner import Busy, Owner
from cutaway.serve.protocol import Continuation
from cutaway.serve.requests import (
    MOST_SLICES,
    MOST_STEPS,
    Slice,
    TooLong,
    fields,
    number_or_none,
    point_of,
    prompt_of,
    run_named,
    slice_of,
    whole,
)
from cutaway.serve.runs import Run, Runs
from cutaway.serve.tensors import first_bytes, head_row, tensor_bytes

Endpoint = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")
_ASKED_AGAIN = 0.1  # seconds after which it is asked whether somebody still waits
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_log = logging.getLogger("cutaway.serve")


class Missing(CutawayError):
    """A run that is not held."""


class Page:
    """The endpoints, on the models, the runs and the owner thread of one server."""

    def __init__(self, models: Models, runs: Runs, owner: Owner, longest: int, default: str) -> None:
        self._models, self._runs, self._owner = models, runs, owner
        self._longest, self._default = longest, default
        self._reads = asyncio.Semaphore(4)

    def routes(self) -> list[Route]:
        """Everything under /api."""
        table: list[tuple[str, str, Endpoint]] = [
            ("GET", "/api/models", self.models),
            ("GET", "/api/card", self.card),
            ("GET", "/api/lineage", self.lineage),
            ("GET", "/api/uniforms", self.uniforms),
            ("POST", "/api/run", self.run),
            ("POST", "/api/continue", self.go_on),
            ("POST", "/api/runs/{run}/tensors", self.tensors),
            ("DELETE", "/api/runs/{run}", self.leave),
            ("GET", "/api/runs/{run}/atlas", self.atlas),
            ("GET", "/api/runs/{run}/norms", self.norms),
            ("GET", "/api/runs/{run}/cell", self.cell),
            ("GET", "/api/runs/{run}/row", self.row),
            ("GET", "/api/runs/{run}/token", self.token),
            ("GET", "/api/runs/{run}/export", self.export),
        ]
        return [Route(path, _answering(endpoint), methods=[method]) for method, path, endpoint in table]

    async def models(self, request: Request) -> Response:
        entries = await asyncio.to_thread(self._models.entries)
        return _json({"models": [asdict(entry) for entry in entries], "default": self._default})

    async def card(self, request: Request) -> Response:
        name = request.query_params.get("model", "")
        model = await self._models.get(name)
        return _json(asdict(cards.model_card(model, name, self._longest)))

    async def lineage(self, request: Request) -> Response:
        name = request.query_params.get("model", "")
        model = await self._models.get(name)
        text = request.query_params.get("point", "")
        point = parse_point(text[:200], model.spec)
        prompt = request.query_params.get("prompt", "…")[:2000]
        engine = "" if model.engine.name == "cpu" else f", engine={model.engine.name!r}"
        return _json(asdict(cards.lineage(point, model.spec, repr(name) + engine, repr(prompt))))

    async def uniforms(self, request: Request) -> Response:
        """The first numbers that a seed gives, from 0 to 1: those that `generate(seed=…)` draws with."""
        seed = _number(request, "seed", 0, 2**53)
        count = _number(request, "count", 1, 4096)
        return _json({"seed": seed, "uniforms": np.random.default_rng(seed).random(count).tolist()})

    async def run(self, request: Request) -> Response:
        body = fields(await _body(request), ("model", "prompt", "ids", "edits", "after", "slices"))
        model = await self._models.get(body.get("model"))
        prompt = prompt_of(body)
        edits = edits_of(body.get("edits", []))
        asked = await asyncio.to_thread(model.prompt, prompt)
        ids = asked.ids
        if len(ids) > self._longest:
            raise TooLong(f"The prompt has {len(ids):,} tokens; this page takes {self._longest:,}. Shorten it.")
        former = self._runs.find(run_named(body.get("after")))
        begun = time.perf_counter()
        if former is not None and former.model is model and not edits and former.same(asked):
            run = former
        else:
            run = await self._owned(request, lambda: Run(model, asked, edits, former))
        self._runs.add(run)
        seconds = time.perf_counter() - begun
        if "slices" not in body:
            return _json(asdict(cards.manifest(run, body["model"], seconds)))
        slices = _slices(body, run)
        look = await self._look(request, run, [one.point for one in slices])
        told = cards.manifest
        return await self._read(request, lambda: first_bytes(run, look, told(run, body["model"], seconds), slices))

    async def go_on(self, request: Request) -> Response:
        """A continuation of some ids, token by token, as `generate` would give it."""
        body = fields(await _body(request), ("model", "ids", "edits", "steps", "seed", *_SAMPLING))
        model = await self._models.get(body.get("model"))
        ids = prompt_of({"ids": body.get("ids")})
        if len(ids) > self._longest:
            raise TooLong(f"The prompt has {len(ids):,} tokens; this page takes {self._longest:,}. Shorten it.")
        steps = whole(body.get("steps", 16), "steps", 1, MOST_STEPS)
        edits = edits_of(body.get("edits", []))
        settings: dict[str, Any] = {name: number_or_none(body, name) for name in (*_SAMPLING, "seed") if name in body}
        if edits:
            settings["edits"] = edits

        def continued() -> Continuation:
            out = model.generate(ids, max_tokens=steps, **settings)
            told_tokens = [
                cards.NextTokenCard(token, model.piece(token), 0.0, float(np.exp(logprob)))
                for token, logprob in zip(out.tokens, out.logprobs, strict=True)
            ]
            return Continuation(told_tokens, out.finish)

        return _json(asdict(await self._owned(request, continued)))

    async def tensors(self, request: Request) -> Response:
        run = self._run(request)
        slices = _slices(fields(await _body(request), ("slices",)), run)
        look = await self._look(request, run, [one.point for one in slices])
        return await self._read(request, lambda: b"".join(tensor_bytes(look, one) for one in slices))

    async def leave(self, request: Request) -> Response:
        """A page that closes lets go of its run and of those before it."""
        self._runs.leave(request.path_params["run"])
        return Response(status_code=204)

    async def atlas(self, request: Request) -> Response:
        run = self._run(request)
        layers = run.model.spec.n_layers
        first = _number(request, "first", 0, layers - 1)
        stop = _number(request, "stop", first + 1, layers)
        return await self._read(request, lambda: atlas(run.trace, first, stop))

    async def norms(self, request: Request) -> Response:
        run = self._run(request)
        return await self._read(request, lambda: run.norms().tobytes())

    async def cell(self, request: Request) -> Response:
        run = self._run(request)
        point = point_of(request.query_params.get("point"), run)
        parts = request.query_params.get("at", "").split(",")
        if not 1 <= len(parts) <= 3 or not all(part.isascii() and part.isdecimal() and len(part) < 9 for part in parts):
            raise CutawayError("A cell is named by whole numbers with commas between, as in at=0,3,1.")
        look = await self._look(request, run, [point] if point.layer is None else run.layer_points(point.layer))
        cell = await asyncio.to_thread(look.arithmetic.cell, point, tuple(map(int, parts)))
        return _json(asdict(cell))

    async def row(self, request: Request) -> Response:
        run = self._run(request)
        spec = run.model.spec
        layer = _number(request, "layer", 0, spec.n_layers - 1)
        head = _number(request, "head", 0, spec.layers[layer].attention.n_heads - 1)
        position = _number(request, "position", 0, run.length - 1)
        look = await self._look(request, run, [Point("attn.pattern", layer)])
        return await self._read(request, lambda: head_row(look, layer, head, position).astype("<f4").tobytes())

    async def token(self, request: Request) -> Response:
        run = self._run(request)
        token = _number(request, "id", 0, run.model.spec.vocab_size - 1)
        return _json(asdict(cards.candidate(run, token)))

    async def export(self, request: Request) -> Response:
        run = self._run(request)
        point = point_of(request.query_params.get("point"), run)
        form = request.query_params.get("format", "csv")
        if form not in EXPORTS:
            raise CutawayError(f"The format is {form[:20]!r}; it must be {' or '.join(EXPORTS)}.")
        look = await self._look(request, run, [point])
        data = await asyncio.to_thread(exported, look, point, form)
        name = f"{point}.{form}"
        return Response(
            data, media_type=EXPORTS[form], headers={"Content-Disposition": f'attachment; filename="{name}"'}
        )

    def _run(self, request: Request) -> Run:
        name = request.path_params["run"]
        try:
            return self._runs.get(name)
        except KeyError:
            raise Missing("This run is no longer held; run the prompt again.") from None

    async def _look(self, request: Request, run: Run, points: list[Point]) -> Look:
        look = run.look()  # what it holds stays, whatever the owner thread lets go of meanwhile
        if not look.missing(points):
            return look
        return await self._owned(request, lambda: run.look(points))

    async def _owned(self, request: Request, work: Callable[[], T]) -> T:
        """`work` in the owner thread; it is dropped where nobody waits for it any more when its turn comes."""
        left = threading.Event()

        def unless_left() -> T:
            if left.is_set():
                raise Missing("Nobody waits for this any more.")
            return work()

        task = asyncio.ensure_future(self._owner.run(unless_left))
        try:
            while not (await asyncio.wait({task}, timeout=_ASKED_AGAIN))[0]:
                if await request.is_disconnected():
                    left.set()
            return task.result()
        finally:
            left.set()

    async def _read(self, request: Request, work: Callable[[], bytes]) -> Response:
        async with self._reads:
            if await request.is_disconnected():
                raise Missing("Nobody waits for this any more.")
            data = await asyncio.to_thread(work)
        return Response(data, media_type="application/octet-stream", headers={"Cache-Control": "no-store"})


def _answering(endpoint: Endpoint) -> Endpoint:
    """The endpoint, its refusals turned into JSON."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except Busy as error:
            return _refusal(error, "busy", 503)
        except TooLong as error:
            return _refusal(error, "too long", 413)
        except Missing as error:
            return _refusal(error, "missing", 404)
        except CutawayError as error:
            return _refusal(error, "refused", 400)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except MemoryError:
            return _refusal(CutawayError("Memory ran out; a shorter prompt needs less."), "too long", 413)
        except Exception as error:
            _log.error("A request of the page failed.", exc_info=error)
            return _refusal(CutawayError("The server failed on this request; its log says where."), "refused", 500)

    return answer


def _refusal(error: CutawayError, kind: str, status: int) -> Response:
    return JSONResponse({"error": str(error), "kind": kind}, status)


def _json(data: object) -> Response:
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(
        text.encode("utf-8", "surrogatepass"), media_type="application/json", headers={"Cache-Control": "no-store"}
    )


async def _body(request: Request) -> object:
    try:
        return parsed(await request.body())
    except Unreadable as error:
        raise CutawayError(f"The request's body is not JSON: {error}.") from None


def _slices(body: dict[str, Any], run: Run) -> list[Slice]:
    asked = body.get("slices")
    if not isinstance(asked, list) or not 1 <= len(asked) <= MOST_SLICES:
        raise CutawayError(f"slices must be a list of 1 to {MOST_SLICES} parts of tensors.")
    return [slice_of(one, run) for one in asked]


def _number(request: Request, name: str, low: int, high: int) -> int:
    text = request.query_params.get(name, "")
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise CutawayError(f"{name} is {text[:40]!r}; it must be a whole number from {low} to {high}.")
    return whole(int(text), name, low, high)
