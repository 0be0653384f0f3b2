"""Connect to the server of `penstock doctor --endpoint`, and examine it."""

from __future__ import annotations

import random

import anyio

from .._pipeline.util.extras import extra
from .._pipeline.util.hub import model_folder
from .._stages.http.retry import Backoff
from .._stages.tokenizers.chat_format import ChatFormat
from .._stages.tokenizers.pretrained_tokenizer import PretrainedTokenizer
from .findings import Finding

REQUEST_TIMEOUT_S = 120.0
"""Bound on one answer of a few tokens; a server may compile something first."""


def endpoint_checks(url: str, model: str, key: str) -> list[Finding]:
    """Run the programs against the server at `url`, which should serve `model`.

    Raises:
        PenstockError: the model's tokenizer cannot be read, or has no template.
        MissingExtra: `http`, or that of the tokenizer, is not installed.
        EngineRefused, EngineFailed, EngineTimedOut, NobodyListens: the server does not list its models.
    """
    chat = ChatFormat(PretrainedTokenizer(model_folder(model)))
    return anyio.run(examined, url, chat, key)


async def examined(url: str, chat: ChatFormat, key: str = "") -> list[Finding]:
    """Return the findings about the server at `url`, with or without /v1."""
    with extra("http", "penstock doctor --endpoint"):
        from .._stages.http.server_client import open_client  # noqa: PLC0415 (an extra)
        from .asked_server import AskedServer  # noqa: PLC0415 (as above)
        from .endpoint_programs import Examined, examine  # noqa: PLC0415 (as above)
    root = url.rstrip("/").removesuffix("/v1")
    once = Backoff(attempts=1)
    async with open_client(root, key or None, once, request_timeout_s=REQUEST_TIMEOUT_S, draw=random.random) as client:
        return await examine(Examined(await AskedServer.of(client), chat))
