"""Fields of requests that several APIs share, and their sampling parameters. Knows no rollout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

import msgspec

from ...contracts.sampling_params import SamplingParams
from .refusals import unsupported

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Seed: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Stops: TypeAlias = str | Annotated[list[str], msgspec.Meta(max_length=64)]

MAX_CHOICES = 64
MAX_MESSAGES = 16_384

ENCRYPTED_THOUGHTS = "reasoning.encrypted_content"
"""Of `include`: thoughts in a form that the client sends back unread."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "include": ([], [ENCRYPTED_THOUGHTS]),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "prompt_logprobs": (0,),
    "reasoning": ({}, {"effort": None}, {"effort": None, "summary": None}),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "suffix": ("",),
    "text": ({}, {"format": {"type": "text"}}),
    "thinking": ({"type": "disabled"},),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Fields that are accepted with values that change nothing."""


class CallFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of every request for completions; those that are never read are the caller's own business."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    metadata: Any = None
    service_tier: Any = None


class OpenAIFields(CallFields, kw_only=True):
    """Fields of OpenAI's requests for completions, with those of vLLM that penstock has too."""

    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Count | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: Seed | None = None
    stop: Stops | None = None
    stop_token_ids: list[TokenId] | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    logit_bias: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    user: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: Any = None


def check_neutral(request: msgspec.Struct) -> None:
    """Check that fields, which would change the answer if they were obeyed, have values that do not.

    Raises:
        RequestRefused: one has another value.
    """
    for field, values in NEUTRAL.items():
        given = getattr(request, field, None)
        if given is not None and given not in values:
            raise unsupported(field, f"expected {values[0]!r}, or no such field, got {given!r:.80}")


def may_call_tools(choice: Any) -> bool:
    """Return whether a turn may call tools, by OpenAI's `tool_choice`.

    Raises:
        RequestRefused: a call is required.
    """
    if choice not in (None, "auto", "none"):
        raise unsupported("tool_choice", f"expected 'auto' or 'none': a policy cannot be forced, got {choice!r:.80}")
    return bool(choice != "none")


def sampling_of(request: Any, usual: SamplingParams, *, max_tokens: int | None) -> SamplingParams:
    """Return the parameters of a request, within the `usual` ones of its rollout.

    Raises:
        InvalidConfig: a value is out of its range.
    """
    own: dict[str, Any] = {}
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"):
        if (value := getattr(request, name, None)) is not None:
            own[name] = value
    if usual.support and "top_k" in own:  # a larger support would not fit the column
        own["top_k"] = min(own["top_k"], usual.support) if own["top_k"] > 0 else usual.support
    if "temperature" in own:
        own["greedy"] = False
    if "seed" in own:
        own["seed"] %= 2**63
    if max_tokens is not None:
        own["max_completion_tokens"] = max_tokens
    if stop := getattr(request, "stop", None):
        own["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    if ids := getattr(request, "stop_token_ids", None):
        own["stop_ids"] = (*usual.stop_ids, *ids)
    return msgspec.structs.replace(usual, **own) if own else usual


def choices_sampling(sampling: SamplingParams, choices: int) -> list[SamplingParams]:
    """Return the parameters of each choice of a call: with a seed of its own, if the call has one."""
    return [sampling.seeded_for(number) if number else sampling for number in range(choices)]
