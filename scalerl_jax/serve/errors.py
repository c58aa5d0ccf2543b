"""Refusals in OpenAI's form."""

import json
from typing import Any

from starlette.responses import Response


class ApiError(Exception):
    """A request that is not met, and why."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        """`param` names the field that is wrong."""
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """As OpenAI says it."""
        kinds = {429: "rate_limit_error"}
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {
            "message": str(self),
            "type": kinds.get(self.status, default),
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def response(self) -> Response:
        """The same as an answer."""
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else None
        return Response(
            # In ASCII: what a client sent, and is told of, may not be text.
            json.dumps(self.body()),
            status_code=self.status,
            media_type="application/json",
            headers=headers,
        )
