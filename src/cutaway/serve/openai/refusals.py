"""Refusals in the form that clients of this interface understand: a status, and `{"error": {"message": …}}`."""

import json

from starlette.responses import Response

from cutaway.errors import CutawayError

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class Refused(CutawayError):
    """What is not done and why. `param` names the field that is to blame, `code` is for programs."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict:
        """The JSON of it."""
        kind = "server_error" if self.status >= 500 else _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The answer to a request that is refused, in ASCII whatever it names; a full queue says when to ask again."""
        headers = {"Cache-Control": "no-store"}
        if self.status == 429:
            headers["Retry-After"] = "1"
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return Response(json.dumps(self.body), self.status, headers, "application/json")


def speaks_openai(path: str) -> bool:
    """Whether whoever asks for `path` expects this form of refusal, and not the page's."""
    return path == "/v1" or path.startswith("/v1/") or path == "/health"
