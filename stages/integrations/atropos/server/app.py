"""The gateway as an ASGI application: routes, access, compression, and how errors are answered. Knows no queue."""

from __future__ import annotations

import base64
import binascii
import hmac
import math
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.authentication import AuthCredentials, AuthenticationBackend, AuthenticationError, BaseUser, SimpleUser
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from ....._schemas import InvalidRecord
from ....http.limits import BodyRefused
from ..contract import SHM_PATH
from ..queue.records import QueueFull, RequestRejected
from .endpoints import Endpoints
from .server_config import ServerConfig

G = TypeVar("G")

COMPRESSED_FROM_BYTES = 1000
"""As in the original."""

COMPRESSION_LEVEL = 1
"""A batch is read once, over a fast network: level 9 makes it a tenth smaller, for five times the work."""

OWN_SITES = ("none", "same-origin")
"""Values of Sec-Fetch-Site for an address typed into a browser, and for requests of the gateway's own pages."""

Handler = Callable[[Request], Awaitable[Any]]
"""Answers a request with a value that has a JSON form, or with an ASGI application."""


def application(endpoints: Endpoints[G], config: ServerConfig, address: str) -> Starlette:
    """Return the application that serves `endpoints` to clients that `config` admits; it listens at `address`."""
    middleware = [
        Middleware(AuthenticationMiddleware, backend=_Access(config.token), on_error=_denial),
        Middleware(RequestBodyLimitMiddleware, max_body_size=config.limits.request_bytes),
    ]
    if config.token is None:  # against pages with a host name that resolves to this server; they know no token
        hosts = ["localhost", "localhost.", "127.0.0.1", "[::1]", config.host, address]
        middleware.insert(0, Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False))
    return Starlette(
        routes=_routes(endpoints), middleware=middleware, exception_handlers=dict.fromkeys(ERRORS, _answer_error)
    )


def _routes(endpoints: Endpoints[G]) -> list[Route]:
    listed: list[tuple[str, str, Handler]] = [
        ("GET", "/", endpoints.root),
        ("POST", "/register", endpoints.register),
        ("POST", "/register-env", endpoints.register_env),
        ("POST", "/disconnect-env", endpoints.disconnect_env),
        ("GET", "/wandb_info", endpoints.wandb_info),
        ("GET", "/info", endpoints.info),
        ("GET", "/status", endpoints.status),
        ("GET", "/status-env", endpoints.status_env),
        ("POST", "/scored_data", endpoints.scored_data),
        ("POST", "/scored_data_list", endpoints.scored_data_list),
        ("GET", "/batch", endpoints.batch),
        ("POST", "/acknowledge", endpoints.acknowledge),
        ("GET", "/latest_example", endpoints.latest_example),
        ("GET", "/reset_data", endpoints.reset_data),
    ]
    if endpoints.shared is not None:
        listed.append(("GET", SHM_PATH, endpoints.shm))
    unavailable = endpoints.backend.unavailable
    gzip = Middleware(GZipMiddleware, minimum_size=COMPRESSED_FROM_BYTES, compresslevel=COMPRESSION_LEVEL)
    compressed = {"GET": [gzip]}  # answers to POST are short, and every compressor takes 300 KB
    routes = [
        Route(path, _endpoint(handler, unavailable.get(path)), methods=[method], middleware=compressed.get(method))
        for method, path, handler in listed
    ]
    for route in routes:
        route.methods = (route.methods or set()) - {"HEAD"}  # HEAD must change no state, and GET /batch does
    return routes


def _endpoint(handler: Handler, unavailable: str | None) -> Callable[[Request], Awaitable[Response]]:
    async def answering(request: Request) -> Any:
        if unavailable is not None:
            return refusal(HTTPStatus.CONFLICT, unavailable)
        answer = await handler(request)
        return answer if callable(answer) else Response(msgspec.json.encode(answer), media_type="application/json")

    return answering


# -- access ------------------------------------------------------------------------------------------------------------


class _Denied(AuthenticationError):
    """A request that is denied."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Access(AuthenticationBackend):
    """Admits requests that carry the token, if one is set, and that no web page sent."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    async def authenticate(self, conn: HTTPConnection) -> tuple[AuthCredentials, BaseUser] | None:
        """See starlette's AuthenticationBackend. `/` needs no token."""
        headers = conn.headers
        site = headers.get("sec-fetch-site", OWN_SITES[0])
        if (origin := headers.get("origin")) is not None or site not in OWN_SITES:
            raise _Denied(HTTPStatus.FORBIDDEN, f"expected no request of a web page, got one of {origin or site}")
        if conn.scope["path"] != "/" and not self._admits(headers.get("authorization", "")):
            raise _Denied(
                HTTPStatus.UNAUTHORIZED,
                "expected Authorization: Bearer <token>, or the token in the URL as http://anyone:<token>@host:port",
            )
        return AuthCredentials(), SimpleUser("client")

    def _admits(self, authorization: str) -> bool:
        """Return whether the header carries the token, in a time that does not depend on the token.

        HTTP clients send `Basic` for `http://anyone:<token>@host:port`, so a URL is enough for them.
        """
        if self._token is None:
            return True
        kind, _, secret = authorization.partition(" ")
        if kind.lower() == "basic":
            secret = _password(secret)
        elif kind.lower() != "bearer":
            return False
        return hmac.compare_digest(secret.encode(), self._token.encode())


def _password(credentials: str) -> str:
    try:
        return base64.b64decode(credentials, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _denial(_: HTTPConnection, error: AuthenticationError) -> Response:
    status = error.status if isinstance(error, _Denied) else HTTPStatus.UNAUTHORIZED
    headers = {"Connection": "close"}
    if status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = 'Bearer realm="penstock"'
    return refusal(status, str(error), headers)


# -- errors ------------------------------------------------------------------------------------------------------------


def refusal(status: int, detail: Any, headers: dict[str, str] | None = None) -> Response:
    """Return an answer with the reason, in the form that errors have in the original."""
    return Response(error_body(status, detail), status, headers=headers, media_type="application/json")


def error_body(_: int, detail: Any) -> bytes:
    """Return the JSON of an answer with the reason, in the form that errors have in the original."""
    return msgspec.json.encode({"detail": detail})


async def _answer_error(_: Request, error: Exception) -> Response:
    match error:
        case HTTPException(status_code=status, detail=detail, headers=headers):
            return refusal(status, detail, dict(headers or {}))
        case BodyRefused(status=HTTPStatus.BAD_REQUEST):  # as in the original
            return PlainTextResponse(str(error), error.status, headers={"Connection": "close"})
        case InvalidRecord() | RequestRejected(status=HTTPStatus.UNPROCESSABLE_ENTITY):
            invalid = [{"type": "value_error", "loc": ["body"], "msg": str(error)}]
            return refusal(HTTPStatus.UNPROCESSABLE_ENTITY, invalid)
        case BodyRefused() | RequestRejected():
            return refusal(error.status, str(error), _headers(error))
    return Response(status_code=HTTPStatus.BAD_REQUEST)  # is not sent: the client disconnected


def _headers(error: BodyRefused | RequestRejected) -> dict[str, str]:
    headers = {"Connection": "close"} if isinstance(error, BodyRefused) else {}  # the rest of it is not read
    if error.status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers["Retry-After"] = str(math.ceil(error.retry_after_s) if isinstance(error, QueueFull) else 1)
    return headers


ERRORS: tuple[type[Exception], ...] = (HTTPException, BodyRefused, InvalidRecord, RequestRejected, ClientDisconnect)
