"""The gateway as an ASGI application: which endpoint is where, who may ask, how errors are answered."""

from __future__ import annotations

from http import HTTPStatus
from typing import TypeVar

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ..shm.shm_way_in import PATH
from .access import Access
from .answers import REFUSALS, Handler, endpoint, refused
from .endpoints import Endpoints

__all__ = ["application"]

G = TypeVar("G")

OPEN = {"/"}
"""What is answered to everybody: that a gateway is there."""


def application(endpoints: Endpoints[G], access: Access) -> Starlette:
    """Everything that `endpoints` answers, to whom `access` admits."""
    middleware = [Middleware(_Door, access)]
    if access.cors:  # in front of the door: a browser asks without a token whether it may ask
        every = ["*"]
        middleware.insert(0, Middleware(CORSMiddleware, allow_origins=every, allow_methods=every, allow_headers=every))
    return Starlette(routes=_routes(endpoints), middleware=middleware, exception_handlers=REFUSALS)


def _routes(endpoints: Endpoints[G]) -> list[Route]:
    listed: list[tuple[str, str, Handler]] = [
        ("GET", "/", endpoints.root),
        ("POST", "/register", endpoints.trainers.register),
        ("POST", "/register-env", endpoints.register_env),
        ("POST", "/disconnect-env", endpoints.disconnect_env),
        ("GET", "/wandb_info", endpoints.wandb_info),
        ("GET", "/info", endpoints.info),
        ("GET", "/status", endpoints.status),
        ("GET", "/status-env", endpoints.status_env),
        ("POST", "/scored_data", endpoints.scored_data),
        ("POST", "/scored_data_list", endpoints.scored_data_list),
        ("GET", "/batch", endpoints.trainers.batch),
        ("POST", "/acknowledge", endpoints.trainers.acknowledge),
        ("GET", "/latest_example", endpoints.latest_example),
        ("GET", "/reset_data", endpoints.reset_data),
        ("GET", "/metrics", endpoints.metrics),
    ]
    if endpoints.intake is not None:
        listed.append(("GET", PATH, endpoints.shm))
    refuses = endpoints.desk.refuses
    routes = [
        Route(path, endpoint(_refusing(refuses[path]) if path in refuses else handler), methods=[method])
        for method, path, handler in listed
    ]
    for route in routes:
        route.methods = (route.methods or set()) - {"HEAD"}  # which is to change nothing, and GET /batch does
    return routes


def _refusing(why: str) -> Handler:
    async def answer(_: Request) -> object:
        return refused(HTTPStatus.CONFLICT, why)

    return answer


class _Door:
    """Lets in whom `access` admits."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if (why := self._access.mistrusts(headers)) is not None:
            await refused(HTTPStatus.FORBIDDEN, why, {"Connection": "close"})(scope, receive, send)
        elif scope["path"] in OPEN or self._access.admits(headers.get("authorization")):
            await self._app(scope, receive, send)
        else:
            told = "expected Authorization: Bearer <token>, or the token in the URL as http://anyone:<token>@host:port"
            challenge = {"WWW-Authenticate": 'Bearer realm="penstock"', "Connection": "close"}
            await refused(HTTPStatus.UNAUTHORIZED, told, challenge)(scope, receive, send)
