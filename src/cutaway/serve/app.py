"""The application: the page's files, the page's data, and a place for further routes."""

import asyncio
import gzip
import mimetypes
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.resources import files

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from cutaway.errors import CutawayError
from cutaway.serve.guard import LOOPBACK, Guard
from cutaway.serve.keys import Keyed
from cutaway.serve.models import TOY, Models
from cutaway.serve.openai import OpenAI
from cutaway.serve.owner import Owner
from cutaway.serve.routes import Page
from cutaway.serve.runs import MOST_BYTES, Runs

LONGEST = 2048  # tokens of a prompt


def make_app(
    models: Models | None = None,
    *,
    default: str = TOY,
    longest: int = LONGEST,
    hosts: Sequence[str] = LOOPBACK,
    waiting: int = 8,
    most_bytes: int = MOST_BYTES,
    at_once: int = 8,
    queued: int = 32,
    api_key: str | None = None,
    more: Iterable[BaseRoute] = (),
) -> Guard:
    """The server as an ASGI application.

    `models` are those that may be chosen, `default` the one that the page opens (the toy answers until it is
    loaded). `longest` limits prompts in tokens, `waiting` the passes that may queue, `most_bytes` the runs that are
    held. `hosts` are the names by which it may be called. `at_once` responses to programs share passes, `queued` more
    may wait. With an `api_key` whoever does not give it is refused. `more` are further routes of the same server.
    """
    models = models if models is not None else Models()
    owner = Owner(waiting)
    page = Page(models, Runs(most_bytes), owner, longest, default)
    programs = OpenAI(models, owner, default, at_once, queued)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        with suppress(CutawayError):
            await asyncio.shield(models.begin(TOY))
        with suppress(CutawayError):
            models.begin(models.check(default))
        yield
        programs.close()
        owner.close()

    app = Starlette(
        routes=[*more, *programs.routes(), *page.routes(), *_static_routes()],
        lifespan=lifespan,
        exception_handlers={404: _nothing_there, 405: _wrong_method},
    )
    return Guard(app if api_key is None else Keyed(app, api_key), tuple(hosts))


def _static_routes() -> list[Route]:
    """One route for each file that was built, held in memory: no path that is asked for ever reaches the disk."""
    routes = []
    for path, data in _built_files():
        kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
        if path.endswith(".js"):
            kind = "text/javascript"
        hashed = path.startswith("assets/")
        headers = {"Cache-Control": "public, max-age=31536000, immutable" if hashed else "no-cache"}
        routes.append(Route("/" + path, _file(data, kind, headers)))
        if path == "index.html":
            routes.append(Route("/", _file(data, kind, headers)))
    return routes


def _built_files() -> list[tuple[str, bytes]]:
    found = []
    folders = [("", files("cutaway.serve") / "static")]
    while folders:
        prefix, folder = folders.pop()
        for entry in folder.iterdir():
            if entry.is_dir():
                folders.append((f"{prefix}{entry.name}/", entry))
            else:
                found.append((prefix + entry.name, entry.read_bytes()))
    return sorted(found)


def _file(data: bytes, kind: str, headers: dict[str, str]):  # type: ignore[no-untyped-def]
    """What answers with a file; packed for whoever can unpack it, since a page may be far from its server."""
    packs = kind.startswith("text/")  # fonts are packed already
    packed: list[bytes] = []  # when it is first asked for: a start does not wait for it

    async def answer(request: Request) -> Response:
        if not packs:
            return Response(data, media_type=kind, headers=headers)
        told = headers | {"Vary": "Accept-Encoding"}
        if not _unpacks(request):
            return Response(data, media_type=kind, headers=told)
        if not packed:
            packed.append(gzip.compress(data, mtime=0))
        return Response(packed[0], media_type=kind, headers=told | {"Content-Encoding": "gzip"})

    return answer


def _unpacks(request: Request) -> bool:
    """Whether an answer may come as gzip: it is named, and not at a weight of zero."""
    accepted = request.headers.get("accept-encoding", "").replace(" ", "").lower()
    named = dict(part.partition(";q=")[::2] for part in accepted.split(","))
    return "gzip" in named and named["gzip"] not in ("0", "0.0", "0.00", "0.000")


async def _nothing_there(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": f"There is nothing at {request.url.path[:80]}.", "kind": "missing"}, 404)


async def _wrong_method(request: Request, error: Exception) -> Response:
    sentence = f"{request.url.path[:80]} does not take {request.method}."
    return JSONResponse({"error": sentence, "kind": "refused"}, 405)
