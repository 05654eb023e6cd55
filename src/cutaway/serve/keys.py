"""The key that a server may ask for: programs give it as a bearer token, browsers as the password of a login."""

import base64
import binascii
import hmac

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cutaway.serve.openai.refusals import Refused, speaks_openai


class Keyed:
    """Answers 401 to whoever does not give the key; /health alone needs none."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode("utf-8")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health" or self._opens(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        refusal: Response
        if speaks_openai(scope["path"]):
            sentence = "The API key is missing or wrong; send it as Authorization: Bearer KEY."
            refusal = Refused(sentence, 401, code="invalid_api_key").response()
        else:
            sentence = "This server asks for its key: leave the name empty and give the key as the password."
            asking = {"WWW-Authenticate": 'Basic realm="Cutaway", charset="UTF-8"', "Cache-Control": "no-store"}
            refusal = JSONResponse({"error": sentence, "kind": "forbidden"}, 401, asking)
        await refusal(scope, receive, send)

    def _opens(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        key = given.strip().encode("latin-1")  # as the bytes that were sent
        if scheme.lower() == "basic":
            try:
                key = base64.b64decode(key, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(key, self._key)  # takes as long for a key that is nearly right
