"""The main module of an environment's process: it makes and sets up the environment, and plays its episodes.

The environment's model server is Atropos' own server manager over a server that asks the players. Tokens, masks,
templates and retries are Atropos' own code. Only the HTTP requests to a model are replaced.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import pickle
import socket
import sys
import uuid
from collections.abc import Awaitable
from importlib.machinery import SourceFileLoader
from multiprocessing import spawn
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from ....._pipeline.errors import InvalidConfig, MissingExtra
from ....._pipeline.workers.worker_payload import open_payload
from ....._schemas import StopReason
from ..contract import NO_LOGPROB
from .episodes import Episode, EpisodeConfig, ModelCall, Seat, current_episode, failure_of
from .messages import (
    Action,
    EnvConfig,
    EnvironmentTimedOut,
    Failure,
    GroupIncomplete,
    ModelCallRefused,
    NoMoreItems,
    Reply,
    Request,
    StepResult,
    encode_frame,
    read_frames,
)

UNLIMITED = {"num_max_requests_at_once": 10**6, "num_requests_for_eval": 10**6, "health_check": False}
"""Options of its configuration, so that model calls wait for players only."""

KEPT_ITEMS = 1024
"""Bound on the seeds with remembered items."""

R = TypeVar("R")


def main(descriptors: str) -> None:
    """Serve one environment: `descriptors` are those of the payload and of the socket to the parent."""
    payload, channel = map(int, descriptors.split())
    os.set_inheritable(channel, False)
    with socket.socket(fileno=channel) as parent:
        try:
            config = _config(payload)
            env = _made(config)  # before an event loop runs, as in Atropos
        except BaseException as error:  # noqa: BLE001 (reported to the parent)
            parent.sendall(encode_frame(Reply(0, failure=failure_of(error))))
            return
        asyncio.run(_serve(env, config, parent))


def _config(payload: int) -> EnvConfig:
    file = open_payload(payload)
    spawn.prepare(pickle.load(file))  # noqa: S301 (inherited from the parent that started this process)
    config: EnvConfig = pickle.load(file)  # noqa: S301 (as above)
    return config


# -- making it ---------------------------------------------------------------------------------------------------------


def _made(config: EnvConfig) -> Any:
    """Return a new environment whose model is a bridge."""
    try:
        make: Any = _loaded(config.where) if isinstance(config.where, str) else config.where
        bridge = bridge_class()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "atroposlib":
            raise
        raise MissingExtra("AtroposEnvironment needs atroposlib: pip install atroposlib==0.4.0") from error
    env = _configured(make, config, bridge) if hasattr(make, "config_init") else make()
    collects_one_by_one(env)
    install_bridge(env, bridge)
    return env


def _configured(make: Any, config: EnvConfig, bridge: Any) -> Any:
    env_config, servers = make.config_init()
    for name, value in ({"use_wandb": False} | config.config | {"group_size": config.group_size}).items():
        setattr(env_config, name, value)
    make.server_cls = bridge  # so that Atropos looks for no server
    return make(config=env_config, server_configs=servers, slurm=False, testing=False)


def collects_one_by_one(env: Any) -> bool:
    """Return whether the environment collects one trajectory at a time, and leaves making groups to Atropos.

    Raises:
        InvalidConfig: it has neither method.
    """
    if _defines(env, "collect_trajectories"):
        return False
    if _defines(env, "collect_trajectory"):
        return True
    raise InvalidConfig(
        f"environment: expected an Atropos environment, with collect_trajectory or collect_trajectories, got "
        f"{type(env).__name__}"
    )


def _defines(env: Any, name: str) -> bool:
    """Return whether it has a method of its own by this name, not only the one of Atropos' base class."""
    owner = next((kind for kind in type(env).__mro__ if name in vars(kind)), None)
    return owner is not None and not f"{owner.__module__}.".startswith("atroposlib.")


def _loaded(where: str) -> Any:
    """Return the class that `package.module:Class` or `folder/file.py:Class` names."""
    place, _, name = where.rpartition(":")
    if not place or not name:
        raise InvalidConfig(f"environment: expected package.module:Class or folder/file.py:Class, got {where!r}")
    module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    if not callable(made := getattr(module, name, None)):
        raise InvalidConfig(f"environment: expected a class {name} in {place}, got none")
    return made


def _from_file(path: Path) -> ModuleType:
    """Return the module of a file; like a script, it can import modules from its own folder."""
    if not path.is_file():
        raise InvalidConfig(f"environment: expected a file, got none at {path.absolute()}")
    sys.path.insert(0, str(path.resolve().parent))
    loader = SourceFileLoader(f"_atropos_{path.stem}", str(path))
    module = ModuleType(loader.name)
    module.__file__ = str(path)
    sys.modules[loader.name] = module  # where dataclasses and pydantic resolve annotations
    loader.exec_module(module)
    return module


# -- its model server --------------------------------------------------------------------------------------------------


def bridge_class() -> Any:
    """Return the subclass of Atropos' `APIServer` that answers model calls with actions."""
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
        EpisodeOver: it has no prompt.
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


# -- playing it --------------------------------------------------------------------------------------------------------


async def _serve(env: Any, config: EnvConfig, parent: socket.socket) -> None:
    """Set up, then execute the requests of the parent until it closes."""
    reader, writer = await asyncio.open_connection(sock=parent)
    try:
        await env.setup()
    except BaseException as error:  # noqa: BLE001 (reported to the parent)
        writer.write(encode_frame(Reply(0, failure=failure_of(error))))
        await writer.drain()
        return
    handler = _RequestHandler(env, config)
    tasks: dict[int, asyncio.Task[None]] = {}
    writer.write(encode_frame(Reply(0)))
    async for request in read_frames(reader, Request):
        if request.kind == "leave" and request.player in tasks:
            tasks[request.player].cancel()
        tasks[request.player] = asyncio.create_task(_answer(handler, request, writer))
    os._exit(0)  # also while threads and tasks of the environment run


async def _answer(handler: _RequestHandler, request: Request, writer: asyncio.StreamWriter) -> None:
    try:
        outcome = await handler.handle(request)
        reply = Reply(request.id, failure=outcome) if isinstance(outcome, Failure) else Reply(request.id, outcome)
        writer.write(encode_frame(reply))
    except BaseException as error:  # noqa: BLE001 (reported to the parent)
        writer.write(encode_frame(Reply(request.id, failure=failure_of(error))))


class _RequestHandler:
    """The environment, and the seat of each player."""

    def __init__(self, env: Any, config: EnvConfig) -> None:
        self._env = env
        self._one_by_one = collects_one_by_one(env)
        self._turn_timeout_s = config.turn_timeout_s
        self._episodes = EpisodeConfig(
            size=1 if self._one_by_one else config.group_size,
            turn_timeout_s=config.turn_timeout_s,
            tokenizer=getattr(env, "tokenizer", None),
        )
        self._seats: dict[int, Seat] = {}
        """By player, while an episode is played."""
        self._drawing = asyncio.Lock()
        """Held during a call of `get_next_item`: environments expect one call at a time."""
        self._items: dict[int, Any] = {}
        """By seed, the oldest first."""
        self._backlog: list[Any] = []
        """Items that the environment put back."""
        self._incomplete: dict[int, Episode] = {}
        """Episodes with free seats, by seed."""

    async def handle(self, request: Request) -> StepResult | Failure | None:
        """Execute `request`; return the outcome of a reset or a step."""
        if request.kind in ("reset", "leave"):
            self._leave(request.player)
        if request.kind == "reset":
            self._seats[request.player] = await self._seat(request.seed)
        return await self._played(request) if request.kind in ("reset", "step") else None

    async def _played(self, request: Request) -> StepResult | Failure:
        seat = self._seats.get(request.player)
        if seat is None:
            raise ModelCallRefused("expected reset() before step(), got none since the last episode ended")
        if request.action is not None:
            seat.act(request.action)
        result = await seat.results.get()
        if (isinstance(result, Failure) or result.over) and self._seats.get(request.player) is seat:
            del self._seats[request.player]
        return result

    def _leave(self, player: int) -> None:
        if (seat := self._seats.pop(player, None)) is not None:
            seat.episode.fail(GroupIncomplete("a step-wise environment of the group was reset or closed"))

    async def _seat(self, seed: int | None) -> Seat:
        async with self._drawing:
            self._incomplete = {each: episode for each, episode in self._incomplete.items() if not episode.full}
            if seed is not None and seed in self._incomplete:
                return self._incomplete[seed].take_seat()
            if seed is None and self._episodes.size > 1:
                raise InvalidConfig(
                    "reset: expected a seed, which is the same for all step-wise environments of a group, got none"
                )
            episode = Episode(self._episodes, self._collected(await self._item(seed)))
            seat = episode.take_seat()
            if seed is not None and not episode.full:
                self._incomplete[seed] = episode
                asyncio.get_running_loop().call_later(self._turn_timeout_s, episode.expect_full)
            return seat

    async def _item(self, seed: int | None) -> Any:
        """Return the item of `seed`: the next one if the seed is new."""
        if seed is not None and seed in self._items:
            return self._items[seed]
        item = self._backlog.pop() if self._backlog else await self._next_item()
        if seed is not None:
            self._items[seed] = item
            if len(self._items) > KEPT_ITEMS:
                del self._items[next(iter(self._items))]
        return item

    async def _next_item(self) -> Any:
        try:
            item = await asyncio.wait_for(_never_exiting(self._env.get_next_item()), self._turn_timeout_s)
        except TimeoutError:
            raise EnvironmentTimedOut(f"get_next_item took more than {self._turn_timeout_s:g} s") from None
        if item is None:
            raise NoMoreItems("expected a next item, got None: the environment has no more")
        return item

    async def _collected(self, item: Any) -> Any:
        """Return the scored data of the environment."""
        env = self._env
        try:
            collect = env.collect_trajectory if self._one_by_one else env.collect_trajectories
            scored, backlog = await _never_exiting(collect(item))
            self._backlog += backlog or ()
            return scored if self._one_by_one else await _never_exiting(env.postprocess_histories(scored))
        finally:
            await env.cleanup()


async def _never_exiting(work: Awaitable[R]) -> R:
    """Return the result of `work`; SystemExit becomes an error like others: it would end the event loop."""
    try:
        return await work
    except SystemExit as error:
        raise RuntimeError(f"the environment exited, with {error}") from error
