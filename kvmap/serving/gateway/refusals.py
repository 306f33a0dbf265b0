"""Errors as OpenAI's clients know them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: what a client's library makes of a status
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class Refusal(Exception):
    """A request that gets no answer, and why.

    Attributes:
        status: of HTTP.
        message: one line, for people.
        code: a word for programs.
        param: the field at fault; None: none.
        headers: to send along.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Args: the attributes."""
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """As JSON."""
        return error_body(self.status, self.message, self.code, self.param)


def error_body(status: int, message: str, code: str, param: str | None = None) -> dict[str, Any]:
    """What OpenAI's clients expect beside a status that is no success, or in a stream that broke."""
    kind = TYPES.get(status, "api_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def mistaken(param: str, message: str, code: str = "invalid_value") -> Refusal:
    """A field that is not as it should be."""
    return Refusal(400, f"{param}: {message}", code, param)
