"""`/v1/clients`: an agent asks for another client of its rollout, for a second persona."""

from __future__ import annotations

from .route import PlainRoute
from .served_rollout import ServedRollout


async def _add(served: ServedRollout, _: None) -> dict[str, str]:
    client = served.another()
    return {"base_url": client.base_url, "api_key": client.api_key}


CLIENTS: PlainRoute[None] = PlainRoute(None, _add)
