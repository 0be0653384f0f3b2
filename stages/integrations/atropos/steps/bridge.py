"""The model server of an environment in its process: Atropos' own server manager over a server that asks the players.

Tokens, masks, templates and retries are Atropos' own code. Only the HTTP requests to a model are replaced.
"""

from __future__ import annotations

import importlib
import uuid
from typing import Any

from ....._schemas import StopReason
from ..contract import NO_LOGPROB
from .episodes import Episode, ModelCall, current_episode
from .messages import Action

__all__ = ["bridge_class", "install_bridge"]

UNLIMITED = {"num_max_requests_at_once": 10**6, "num_requests_for_eval": 10**6, "health_check": False}
"""Options of its configuration, so that model calls wait for players only."""


def bridge_class() -> Any:
    """Return the subclass of Atropos' `APIServer` whose model calls are answered by actions."""
    base: Any = importlib.import_module("atroposlib.envs.server_handling.server_baseline").APIServer
    chats = importlib.import_module("openai.types.chat.chat_completion")
    texts = importlib.import_module("openai.types.completion")

    class BridgeServer(base):  # type: ignore[misc]
        """Forwards model calls to the seats of the calling episode."""

        def __init__(self, config: Any, reasoning_config: Any = None) -> None:
            super().__init__(config.model_copy(update=UNLIMITED), reasoning_config=reasoning_config)

        async def check_server_status_task(self, chat_completion: bool = True) -> None:  # noqa: ARG002, FBT001, FBT002
            self.server_healthy = True

        async def _chat_completion_wrapper(self, **kwargs: Any) -> Any:
            actions = await _actions(kwargs, self.tokenizer)
            choices = [
                chats.Choice(
                    index=index,
                    message=chats.ChatCompletionMessage(content=action.text, role="assistant"),
                    finish_reason=_finish_reason(action),
                )
                for index, action in enumerate(actions)
            ]
            return chats.ChatCompletion(**_header(kwargs), object="chat.completion", choices=choices)

        async def _completion_wrapper(self, **kwargs: Any) -> Any:
            actions = await _actions(kwargs, self.tokenizer)
            choices = [
                texts.CompletionChoice(index=index, text=action.text, finish_reason=_finish_reason(action))
                for index, action in enumerate(actions)
            ]
            return texts.Completion(**_header(kwargs), object="text_completion", choices=choices)

        async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> Any:
            return await _sampled(kwargs, self.tokenizer)

        async def _get_logprobs_wrapper(self, **kwargs: Any) -> Any:  # noqa: ARG002
            raise current_episode().refuse(
                "expected model calls that an action answers, got get_logprobs: no player scores given tokens"
            )

    return BridgeServer


def install_bridge(env: Any, kind: Any) -> None:
    """Make a bridge of class `kind` the one server of the environment's server manager."""
    replaced = env.server.servers[0]
    bridge = kind(replaced.config, replaced.reasoning_config)
    bridge.tokenizer = getattr(env, "tokenizer", None)
    env.server.servers = [bridge]


async def _actions(call: dict[str, Any], tokenizer: Any) -> list[Action]:
    episode = current_episode()
    count = int(call.get("n") or 1)
    return [action for _, action in await episode.ask(_rendered(call, tokenizer, episode), count)]


async def _sampled(
    call: dict[str, Any], tokenizer: Any
) -> tuple[list[int], list[list[int]], list[list[float]], list[str]]:
    """Return ids of the prompt; ids, log-probabilities and finish reasons of the answers.

    For an action of text alone, the ids are those of its text, and the log-probabilities are `NO_LOGPROB`.
    """
    episode = current_episode()
    prompt = _rendered(call, tokenizer, episode)
    prompt_ids = prompt.input_ids
    if prompt_ids is None:
        prompt_ids = [int(token) for token in tokenizer.encode(prompt.text)]
    outputs: list[list[int]] = []
    logprobs: list[list[float]] = []
    reasons: list[str] = []
    for seat, action in await episode.ask(prompt, int(call.get("n") or 1)):
        tokens = action.tokens
        outputs.append([*(tokenizer.encode(action.text, add_special_tokens=False) if tokens is None else tokens)])
        logprobs.append([*(action.logprobs or [NO_LOGPROB] * len(outputs[-1]))])
        reasons.append(_finish_reason(action))
        seat.tokens = prompt_ids + outputs[-1]
    return prompt_ids, outputs, logprobs, reasons


def _rendered(call: dict[str, Any], tokenizer: Any, episode: Episode) -> ModelCall:
    """Return the call with its prompt as text.

    Raises:
        EpisodeOver: it has none.
    """
    sampling = {name: value for name, value in call.items() if name not in {"messages", "prompt", "input_ids", "n"}}
    if (text := call.get("prompt")) is not None:
        if not isinstance(text, str):
            raise episode.refuse(f"expected a prompt of type str, got {type(text).__name__}: ask for one at a time")
        return ModelCall(text=text, input_ids=call.get("input_ids"), sampling=sampling)
    messages = [each if isinstance(each, dict) else each.model_dump(exclude_none=True) for each in call["messages"]]
    if getattr(tokenizer, "chat_template", None) is None:
        raise episode.refuse(
            "expected the environment to have a `tokenizer` with a chat template, to render its messages, got none"
        )
    text = tokenizer.apply_chat_template(messages, tools=call.get("tools"), tokenize=False, add_generation_prompt=True)
    return ModelCall(text=text, messages=messages, sampling=sampling)


def _finish_reason(action: Action) -> str:
    """Return OpenAI's finish reason; an answer is text, so no tool call ends it."""
    return "length" if action.stop_reason == StopReason.LENGTH else "stop"


def _header(call: dict[str, Any]) -> dict[str, Any]:
    return {"id": str(uuid.uuid4()), "created": 0, "model": str(call.get("model"))}
