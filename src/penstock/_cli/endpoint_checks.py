"""Connect to the server of `penstock doctor --endpoint`, and examine it."""

from __future__ import annotations

import random
from collections.abc import Callable
from urllib.parse import urlsplit

import anyio

from .._pipeline.errors import InvalidConfig
from .._pipeline.util.extras import extra
from .._pipeline.util.hub import model_folder
from .._stages.http.retry import Backoff
from .._stages.tokenizers.chat_format import ChatFormat
from .._stages.tokenizers.pretrained_tokenizer import PretrainedTokenizer
from .findings import Finding

REQUEST_TIMEOUT_S = 120.0
"""Bound on one answer of a few tokens; a server may compile something first."""

PASTED = ("/chat/completions", "/completions", "/models", "/v1")
"""Ends of URLs that are below a server's root, in the order in which they are cut off."""


def endpoint_checks(url: str, model: str, key: str, tell: Callable[[str], None]) -> list[Finding]:
    """Run the programs against the server at `url`, which should serve `model`; `tell` is called with their names.

    Raises:
        PenstockError: the URL cannot be used; the model's tokenizer cannot be read, or has no template.
        MissingExtra: `http`, or that of the tokenizer, is not installed.
        EngineRefused, EngineFailed, EngineTimedOut, NobodyListens: the server does not list its models.
    """
    root = root_of(url)
    chat = ChatFormat(PretrainedTokenizer(model_folder(model)))
    return anyio.run(examined, root, chat, key, tell)


async def examined(
    url: str,
    chat: ChatFormat,
    key: str = "",
    tell: Callable[[str], None] = lambda _: None,
    timeout_s: float = REQUEST_TIMEOUT_S,
) -> list[Finding]:
    """Return the findings about the server at `url`, with or without /v1."""
    with extra("http", "penstock doctor --endpoint"):
        from .._stages.http.server_client import open_client  # noqa: PLC0415 (an extra)
        from .asked_server import AskedServer  # noqa: PLC0415 (as above)
        from .endpoint_programs import Examined, examine  # noqa: PLC0415 (as above)
    once = Backoff(attempts=1)
    async with open_client(root_of(url), key or None, once, request_timeout_s=timeout_s, draw=random.random) as client:
        tell("list of models")
        return await examine(Examined(await AskedServer.of(client), chat, timeout_s), tell)


def root_of(url: str) -> str:
    """Return a server's URL without the paths of its API.

    Raises:
        InvalidConfig: it is no URL of a server.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0 and not parts.query
    except ValueError:  # a port above 65,535, or half an address in brackets
        usable = False
    if not usable:
        raise InvalidConfig(f"--endpoint: expected http://host:port, got {url}")
    root = url.rstrip("/")
    for end in PASTED:
        root = root.removesuffix(end)
    return root
