"""`/v1/completions`: a text, or tokens, and what follows it, as OpenAI has it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Annotated, Any, TypeAlias, cast

import msgspec
import numpy as np

from .call_fields import OpenAIFields, TokenId, check_neutral, sampling_of
from .chat_completions import head_of, of_choice, token_logprobs, usage_of
from .refusals import unsupported
from .route import DONE, CallRoute, event
from .served_rollout import Answer, Choice, ServedRollout

Items: TypeAlias = Annotated[list[TokenId | str | list[TokenId]], msgspec.Meta(min_length=1)]


class CompletionRequest(OpenAIFields, kw_only=True):
    """A request for continuations of one prompt."""

    prompt: str | Items
    logprobs: int | None = None
    best_of: Any = None
    echo: Any = None
    suffix: Any = None


def _ask(rollout: ServedRollout, request: CompletionRequest) -> Callable[[], Awaitable[Answer]]:
    check_neutral(request)
    if request.logprobs:
        raise unsupported("logprobs", f"expected 0, for those of the sampled tokens alone, got {request.logprobs}")
    prompt = _prompt(request.prompt)
    sampling = sampling_of(request, rollout.sampling, max_tokens=request.max_tokens)

    async def complete() -> Answer:
        tokens = await rollout.encoded(prompt) if isinstance(prompt, str) else prompt
        if not tokens:
            raise unsupported("prompt", "expected at least one token, got none")
        return await rollout.complete(np.asarray(tokens, np.int32), sampling, request.n or 1)

    return complete


def _prompt(given: Any) -> str | list[int]:
    """Return the text or the tokens of a prompt, or of a list with one."""
    if isinstance(given, list) and isinstance(given[0], str | list):
        if len(given) > 1:
            raise unsupported("prompt", f"expected one prompt, got {len(given)}: send a request for each")
        (given,) = given
    if isinstance(given, list) and not all(isinstance(token, int) for token in given):
        raise unsupported("prompt", "expected a text, or token ids, got a list of several kinds")
    return cast("str | list[int]", given)


def _choice(rollout: ServedRollout, request: CompletionRequest, index: int, choice: Choice) -> dict[str, Any]:
    fields = of_choice(request, index, choice) | {"text": choice.text}
    if request.logprobs is not None:
        found = token_logprobs(rollout.chat, choice)
        texts = [each["token"] for each in found]
        offsets = np.cumsum([0, *map(len, texts)])[:-1].tolist()
        fields["logprobs"] = {
            "tokens": texts,
            "token_logprobs": [each["logprob"] for each in found],
            "top_logprobs": None,
            "text_offset": offsets,
        }
    return fields


def _body(rollout: ServedRollout, request: CompletionRequest, answer: Answer) -> dict[str, Any]:
    choices = [_choice(rollout, request, index, choice) for index, choice in enumerate(answer.choices)]
    return head_of(request, answer, "text_completion") | {"choices": choices, "usage": usage_of(answer)}


def _events(rollout: ServedRollout, request: CompletionRequest, answer: Answer) -> Iterator[bytes]:
    head = head_of(request, answer, "text_completion")
    for index, choice in enumerate(answer.choices):
        yield event(head | {"choices": [_choice(rollout, request, index, choice)]})
    if request.stream_options is not None and request.stream_options.include_usage:
        yield event(head | {"choices": [], "usage": usage_of(answer)})
    yield DONE


TEXT_COMPLETIONS: CallRoute[CompletionRequest] = CallRoute(
    msgspec.json.Decoder(CompletionRequest), _ask, _body, _events
)
