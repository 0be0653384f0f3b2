"""Refusals of requests, in the form of errors that the clients of OpenAI and of Anthropic read. Knows no rollout."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec

from ...._pipeline.accounting.telemetry import get_logger
from ...._pipeline.errors import InvalidConfig, InvalidData, PenstockError
from ...._schemas import InvalidRecord
from ...http.limits import BodyRefused
from ..agent_client import CallRefused, ContextTooLong, RolloutDeadline, RolloutEnded

T = TypeVar("T")

log = get_logger("penstock.agents")

UNKNOWN_FIELD = re.compile(r"unknown field `([^`]+)`")
PLACE = re.compile(r"at `\$\.([A-Za-z_]+)")
FIELD = re.compile(r"(?:[A-Za-z]+\.)?([a-z_]+)[\[:]")

LONGEST_MESSAGE = 500
"""Characters: a message may quote the request."""

RETRY_AFTER_S = "1"

NO_RETRY = {"x-should-retry": "false"}
"""Read by the clients of OpenAI and Anthropic, which repeat a request after 408, 409 and 5xx."""

OF_CALLS: tuple[tuple[type[CallRefused], HTTPStatus, str, dict[str, str]], ...] = (
    (ContextTooLong, HTTPStatus.BAD_REQUEST, "context_length_exceeded", {}),
    (RolloutDeadline, HTTPStatus.REQUEST_TIMEOUT, "rollout_deadline", NO_RETRY),
    (RolloutEnded, HTTPStatus.CONFLICT, "rollout_ended", NO_RETRY),
)
"""Status, code and headers of a call that is not sampled."""

TOO_LONG = "prompt is too long: this model's maximum context length is exceeded: "
"""Begins the message of such a refusal: LiteLLM and some agents know it by this text, and not by its code."""

KINDS = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}
"""`type` of an error by status, as both providers have it; `invalid_request_error` for others."""


class RequestRefused(PenstockError):
    """A request that is not answered with a completion."""

    def __init__(
        self,
        status: HTTPStatus,
        message: str,
        *,
        code: str | None = None,
        field: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(" ".join(message.split())[:LONGEST_MESSAGE])
        self.status = status
        self.code = code
        self.field = None if field is None else field[:LONGEST_MESSAGE]
        self.headers = headers or {}


def unsupported(field: str, message: str) -> RequestRefused:
    """Return the refusal of a field, or of its value."""
    return RequestRefused(HTTPStatus.BAD_REQUEST, f"{field}: {message}", code="unsupported_value", field=field)


def decoded(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Return the request in `body`.

    Raises:
        RequestRefused: it is no JSON, or has a field that is unknown or of another type.
    """
    try:
        return decoder.decode(body)
    except RecursionError:
        message, field = "expected JSON of less depth", None
    except (msgspec.DecodeError, UnicodeError) as error:
        message = str(error)
        unknown, place = UNKNOWN_FIELD.search(message), PLACE.search(message)
        field = unknown[1] if unknown else place[1] if place else None
        if unknown:
            message = f"{field}: unknown, or not supported here{message[message.find(' - at') :] if place else ''}"
    raise RequestRefused(HTTPStatus.BAD_REQUEST, message, field=field)


def refusal_of(error: Exception) -> RequestRefused:
    """Return an error of a call as a refusal; any other one is a failure of the engine."""
    if isinstance(error, RequestRefused):
        return error
    for kind, status, code, headers in OF_CALLS:
        if isinstance(error, kind):
            told = TOO_LONG if kind is ContextTooLong else ""
            return RequestRefused(status, told + str(error), code=code, headers=headers)
    if isinstance(error, BodyRefused):
        return RequestRefused(error.status, str(error), headers={"Retry-After": RETRY_AFTER_S, "Connection": "close"})
    if isinstance(error, InvalidConfig | InvalidData | InvalidRecord):
        named = FIELD.match(str(error))
        return RequestRefused(HTTPStatus.BAD_REQUEST, str(error), field=named[1] if named else None)
    log.warning("engine_failed", error=repr(error), exc_info=error)
    reason = f"the engine failed: {type(error).__name__}: {error}"
    return RequestRefused(HTTPStatus.SERVICE_UNAVAILABLE, reason, code="engine_failed", headers=NO_RETRY)


def openai_error(refused: RequestRefused) -> dict[str, Any]:
    """Return the body of a refusal, as OpenAI has it."""
    kind = KINDS.get(refused.status, "invalid_request_error")
    return {"error": {"message": str(refused), "type": kind, "param": refused.field, "code": refused.code}}


def anthropic_error(refused: RequestRefused) -> dict[str, Any]:
    """Return the body of a refusal, as Anthropic has it, with the code of OpenAI's."""
    kind = KINDS.get(refused.status, "invalid_request_error")
    told = {"type": kind, "message": str(refused), "code": refused.code, "details": {"error_code": refused.code}}
    return {"type": "error", "error": told}


def openai_error_body(status: HTTPStatus, message: str) -> bytes:
    """Return the JSON of a refusal by the server itself."""
    return msgspec.json.encode(openai_error(RequestRefused(status, message)))
