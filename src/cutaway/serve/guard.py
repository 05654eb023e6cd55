"""Who may speak to the server: pages that it served itself. Checked before anything is read.

A page of another site that a person has open can send requests to 127.0.0.1 too. Its Host gives it away where a
name was pointed here (DNS rebinding), its Origin everywhere else.
"""

from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cutaway.serve.openai.refusals import Refused, speaks_openai

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MOST_BODY = 1_000_000  # bytes of a request

_POLICY = (
    "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Guard:
    """Refuses foreign Hosts and Origins and bodies that are too large; adds the headers that keep the page in itself.

    `hosts` are the names by which the server may be called, without ports.
    """

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...] = LOOPBACK) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            status, sentence = refusal
            if speaks_openai(scope["path"]):
                await Refused(sentence, status).response()(scope, receive, send)
                return
            kind = "too long" if status == 413 else "forbidden"
            await JSONResponse({"error": sentence, "kind": kind}, status)(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                answer["Content-Security-Policy"] = _POLICY
                answer["X-Content-Type-Options"] = "nosniff"
                answer["Referrer-Policy"] = "no-referrer"
                answer["Cross-Origin-Resource-Policy"] = "same-origin"
            await send(message)

        await self._app(scope, receive, send_guarded)

    def _refusal(self, scope: Scope, headers: Headers) -> tuple[int, str] | None:
        host = headers.get("host", "")
        if _name(host) not in self._hosts:
            return 403, f"This server does not answer to the host {host[:80]!r}; open it by the address it printed."
        origin = headers.get("origin")
        if origin is not None and _place(origin) != host.lower():
            return 403, f"A page of {origin[:80]!r} may not use this server."
        if scope["method"] not in ("POST",):
            return None
        if headers.get("content-type", "").split(";")[0].strip() != "application/json":
            return 415, "A request's body must be application/json."
        length = headers.get("content-length", "")
        if not (length.isascii() and length.isdecimal()):
            return 411, "A request with a body must say how long it is."
        if len(length) > 12 or int(length) > MOST_BODY:
            return 413, f"The request is longer than {MOST_BODY:,} bytes; shorten the prompt."
        return None


def _place(origin: str) -> str:
    """The host and port of an Origin; "" for what is none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:  # as of a bracket that is not closed
        return ""


def _name(host: str) -> str:
    """A Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
