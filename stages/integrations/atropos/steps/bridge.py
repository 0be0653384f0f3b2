"""What takes the place of an environment's model server: calls are questions to the callers of `step`.

It has the methods that environments call of Atropos' ServerManager and ManagedServer. Token ids and log-probabilities
are those that the caller gives with an action. Where it gives text alone, a managed server's tokens are made of the
text, so that environments can count them, and there are no log-probabilities.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from ..contract import NO_LOGPROB, UNTRAINED
from .conversation import Action, Answer, ModelCallRefused, Prompt
from .episodes import Place, current_episode

__all__ = ["Managed", "ModelBridge", "Node"]


class ModelBridge:
    """Stands where an environment has its `server`."""

    servers: Sequence[Any] = ()
    """There are none behind it."""

    def __init__(self, tokenizer: Callable[[], Any], *, bare: bool) -> None:
        self._tokenizer = tokenizer
        """The environment's own, when it has made it."""
        self._bare = bare

    async def chat_completion(self, **call: Any) -> Answer:
        """As OpenAI's; the caller's actions are the answers."""
        prompt = Prompt.of_chat(call, self._template())
        return Answer.to_chat(await _answered(prompt, call))

    async def completion(self, **call: Any) -> Answer:
        """As OpenAI's; the caller's actions are the answers."""
        return Answer.to_text(await _answered(Prompt.of_text(call), call))

    async def tokens_and_logprobs_completion(
        self, **call: Any
    ) -> tuple[list[int], list[list[int]], list[list[float]], list[str]]:
        """Ids of the prompt; ids, log-probabilities and finish reasons of the answers.

        Raises:
            ModelCallRefused: an action came without them.
        """
        prompt = Prompt.of_text(call)
        actions = await _answered(prompt, call)
        if any(action.tokens is None or action.logprobs is None for action in actions):
            raise ModelCallRefused(
                "expected actions with token ids and log-probabilities, for the environment asks for them, got text: "
                "step(Action(text=…, tokens=…, logprobs=…))"
            )
        prompt_ids = _encoded(_needed(self._tokenizer()), str(prompt.text), begins=True)
        tokens = [[int(token) for token in action.tokens or ()] for action in actions]
        logprobs = [[float(logprob) for logprob in action.logprobs or ()] for action in actions]
        return prompt_ids, tokens, logprobs, [action.finish_reason for action in actions]

    async def get_logprobs(self, **_: Any) -> Any:
        """Nobody here knows them.

        Raises:
            ModelCallRefused: always.
        """
        raise ModelCallRefused(
            "expected calls that an action answers, got get_logprobs: nobody here scores given tokens"
        )

    @asynccontextmanager
    async def managed_server(self, tokenizer: Any = None, **_: Any) -> AsyncGenerator[Managed]:
        """The same, keeping the tokens of what is said."""
        yield Managed(_needed(tokenizer if tokenizer is not None else self._tokenizer()))

    @asynccontextmanager
    async def dedicated_server(self) -> AsyncGenerator[ModelBridge]:
        """There is one only."""
        yield self

    async def update_weight(self, weight: float) -> None:
        """Nothing here is shared between training and evaluation."""

    async def wait_for_sem(self, is_training: bool) -> None:  # noqa: FBT001 (the original's)
        """Nothing here has a limit."""

    def _template(self) -> Any:
        """What renders messages; None where observations are bare words."""
        tokenizer = self._tokenizer()
        if getattr(tokenizer, "chat_template", None) is not None:
            return tokenizer
        if self._bare:
            return None
        raise ModelCallRefused(
            "expected the environment to have a `tokenizer` with a chat template, to make text of its messages, got "
            "none: give it one, or have observations without a template (bare=True)"
        )


async def _answered(prompt: Prompt, call: dict[str, Any]) -> list[Action]:
    return [action for _, action in await current_episode().ask(prompt, _count(call))]


def _count(call: dict[str, Any]) -> int:
    return int(call.get("n") or 1)


# -- a managed server --------------------------------------------------------------------------------------------------


@dataclass
class Node:
    """One conversation in tokens, with the attributes of Atropos' SequenceNode and one of our own; L tokens."""

    asked: str
    """What was answered last."""
    full_text: str
    """With the answer."""
    tokens: list[int]
    masked_tokens: list[int]
    """[L] −100 on what was not sampled, the token elsewhere."""
    logprobs: list[float] | None
    """[L] 1.0 on what was not sampled; none where an action came without."""
    metadata: dict[str, Any] = field(default_factory=dict)


class Managed:
    """Stands where an environment has a ManagedServer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._nodes: list[Node] = []

    async def chat_completion(self, **call: Any) -> Answer:
        """As OpenAI's; what is said is kept."""
        return Answer.to_chat(await self._answered(Prompt.of_chat(call, self._tokenizer), call, begins=False))

    async def completion(self, **call: Any) -> Answer:
        """As OpenAI's; what is said is kept."""
        return Answer.to_text(await self._answered(Prompt.of_text(call), call, begins=True))

    def get_state(self) -> dict[str, Any]:
        """What was said: a node a conversation, in the order in which they began."""
        return {"nodes": list(self._nodes)}

    def reset(self) -> None:
        """Forget it."""
        self._nodes.clear()

    async def _answered(self, prompt: Prompt, call: dict[str, Any], *, begins: bool) -> list[Action]:
        """`begins`: the text has no marks of a beginning yet."""
        count = _count(call)
        before = self._node_before(str(prompt.text))
        asked = self._grown(before, str(prompt.text), begins=begins)
        told = Prompt(
            messages=prompt.messages, text=prompt.text, input_ids=list(asked.tokens), sampling=prompt.sampling
        )
        answered = await current_episode().ask(told, count)
        for place, action in answered:
            self._keep(before if count == 1 else None, self._said(asked, place, action))
        return [action for _, action in answered]

    def _node_before(self, text: str) -> Node | None:
        """The longest conversation that `text` goes on with."""
        fits = [node for node in self._nodes if text.startswith(node.full_text) and text != node.asked]
        return max(fits, key=lambda node: len(node.full_text), default=None)

    def _grown(self, node: Node | None, text: str, *, begins: bool) -> Node:
        """`node` and what `text` adds to it, none of which was sampled."""
        if node is None:
            return _unsampled(Node("", "", [], [], []), text, _encoded(self._tokenizer, text, begins=begins))
        new = text[len(node.full_text) :]
        end_id = getattr(self._tokenizer, "eos_token_id", None)
        if end_id is not None and node.tokens[-1:] == [end_id]:
            new = new.removeprefix(getattr(self._tokenizer, "eos_token", None) or "")  # its token is there already
        return _unsampled(node, text, _encoded(self._tokenizer, new, begins=False))

    def _said(self, asked: Node, place: Place, action: Action) -> Node:
        """`asked` with the answer; the place is told the whole sequence."""
        if action.tokens is None:
            tokens = _encoded(self._tokenizer, action.text, begins=False)
        else:
            tokens = [int(token) for token in action.tokens]
        known = asked.logprobs is not None and action.logprobs is not None
        node = Node(
            asked=asked.full_text,
            full_text=asked.full_text + action.text,
            tokens=asked.tokens + tokens,
            masked_tokens=asked.masked_tokens + tokens,
            logprobs=[*(asked.logprobs or ()), *map(float, action.logprobs or ())] if known else None,
            metadata={"finish_reason": action.finish_reason},
        )
        place.tokens = node.tokens
        return node

    def _keep(self, before: Node | None, node: Node) -> None:
        """`node` takes the place of the conversation that it goes on with."""
        if before is None:
            self._nodes.append(node)
        else:
            self._nodes[next(index for index, each in enumerate(self._nodes) if each is before)] = node


def _unsampled(node: Node, text: str, tokens: list[int]) -> Node:
    return Node(
        asked=text,
        full_text=text,
        tokens=node.tokens + tokens,
        masked_tokens=node.masked_tokens + [UNTRAINED] * len(tokens),
        logprobs=None if node.logprobs is None else node.logprobs + [NO_LOGPROB] * len(tokens),
    )


def _encoded(tokenizer: Any, text: str, *, begins: bool) -> list[int]:
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=begins)]


def _needed(tokenizer: Any) -> Any:
    if tokenizer is None:
        raise ModelCallRefused(
            "expected a tokenizer, for the environment asks for tokens, got none: give managed_server one"
        )
    return tokenizer
