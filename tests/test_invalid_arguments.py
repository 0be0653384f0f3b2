"""Every public constructor and function answers an argument that it cannot use with `InvalidConfig`, which names it."""

from __future__ import annotations

import inspect
import math
import sys
import types
import typing
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import anyio
import torch
from tests.bigram import Bigram
from tests.public_surface import public_names

from penstock import AdvantageNormalizer, Batcher, RewardBridge, TrajectoryGroup
from penstock.data import Mixture
from penstock.errors import InvalidConfig
from penstock.losses import CISPO, DPPO, GSPO, AdaptiveKL, PPOClip
from penstock.models import LoRA
from penstock.policies import NoOpPolicy, SamplingParams
from penstock.rewards import RewardFunction
from penstock.torch import adamw

HANDED_OUT = {
    # what a run returns or reports
    *("Balance", "Context", "Report", "ResumePoint", "RollJob", "RunInfo", "RunningServer", "Sample", "Summary"),
    *("ChannelStatistics", "EdgeStatistics", "StageStatistics", "WeightAddress", "Worker", "WorkerStatistics"),
    *("Attention", "Call", "CallBlock", "Outcome", "ParsedTurn", "RemoteReceiver", "RewardInput", "Scored"),
    *("StageInfo", "ToolCall", "BlockingAgentClient", "CommandResult"),
    # records and what becomes one, which raise InvalidRecord, and configurations that msgspec decodes
    *(
        "Branch",
        "PackedGroup",
        "RolloutResult",
        "RunConfig",
        "TokenizerIdentity",
        "TrainBatch",
        "Trajectory",
        "TrajectoryGroup",
    ),
    *("TrajectoryId", "batch", "group", "trajectory"),
}
"""Values that penstock makes and callers read, and those with a rule of their own."""

UNREACHED = {
    "RewardComponent": "is abstract; its subclasses are tried",
    "train": "reads its configuration first",
    "ChatFormat": "needs a tokenizer with a template",
    "drive_source": "runs a source",
}


class Trainer:
    """Trains nothing."""

    def step(self, _: object, /) -> dict[str, float]:
        return {}


GIVEN: dict[str, Any] = {
    **dict.fromkeys(("max_tokens", "top_k", "max_token_len", "seq_len", "prompt_length", "response_length"), 8),
    **dict.fromkeys(("group_size", "count", "workers", "expected", "batch_size", "num_steps", "ranks", "sequences"), 2),
    **dict.fromkeys(("layers", "batch", "heads", "capacity", "width", "eos_id", "port", "step", "capacity_bytes"), 2),
    **dict.fromkeys(("factor", "weight", "target", "most_kl", "lr", "reconnect_timeout_s"), 0.5),
    **dict.fromkeys(("folder", "path", "purpose", "name", "to", "content", "reason", "tag", "source"), "name"),
    **dict.fromkeys(("make_env", "make_model", "flow", "ready", "write"), list),
    "mode": "grpo",
    "trainer": Trainer(),
    "policy": NoOpPolicy(),
    "tokenizer": Bigram(),
    "function": len,
    "where": "module:name",
    "command": ["true"],
    "sets": {"name": list},
    "groups": [],
    "what": [],
    "state": "lost",
    "record_type": TrajectoryGroup,
    "url": "http://127.0.0.1:1",
    "model": "name",
    "prompt": "{completion}",
    **dict.fromkeys(("action", "observation"), "text"),
    "total": PPOClip(),
    "aggregation": "token-mean",
    **dict.fromkeys(("layers", "chosen", "experts"), 4),
    "optimizer": partial(adamw, lr=0.5),
}
"""An argument that can be used, for each name of one that has no default."""

OF: dict[tuple[str, str], Any] = {
    ("TorchTrainer", "model"): Bigram(),
    ("WeightPublisher", "model"): Bigram(),
    ("connect", "url"): "shm:///name",
    ("serve", "url"): "shm://",
    ("adamw", "parameters"): [torch.nn.Parameter(torch.ones(1))],
    ("PromptDataset", "source"): [{"prompt": "1"}],
}
"""Those that are other ones for one name."""


class Case(NamedTuple):
    """One call with one argument that cannot be used."""

    of: str
    argument: str
    value: object
    call: Callable[[], object]


def kinds(annotation: Any) -> list[Any]:
    """Return the alternatives of an annotation."""
    if get_origin(annotation) is Annotated:
        return kinds(get_args(annotation)[0])
    if get_origin(annotation) in {Union, types.UnionType}:
        return [kind for each in get_args(annotation) for kind in kinds(each)]
    return [annotation]


def unusable(argument: str, annotation: Any) -> list[object]:
    """Return values that no argument of this annotation may have."""
    found = kinds(annotation)
    if any(get_origin(kind) is Literal for kind in found):
        return ["no such choice"]
    if float in found:
        return [math.nan, "text"]
    if int in found:
        return [-2, 1.5] if argument != "checkpoint_interval" else [1.5]
    return [""] if argument == "url" else []


def evaluated(of: Any, signature: inspect.Signature) -> dict[str, Any]:
    """Return the annotations that can be evaluated, also those of an inherited dataclass."""
    owners = of.__mro__[::-1] if inspect.isclass(of) else [inspect.unwrap(of)]
    known = dict(vars(typing))
    for owner in owners:
        known |= vars(sys.modules[owner.__module__])
    found = {}
    for name, parameter in signature.parameters.items():
        text = getattr(parameter.annotation, "__forward_arg__", parameter.annotation)
        try:
            found[name] = eval(text, known) if isinstance(text, str) else text  # noqa: S307 (our own source)
        except NameError:
            continue  # of TYPE_CHECKING
    return found


def public_callables() -> Iterator[tuple[str, Any]]:
    """Yield every public class and function that callers give arguments to."""
    of_name = {name: of for name, of in public_names() if inspect.isclass(of) or inspect.isfunction(of)}
    for name, of in of_name.items():
        is_error = inspect.isclass(of) and issubclass(of, BaseException)
        if name not in HANDED_OUT | UNREACHED.keys() and not is_error and not getattr(of, "_is_protocol", False):
            yield name, of


def called(of: Any, signature: inspect.Signature, arguments: dict[str, Any]) -> None:
    """Call `of`, and wait for it or enter what it returns, where its arguments may be read only then."""
    positional = [
        arguments.pop(name)
        for name, each in signature.parameters.items()
        if each.kind is each.POSITIONAL_ONLY and name in arguments
    ]
    made = of(*positional, **arguments)

    async def entered() -> None:
        if inspect.isawaitable(made):
            await made
        elif isinstance(made, AbstractAsyncContextManager):
            async with made:
                pass

    if inspect.isfunction(of) or "url" in arguments:
        anyio.run(entered)


def cases() -> Iterator[Case]:
    """Yield a call for every public name, argument and value that cannot be used."""
    for name, of in public_callables():
        signature = inspect.signature(of)
        needed = {
            each.name: OF.get((name, each.name), GIVEN.get(each.name))
            for each in signature.parameters.values()
            if each.default is each.empty and each.kind not in {each.VAR_POSITIONAL, each.VAR_KEYWORD}
        }
        for argument, annotation in evaluated(of, signature).items():
            for value in unusable(argument, annotation):
                yield Case(name, argument, value, partial(called, of, signature, needed | {argument: value}))


def problem(case: Case) -> str:
    """Return how the call is answered, unless it is an InvalidConfig of one line that names the argument."""
    try:
        case.call()
    except InvalidConfig as error:
        line = str(error)
        return "" if case.argument in line and len(line.splitlines()) == 1 else line
    except Exception as error:  # noqa: BLE001 (any other one is the finding)
        return f"{type(error).__name__}: {error}"
    return "accepted"


def test_every_public_argument_that_cannot_be_used_is_refused_with_its_name() -> None:
    tried = list(cases())

    problems = [f"{each.of}({each.argument}={each.value!r}): {found}" for each in tried if (found := problem(each))]

    assert not problems
    assert len(tried) > 300


TOGETHER: list[tuple[str, Callable[[], Any]]] = [
    ("mode", partial(AdvantageNormalizer, "maxrl", preset="verl")),
    ("batch_groups", partial(AdvantageNormalizer, "batch")),
    ("gamma", partial(AdvantageNormalizer, "gae", gamma=2.0)),
    ("clip", partial(AdvantageNormalizer, "grpo", clip=(1.0, -1.0))),
    ("max_tokens", partial(Batcher, max_tokens=0)),
    ("functions", partial(RewardBridge, functions=[RewardFunction(len, name="score", reads_text=False)])),  # type: ignore[arg-type]
    ("Mixture.weights", partial(Mixture, [], [])),
    ("temperature", partial(SamplingParams, temperature=-1)),
    ("rank", partial(LoRA, rank=0)),
    ("dropout", partial(LoRA, dropout=1.0)),
    ("clip_low", partial(PPOClip, 1.5, 0.2)),
    ("clip_low", partial(GSPO, -1.0, 0.2)),
    ("lowest", partial(CISPO, 2.0, 3.0)),
    ("low", partial(DPPO, low=0.0)),
    ("target", partial(AdaptiveKL, 0.1, -1.0)),
]
"""Arguments that are out of their range, or cannot be used together."""


def test_arguments_that_cannot_be_used_together_are_refused_with_their_name() -> None:
    problems = [f"{name}: {found}" for name, call in TOGETHER if (found := problem(Case("", name, None, call)))]

    assert not problems
