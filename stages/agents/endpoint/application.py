"""The endpoint as an ASGI application: keys, bodies, streams, clients that hang up, and repeated requests."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, TypeAlias

import anyio
import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...._pipeline.util.exception_groups import unwrap_first
from ...http.limits import Bodies, Limits
from .call_fields import CallFields
from .refusals import RETRY_AFTER_S, RequestRefused, decoded, openai_error, refusal_of
from .route import CallRoute, PlainRoute, event
from .served_rollout import Answer, ServedRollout

COMMENT_S = 15.0
"""Seconds between comments on a stream that has no event yet: clients and proxies give up silent connections."""

COMMENT = b": waiting\n\n"

MAX_ENDED = 16_384
"""Keys of ended rollouts that are known as such."""

EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]

Routes: TypeAlias = Mapping[tuple[str, str], CallRoute[Any] | PlainRoute[Any]]


class ServedRollouts:
    """The rollouts that are served, by key."""

    def __init__(self) -> None:
        self._running: dict[str, ServedRollout] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()

    def add(self, rollout: ServedRollout) -> None:
        """Serve a rollout."""
        self._running[rollout.key] = rollout

    def remove(self, rollout: ServedRollout) -> None:
        """Serve a rollout no longer: its calls are refused as those of an ended one."""
        del self._running[rollout.key]
        self._ended[rollout.key] = None
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def of(self, key: str) -> ServedRollout:
        """Return the rollout with this key.

        Raises:
            RequestRefused: there is none, or it has ended.
        """
        if (found := self._running.get(key)) is not None:
            return found
        if key in self._ended:
            raise RequestRefused(
                HTTPStatus.CONFLICT,
                "the rollout has ended: a call now would train nothing",
                code="rollout_ended",
                headers={"x-should-retry": "false"},
            )
        raise RequestRefused(
            HTTPStatus.UNAUTHORIZED,
            "expected the key of a rollout, as Authorization: Bearer <key>, x-api-key: <key>, or in the path, "
            "/r/<key>/v1/…; got " + ("another" if key else "none"),
            code="invalid_api_key",
        )


class Application:
    """Answers requests to `routes` for `rollouts`, as an ASGI application."""

    def __init__(self, routes: Routes, rollouts: ServedRollouts, limits: Limits) -> None:
        self._routes = routes
        self._rollouts = rollouts
        self._bodies = Bodies(limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        path_key, path = _key_in(scope["path"])
        route = self._routes.get((scope["method"], path))
        if route is None:
            await _refuse(openai_error, self._unknown(scope["method"], path))(scope, receive, send)
            return
        served: ServedRollout | None = None
        try:
            served = self._rollouts.of(path_key or _key_of(request.headers))
            if isinstance(route, PlainRoute):
                body = await self._body(request)
                given = None if route.decoder is None else decoded(route.decoder, body)
                await _json(HTTPStatus.OK, await route.body(served, given))(scope, receive, send)
            else:
                async with served.shared.calls:
                    await _Call(served, route, request, await self._body(request), send).answer()
        except ClientDisconnect:
            pass
        except Exception as error:  # noqa: BLE001 (of the call, or of the engine: told to the client)
            await _refuse(route.error, _promised(served, refusal_of(error)))(scope, receive, send)

    async def _body(self, request: Request) -> bytes:
        async with self._bodies.read(request) as body:
            return body

    def _unknown(self, method: str, path: str) -> RequestRefused:
        if any(known == path for _, known in self._routes):
            return RequestRefused(HTTPStatus.METHOD_NOT_ALLOWED, f"{path} has no {method}")
        return RequestRefused(
            HTTPStatus.NOT_FOUND, f"expected one of {sorted({p for _, p in self._routes})}, got {path}"
        )


class _Call:
    """One request for completions."""

    def __init__(self, served: ServedRollout, route: CallRoute[Any], request: Request, body: bytes, send: Send) -> None:
        self._served = served
        self._route = route
        self._request = request
        self._send = send
        self._given: CallFields = decoded(route.decoder, body)
        self._sample = route.ask(served, self._given)
        headers = request.headers
        key = headers.get("idempotency-key", "")
        self._repeated = bool(key) or headers.get("x-stainless-retry-count", "0") != "0"
        self._digest = hashlib.sha256(b"\0".join([key.encode(), request.url.path.encode(), body])).hexdigest()
        self._answer: Answer | None = None
        self._error: Exception | None = None
        self._hung_up = False
        self._started = False
        """True once the stream began."""

    async def answer(self) -> None:
        """Sample and send the answer. A client that hangs up cancels it."""
        with unwrap_first():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch, tasks.cancel_scope)
                if self._given.stream:
                    await self._wait_with_comments()
                else:
                    await self._sampled()
                await self._respond()
                tasks.cancel_scope.cancel()

    async def _watch(self, scope: anyio.CancelScope) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self._hung_up = True
        scope.cancel()

    async def _sampled(self) -> None:
        try:
            self._answer = await self._served.once(self._digest, self._sample, repeated=self._repeated)
        except Exception as error:  # noqa: BLE001 (told to the client)
            self._error = error

    async def _wait_with_comments(self) -> None:
        """Sample; in the meantime write comments. The status is sent with the first one: until then it may differ."""
        done = anyio.Event()

        async def sample() -> None:
            await self._sampled()
            done.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sample)
            while not done.is_set():
                with anyio.move_on_after(COMMENT_S):
                    await done.wait()
                if not done.is_set():
                    await self._write(COMMENT)

    async def _respond(self) -> None:
        if self._answer is None:
            await self._respond_error(self._error or RuntimeError("there is no answer"))
        elif self._given.stream:
            await self._write(b"".join(self._route.events(self._served, self._given, self._answer)))
            self._deliver()
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            response = _json(HTTPStatus.OK, self._route.body(self._served, self._given, self._answer))
            await response(self._request.scope, self._request.receive, self._send)
            self._deliver()

    async def _respond_error(self, error: Exception) -> None:
        if not self._started:
            raise error
        told = self._route.error(_promised(self._served, refusal_of(error)))
        body = event(told, told.get("type"))
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _write(self, events: bytes) -> None:
        if not self._started:
            self._started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    def _deliver(self) -> None:
        if not self._hung_up:
            self._served.deliver(self._digest)


def _key_in(path: str) -> tuple[str, str]:
    """Return the key in a path such as /r/KEY/v1/models, and the path without it."""
    if not path.startswith("/r/"):
        return "", path
    key, _, rest = path[3:].partition("/")
    return key, f"/{rest}"


def _key_of(headers: Headers) -> str:
    kind, _, secret = headers.get("authorization", "").partition(" ")
    return secret.strip() if kind.lower() == "bearer" and secret else headers.get("x-api-key", "")


def _promised(served: ServedRollout | None, refused: RequestRefused) -> RequestRefused:
    """Return a refusal; the first one of a rollout whose engine failed asks for a repetition."""
    if refused.code == "engine_failed" and served is not None and not served.shared.failed:
        served.shared.failed = True
        refused.headers = {"Retry-After": RETRY_AFTER_S}
    return refused


def _json(status: int, content: Any, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def _refuse(form: Any, refused: RequestRefused) -> Response:
    return _json(refused.status, form(refused), refused.headers)
