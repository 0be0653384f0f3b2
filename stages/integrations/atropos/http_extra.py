"""The client of the Atropos contract. Needs the extra `http`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...._pipeline.util.extras import extra

if TYPE_CHECKING:
    from .http_api import HttpApi


def load_http_api(user: str) -> type[HttpApi]:
    """Return `HttpApi`, for `user`.

    Raises:
        MissingExtra: aiohttp is not installed.
    """
    with extra("http", user):
        from .http_api import HttpApi  # noqa: PLC0415 (only senders and receivers need the extra)
    return HttpApi
