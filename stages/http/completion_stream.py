"""Streamed completions: bytes to server-sent events, events to token ids with log-probabilities. Does no I/O.

The format is that of OpenAI's completions with the additions of vLLM and SGLang: `token_ids` beside the text, and an
`error` within a stream. Text is never tokenized: the ids that a tokenizer makes of a text may differ from those that
were sampled. Log-probabilities are those of the server, or none. See docs/decisions/0015 for the parser.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..._pipeline.errors import ProtocolMismatch
from ..._schemas import StopReason
from ..contracts.policies import Completion
from .bounded_response import RequestFailed
from .routing_record import RoutingRecord

LONGEST_EVENT = 4 * 2**20
"""Bound in bytes; more than an event with 32,000 tokens. It is parsed on the event loop."""

STOP_REASONS = {
    "stop": StopReason.STOP,
    "length": StopReason.LENGTH,
    "abort": StopReason.ABORT,
    "tool_calls": StopReason.TOOL,
    "content_filter": StopReason.ERROR,
}

AS_IDS = "token_id:"
"""Prefix of a token that vLLM returns as an id in place of its text."""


class Events:
    """A parser of server-sent events, for bytes that may be cut anywhere; returns their `data`."""

    def __init__(self) -> None:
        self._line: list[bytes] = []
        """Pieces of the incomplete line."""
        self._data: list[bytes] = []
        """Data lines of the incomplete event."""
        self._nbytes = 0
        """Size of the incomplete event."""

    def feed(self, received: bytes) -> Iterator[bytes]:
        """Yield the data of every event that `received` completes.

        Raises:
            ProtocolMismatch: an event is longer than `LONGEST_EVENT`.
        """
        for number, piece in enumerate(received.split(b"\n")):
            if number and (event := self._end_line()) is not None:
                yield event
            self._line.append(piece)
            self._nbytes += len(piece)
            if self._nbytes > LONGEST_EVENT:
                raise ProtocolMismatch(f"expected events of at most {LONGEST_EVENT} bytes, got {self._nbytes} and more")

    def _end_line(self) -> bytes | None:
        """Parse the line that is complete; return the data of the event that ends with it, if any."""
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
"""A token id within the range of records."""

Logprob: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e30, le=1e-3)]
"""Finite, also in single precision; above 0 only by rounding."""


EXCLUDED = -9999.0
"""vLLM's log-probability of a token that was not drawn from: −inf is no number in JSON."""


class _Logprobs(msgspec.Struct):
    tokens: list[str] = []
    token_logprobs: list[Logprob | None] | None = None
    top_logprobs: list[dict[str, Logprob] | None] | None = None


class _StreamChoice(msgspec.Struct):
    text: str | None = None
    token_ids: list[TokenId] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    routed_experts: str | None = None


class _Extensions(msgspec.Struct):
    routed_experts: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_StreamChoice] = []
    sglext: _Extensions | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Chunk)
_id_decoder = msgspec.json.Decoder(TokenId)


class StreamedCompletion:
    """One completion, parsed event by event."""

    def __init__(self, max_completion_tokens: int, stop_ids: Collection[int] = (), support: int = 0) -> None:
        self._max_completion_tokens = max_completion_tokens
        """Bound of the request."""
        self._support = support
        """Tokens that each was drawn from at most, if they are wanted."""
        self._supports: list[NDArray[np.int32]] = []
        """[W] of each token."""
        self._stop_ids = stop_ids
        """Tokens that end the completion, also at a server that goes on after them."""
        self.cut = False
        """True if the server went on: tokens that still arrive are not part of the completion."""
        self.done = False
        """True if the finish_reason has arrived."""
        self._tokens: list[int] = []
        self._logprobs: list[float | None] | None = []
        """None once a chunk came without them."""
        self._stop_reason = StopReason.ERROR
        self.arrived = 0
        """Sampled tokens that arrived, those after the end of the completion included."""
        self.routing: RoutingRecord | None = None
        """The experts of a mixture, if the server returned them."""

    def take(self, data: bytes) -> None:
        """Add the data of one event.

        Raises:
            ProtocolMismatch: it is not part of a completion, or has text without token ids.
            RequestFailed: it contains an error.
        """
        if data == b"[DONE]":
            return
        try:
            chunk = _decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ProtocolMismatch(f"expected a part of a completion as JSON, got {data[:200]!r}: {error}") from None
        if chunk.error is not None:
            reported = chunk.error if isinstance(chunk.error, dict) else {"message": chunk.error}
            status = reported.get("code")
            raise RequestFailed(status if isinstance(status, int) else 500, str(reported.get("message")))
        for choice in chunk.choices[:1]:
            self._take(choice)
            if choice.routed_experts is not None:
                self.routing = RoutingRecord(choice.routed_experts, has_header=True)
        if chunk.sglext is not None and chunk.sglext.routed_experts is not None:
            self.routing = RoutingRecord(chunk.sglext.routed_experts, has_header=False)

    def _take(self, choice: _StreamChoice) -> None:
        ids = _ids(choice)
        if ids and self.done:
            raise ProtocolMismatch(f"expected no token after the finish_reason, got {len(ids)}")
        self.arrived += len(ids)
        count = self._count_to_end(ids)
        self._tokens += ids[:count]
        if len(self._tokens) > self._max_completion_tokens:
            raise ProtocolMismatch(f"expected at most {self._max_completion_tokens} tokens, got {len(self._tokens)}")
        if ids and self._logprobs is not None:
            logprobs = choice.logprobs.token_logprobs if choice.logprobs else None
            if logprobs is None:
                self._logprobs = None
            else:
                self._logprobs += _check_count(logprobs, ids)[:count]
        if self._support and ids:
            self._supports += _supports(choice.logprobs, ids, self._support)[:count]
        if count < len(ids):
            self.cut, self.done, self._stop_reason = True, True, StopReason.STOP
            return
        if choice.finish_reason is not None:
            if choice.finish_reason not in STOP_REASONS:
                known = ", ".join(STOP_REASONS)
                raise ProtocolMismatch(f"expected a finish_reason among {known}, got {choice.finish_reason!r}")
            self._stop_reason = STOP_REASONS[choice.finish_reason]
            self.done = True

    def _count_to_end(self, ids: list[int]) -> int:
        """Return how many of `ids` belong to the completion: it ends with the first of its stop tokens."""
        if self._tokens and self._tokens[-1] in self._stop_ids:
            return 0
        return next((place for place, token in enumerate(ids, 1) if token in self._stop_ids), len(ids))

    def completion(self, version: int) -> Completion:
        """Return the completion, sampled with weights of `version`."""
        complete = self._logprobs is not None and None not in self._logprobs
        return Completion(
            tokens=np.array(self._tokens, np.int32),
            logprobs=np.array(self._logprobs, np.float32) if complete else None,
            stop_reason=self._stop_reason,
            policy_versions=np.full(len(self._tokens), version, np.int64),
            support_ids=np.array(self._supports, np.int32).reshape(-1, self._support) if self._support else None,
        )


def _ids(choice: _StreamChoice) -> list[int]:
    """Return the sampled ids, from `token_ids` or from tokens that vLLM returned as ids."""
    if choice.token_ids is not None:
        return choice.token_ids
    tokens = choice.logprobs.tokens if choice.logprobs else []
    with suppress(msgspec.MsgspecError):
        ids = [_id_decoder.decode(token.removeprefix(AS_IDS)) for token in tokens if token.startswith(AS_IDS)]
        if len(ids) == len(tokens) and (ids or not choice.text):
            return ids
    raise ProtocolMismatch(
        f"expected the ids of sampled tokens (`token_ids`, or tokens written as `token_id:…`), got text alone, "
        f"{choice.text!r}: use a server that returns ids; vLLM and SGLang do if HttpPolicy knows them "
        f'(server="auto")'
    )


def _check_count(logprobs: list[float | None], ids: list[int]) -> list[float | None]:
    if len(logprobs) != len(ids):
        raise ProtocolMismatch(f"expected a log-probability for each of {len(ids)} tokens, got {len(logprobs)}")
    return logprobs


def _supports(logprobs: _Logprobs | None, ids: list[int], width: int) -> list[NDArray[np.int32]]:
    """Return [width] the tokens that each of `ids` was drawn from, −1 where there are fewer.

    vLLM lists the most probable ones, and the sampled one if it is not among them: where several are equal at the end
    of `top_k`.
    """
    listed = None if logprobs is None else logprobs.top_logprobs
    if listed is None or len(listed) != len(ids):
        raise ProtocolMismatch(
            f"expected the {width} most probable of each of {len(ids)} tokens (`top_logprobs`), got "
            f"{'none' if listed is None else len(listed)}: start vLLM with --max-logprobs {width} or more"
        )
    return [_support(known, token, width) for known, token in zip(listed, ids, strict=True)]


def _support(known: dict[str, float] | None, token: int, width: int) -> NDArray[np.int32]:
    if not known:  # alone, a token would have probability 1 under every policy
        raise ProtocolMismatch(f"expected the most probable tokens beside {token} (`top_logprobs`), got {known}")
    drawn = {token: None}
    for name, logprob in sorted(known.items(), key=lambda each: -each[1]):
        if logprob > EXCLUDED:
            drawn[_id_of(name)] = None
    found = np.full(width, -1, np.int32)
    listed = list(drawn)[:width]
    found[: len(listed)] = listed
    return found


def _id_of(name: str) -> int:
    with suppress(msgspec.MsgspecError):
        if name.startswith(AS_IDS):
            return _id_decoder.decode(name.removeprefix(AS_IDS))
    raise ProtocolMismatch(f"expected tokens written as `token_id:…` in top_logprobs, got {name!r:.80}")
