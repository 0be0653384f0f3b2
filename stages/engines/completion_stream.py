"""A completion as servers stream it: bytes to events, events to token ids with log-probabilities. Does no I/O.

The format is that of OpenAI's completions, with what vLLM and SGLang add: `token_ids` beside the text, and an `error`
in the midst of a stream. Text is never made into tokens: the ids that a tokenizer gives for a text need not be those
that were sampled. Log-probabilities are those that the server gave, or none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np

from ..._pipeline.errors import ProtocolMismatch
from ..._schemas import StopReason
from .policies import Completion
from .server_client import RequestFailed

__all__ = ["Events", "StreamedCompletion"]

LONGEST_EVENT = 64 * 2**20
"""Bytes: more than any event of a completion."""

STOP_REASONS = {
    "stop": StopReason.STOP,
    "length": StopReason.LENGTH,
    "abort": StopReason.ABORT,
    "tool_calls": StopReason.TOOL,
    "content_filter": StopReason.ERROR,
}

AS_IDS = "token_id:"
"""How vLLM writes a token where its id is wanted for its text."""


class Events:
    """The `data` of server-sent events, out of bytes that may be cut anywhere."""

    def __init__(self) -> None:
        self._line: list[bytes] = []
        """Pieces of the line that has begun."""
        self._data: list[bytes] = []
        """What the event that has begun says so far."""
        self._nbytes = 0
        """Of that event."""

    def feed(self, received: bytes) -> Iterator[bytes]:
        """The data of every event that `received` completes.

        Raises:
            ProtocolMismatch: an event is longer than any that a completion has.
        """
        for number, piece in enumerate(received.split(b"\n")):
            if number and (event := self._end_line()) is not None:
                yield event
            self._line.append(piece)
            self._nbytes += len(piece)
            if self._nbytes > LONGEST_EVENT:
                raise ProtocolMismatch(f"expected events of at most {LONGEST_EVENT} bytes, got {self._nbytes} and more")

    def _end_line(self) -> bytes | None:
        """Take in the line that has come to its end; the data of the event that ends with it."""
        line = b"".join(self._line).removesuffix(b"\r")
        self._line.clear()
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
            return None
        event = b"\n".join(self._data) if self._data else None
        self._data.clear()
        self._nbytes = 0
        return event


TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""As records hold it."""

Logprob: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e30, le=1e-3)]
"""Finite, also in single precision; above 0 by no more than rounding does."""


class _Logprobs(msgspec.Struct):
    tokens: list[str] = []
    token_logprobs: list[Logprob | None] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[TokenId] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


_decoder = msgspec.json.Decoder(_Chunk)
_id_decoder = msgspec.json.Decoder(TokenId)


class StreamedCompletion:
    """One completion, event by event."""

    def __init__(self, max_completion_tokens: int) -> None:
        self._max_completion_tokens = max_completion_tokens
        """What was asked for at most."""
        self.done = False
        """Whether the server has said why it stopped."""
        self._tokens: list[int] = []
        self._logprobs: list[float | None] | None = []
        """None once the server has left them out."""
        self._stop_reason = StopReason.ERROR

    def take(self, data: bytes) -> None:
        """Take in the data of one event.

        Raises:
            ProtocolMismatch: it is not what a server of completions says, or has text without token ids.
            RequestFailed: it tells of an error.
        """
        if data == b"[DONE]":
            return
        try:
            chunk = _decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ProtocolMismatch(f"expected a part of a completion as JSON, got {data[:200]!r}: {error}") from None
        if chunk.error is not None:
            told = chunk.error if isinstance(chunk.error, dict) else {"message": chunk.error}
            status = told.get("code")
            raise RequestFailed(status if isinstance(status, int) else 500, str(told.get("message")))
        for choice in chunk.choices[:1]:
            self._take(choice)

    def _take(self, choice: _Choice) -> None:
        ids = _ids(choice)
        self._tokens += ids
        if ids and self.done:
            raise ProtocolMismatch(f"expected no token after the finish_reason, got {len(ids)}")
        if len(self._tokens) > self._max_completion_tokens:
            raise ProtocolMismatch(f"expected at most {self._max_completion_tokens} tokens, got {len(self._tokens)}")
        if ids and self._logprobs is not None:
            given = choice.logprobs.token_logprobs if choice.logprobs else None
            if given is None:
                self._logprobs = None
            else:
                self._logprobs += _as_many(given, ids)
        if choice.finish_reason is not None:
            if choice.finish_reason not in STOP_REASONS:
                wanted = ", ".join(STOP_REASONS)
                raise ProtocolMismatch(f"expected a finish_reason among {wanted}, got {choice.finish_reason!r}")
            self._stop_reason = STOP_REASONS[choice.finish_reason]
            self.done = True

    def completion(self, version: int) -> Completion:
        """What was said, sampled with weights of `version`."""
        known = self._logprobs is not None and None not in self._logprobs
        return Completion(
            tokens=np.array(self._tokens, np.int32),
            logprobs=np.array(self._logprobs, np.float32) if known else None,
            stop_reason=self._stop_reason,
            policy_versions=np.full(len(self._tokens), version, np.int64),
        )


def _ids(choice: _Choice) -> list[int]:
    """The sampled ids: as such, or as vLLM writes them in the place of tokens."""
    if choice.token_ids is not None:
        return choice.token_ids
    tokens = choice.logprobs.tokens if choice.logprobs else []
    with suppress(msgspec.MsgspecError):
        ids = [_id_decoder.decode(token.removeprefix(AS_IDS)) for token in tokens if token.startswith(AS_IDS)]
        if len(ids) == len(tokens) and (ids or not choice.text):
            return ids
    raise ProtocolMismatch(
        f"expected the ids of sampled tokens (`token_ids`, or tokens written as `token_id:…`), got text alone, "
        f"{choice.text!r}: use a server that returns ids, as vLLM and SGLang do where they are known to be such "
        f'(HttpPolicy\'s server="auto")'
    )


def _as_many(logprobs: list[float | None], ids: list[int]) -> list[float | None]:
    if len(logprobs) != len(ids):
        raise ProtocolMismatch(f"expected a log-probability for each of {len(ids)} tokens, got {len(logprobs)}")
    return logprobs
