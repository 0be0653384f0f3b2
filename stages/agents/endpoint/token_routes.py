"""Paths that vLLM has too: `/v1/models`, `/tokenize`, `/health`, and tokens in and out, `/inference/v1/generate`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Annotated, Any

import msgspec
import numpy as np

from .call_fields import CallFields, Count, OpenAIFields, TokenId, check_neutral, sampling_of
from .chat_completions import of_choice, token_logprobs, usage_of
from .chat_messages import ChatTool, Messages, plain_tools
from .refusals import unsupported
from .route import CallRoute, PlainRoute
from .served_rollout import MODEL, Answer, ServedRollout


async def _models(_: ServedRollout, __: None) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "penstock"}]}


MODELS: PlainRoute[None] = PlainRoute(None, _models)


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A text, or messages, whose tokens are asked for."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: list[ChatTool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None


async def _tokenize(rollout: ServedRollout, request: TokenizeRequest) -> dict[str, Any]:
    if not request.add_generation_prompt:
        raise unsupported("add_generation_prompt", "expected true, got false")
    if (request.prompt is None) == (request.messages is None):
        raise unsupported("prompt", "expected either prompt or messages")
    if request.messages is not None:
        said = [message.plain() for message in request.messages]
        tokens = (await rollout.prompt(said, plain_tools(request.tools))).tokens.tolist()
    else:
        tokens = await rollout.encoded(request.prompt or "", start=request.add_special_tokens is not False)
    texts = [rollout.chat.tokenizer.decode([token]) for token in tokens] if request.return_token_strs else None
    return {"count": len(tokens), "max_model_len": None, "tokens": tokens, "token_strs": texts}


TOKENIZE: PlainRoute[TokenizeRequest] = PlainRoute(msgspec.json.Decoder(TokenizeRequest), _tokenize)


class GenerateSampling(OpenAIFields, kw_only=True):
    """The parameters of `/inference/v1/generate`."""

    max_tokens: Count | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=1)] | None = None
    prompt_logprobs: Any = None
    min_tokens: Any = None
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    detokenize: Any = None
    output_kind: Any = None
    routed_experts_prompt_start: Any = None


class GenerateRequest(CallFields, kw_only=True):
    """Tokens that are to be continued."""

    token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]
    sampling_params: GenerateSampling = msgspec.field(default_factory=GenerateSampling)
    request_id: str | None = None
    cache_salt: Any = None
    priority: Any = None


def _ask_tokens(rollout: ServedRollout, request: GenerateRequest) -> Callable[[], Awaitable[Answer]]:
    if request.stream:
        raise unsupported("stream", "expected false, got true")
    given = request.sampling_params
    check_neutral(given)
    sampling = sampling_of(given, rollout.sampling, max_tokens=given.max_tokens)
    prompt = np.asarray(request.token_ids, np.int32)
    return lambda: rollout.complete(prompt, sampling, given.n or 1)


def _generated(rollout: ServedRollout, request: GenerateRequest, answer: Answer) -> dict[str, Any]:
    choices, given = [], request.sampling_params
    for index, choice in enumerate(answer.choices):
        logprobs = None
        if given.logprobs is not None:
            named = zip(token_logprobs(rollout.chat, choice), choice.tokens, strict=True)
            logprobs = {"content": [each | {"token": f"token_id:{token}"} for each, token in named]}
        fields = of_choice(given, index, choice) | {"token_ids": choice.tokens, "logprobs": logprobs}
        choices.append(fields)
    return {
        "request_id": request.request_id or answer.id,
        "choices": choices,
        "prompt_logprobs": None,
        "kv_transfer_params": None,
        "usage": usage_of(answer),
    }


def _no_events(*_: Any) -> Iterator[bytes]:
    return iter(())


GENERATE: CallRoute[GenerateRequest] = CallRoute(
    msgspec.json.Decoder(GenerateRequest), _ask_tokens, _generated, _no_events
)


class PromptTokens(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A prompt as the example server of vLLM has it, and that of Atropos."""

    prompt_token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]


class PlainGenerateRequest(GenerateSampling, kw_only=True):
    """Tokens that are to be continued, and the parameters beside them."""

    prompt: PromptTokens


def _ask_plainly(rollout: ServedRollout, request: PlainGenerateRequest) -> Callable[[], Awaitable[Answer]]:
    parameters = {name: getattr(request, name) for name in GenerateSampling.__struct_fields__}
    given = GenerateRequest(
        token_ids=request.prompt.prompt_token_ids, sampling_params=GenerateSampling(**parameters), stream=request.stream
    )
    return _ask_tokens(rollout, given)


def _generated_plainly(rollout: ServedRollout, request: PlainGenerateRequest, answer: Answer) -> dict[str, Any]:
    found: dict[str, Any] = {
        "text": [choice.text for choice in answer.choices],
        "finish_reasons": [choice.finish for choice in answer.choices],
    }
    if request.logprobs is not None:
        found["logprobs"] = [
            [
                [{token: each["logprob"]}]
                for token, each in zip(choice.tokens, token_logprobs(rollout.chat, choice), strict=True)
            ]
            for choice in answer.choices
        ]
    return found


PLAIN_GENERATE: CallRoute[PlainGenerateRequest] = CallRoute(
    msgspec.json.Decoder(PlainGenerateRequest), _ask_plainly, _generated_plainly, _no_events
)


async def _healthy(_: ServedRollout, __: None) -> dict[str, Any]:
    return {}


HEALTH: PlainRoute[None] = PlainRoute(None, _healthy)
