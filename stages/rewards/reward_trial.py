"""Call every reward function once before a run: an error in one is found in a second, and not after the first samples.

A function gets two completions that are made up, of the first row of a data set, as it gets those of a group. Judges,
reward models and checkers in processes of their own are not called: they load models, or call servers.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio.to_thread
import numpy as np

from ..._pipeline.errors import InvalidConfig, InvalidData, MissingColumn
from ..._pipeline.util.raised_places import located_text
from ..._pipeline.util.user_code import open_user
from ..._schemas import TrajectoryGroup
from ..contracts.policies import Tokenizer
from ..contracts.prompts import Prompt
from ..tokenizers.start_tokens import prompt_ids
from .reward_calls import Calls
from .reward_functions import RewardComponent, RewardFunction
from .reward_input import RewardInput

COMPLETIONS = (
    "<think>\nTwo and two are four.\n</think>\n\n<answer>4</answer>\n\n#### 4\n\nThe answer is \\boxed{4}.",
    "I do not know.",
)
"""One has an answer in the forms that functions look for, the other has none."""


async def try_functions(components: Sequence[RewardComponent], prompt: Prompt, tokenizer: Tokenizer) -> None:
    """Call every function among `components`, in their order, with `COMPLETIONS` of `prompt`.

    Raises:
        InvalidConfig: one has no value for them; the message has its place, the error and its line.
        InvalidData: the prompt is empty.
        MissingColumn: the row lacks a column that one takes.
    """
    inputs = _inputs(prompt, tokenizer)
    for place, component in enumerate(components):
        if isinstance(component, RewardFunction):
            await _try(component, f"reward.functions[{place}]", inputs)


async def _try(component: RewardFunction, root: str, inputs: Sequence[RewardInput]) -> None:
    try:
        async with open_user(component.open) as function:
            calls = Calls(component, function)
            try:
                await calls.tried(inputs)
            finally:
                calls.close()
    except MissingColumn as error:
        raise MissingColumn(f"{root}: {error}") from None
    except Exception as error:
        raised = await anyio.to_thread.run_sync(located_text, error)
        raise InvalidConfig(
            f"{root}: expected {component.name} to return a number, or None, for any completion, got {raised} for the "
            f"first row and two made-up completions"
        ) from error


def _inputs(prompt: Prompt, tokenizer: Tokenizer) -> list[RewardInput]:
    content = prompt.content
    asked = np.asarray(prompt_ids(tokenizer, content) if isinstance(content, str) else content, np.int32)
    if not len(asked):
        raise InvalidData(
            f"{prompt.meta.get('data_source')}: expected prompts of a token or more, got an empty one first"
        )
    said = [np.asarray([*tokenizer.encode(text), tokenizer.eos_id], np.int32) for text in COMPLETIONS]
    group = TrajectoryGroup.build(
        env="trial",
        instance_id="trial.0",
        sequences=[np.concatenate([asked, tokens]) for tokens in said],
        loss_mask=[np.repeat([False, True], [len(asked), len(tokens)]) for tokens in said],
        rewards=np.zeros(len(said), np.float32),
        meta=prompt.meta,
    )
    return [
        RewardInput(trajectory=each, score=0.0, text=text, turns=(text,), meta=group.meta)
        for each, text in zip(group, COMPLETIONS, strict=True)
    ]
