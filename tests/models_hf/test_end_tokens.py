"""A completion ends at any of the tokens of tokenizer, generation configuration and template, and its text has none."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import anyio
import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from tests.cells import cells
from tests.models_hf.chat_families import CHATML, FAMILIES, TEXT, Family, write_family, write_tokenizer

from penstock import Context, RewardBridge, SourceEnv, StopReason, Worker
from penstock._stages.tokenizers.pretrained_tokenizer import end_texts_of
from penstock.chat import ChatFormat
from penstock.errors import InvalidConfig
from penstock.models import HFModel
from penstock.policies import Completion, NoOpEngine, PretrainedTokenizer, SamplingParams
from penstock.rewards import RewardFunction, RewardInput
from penstock.runs import describe_run, load_run_config
from penstock.testing import drive, drive_source, entered
from penstock.torch import TorchPolicy

pytestmark = pytest.mark.usefixtures("one_thread")

BOUND = 24

families = pytest.mark.parametrize("name", cells(FAMILIES, run=list(FAMILIES)[:2]))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_family(family, tmp_path_factory.mktemp("family")) for name, family in FAMILIES.items()}


@pytest.fixture(scope="module")
def tokenizers(folders: dict[str, Path]) -> dict[str, PretrainedTokenizer]:
    return {name: PretrainedTokenizer(folder) for name, folder in folders.items()}


def ids_of(tokenizer: PretrainedTokenizer, tokens: Sequence[str]) -> set[int]:
    return {tokenizer.get_vocab()[token] for token in tokens}


@families
def test_the_end_tokens_are_those_of_tokenizer_generation_and_template(
    name: str, tokenizers: dict[str, PretrainedTokenizer]
) -> None:
    tokenizer = tokenizers[name]

    assert tokenizer.end_ids == ids_of(tokenizer, FAMILIES[name].ends)
    assert pickle.loads(pickle.dumps(tokenizer)).end_ids == tokenizer.end_ids  # noqa: S301 (our own bytes)


# -- engines -----------------------------------------------------------------------------------------------------------


@families
def test_every_completion_ends_where_that_of_transformers_ends(
    name: str, folders: dict[str, Path], tokenizers: dict[str, PretrainedTokenizer]
) -> None:
    folder, tokenizer = folders[name], tokenizers[name]
    prompts = [np.array([place, place + 7, place + 3], np.int32) for place in range(0, len(TEXT) - 8, 3)]
    policy = TorchPolicy(partial(HFModel.from_pretrained, folder), eos_id=tokenizer.eos_id)

    async def completed() -> list[Completion]:
        with entered(Context(tokenizer=tokenizer)):
            async with policy.open(Worker()) as engine:
                return await engine.generate(prompts, SamplingParams(max_completion_tokens=BOUND, greedy=True))

    completions = anyio.run(completed)

    expected = generated(folder, prompts, sorted(tokenizer.end_ids) if name in {"qwen base", "config alone"} else None)
    assert [completion.tokens.tolist() for completion in completions] == expected
    ended = [tokens[-1] in tokenizer.end_ids for tokens in expected]
    assert ended == [completion.stop_reason == StopReason.STOP for completion in completions]
    assert sum(ended) > len(prompts) // 3
    assert {tokens[-1] for tokens in expected} & (tokenizer.end_ids - {tokenizer.eos_id})


def generated(folder: Path, prompts: Sequence[NDArray[np.int32]], ends: list[int] | None) -> list[list[int]]:
    """Return what `generate` samples; it ends at `ends` where the model's own files do not have the template's."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    chosen = {"pad_token_id": 0} if ends is None else {"pad_token_id": 0, "eos_token_id": ends}
    found = []
    for prompt in prompts:
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        mask = torch.ones_like(ids)
        whole = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=BOUND, **chosen)
        found.append(whole[0, len(prompt) :].tolist())
    return found


async def test_a_model_knows_its_end_tokens_without_a_tokenizer(
    folders: dict[str, Path], tokenizers: dict[str, PretrainedTokenizer]
) -> None:
    folder = folders["gemma 3"]
    ends = tokenizers["gemma 3"].end_ids
    prompts = [np.array([place, place + 7], np.int32) for place in range(30)]

    async with TorchPolicy(partial(HFModel.from_pretrained, folder), eos_id=min(ends)).open(Worker()) as engine:
        completions = await engine.generate(prompts, SamplingParams(max_completion_tokens=BOUND, seed=1))

    assert max(ends) in {completion.tokens[-1] for completion in completions}
    assert not ends.intersection(token for completion in completions for token in completion.tokens[:-1].tolist())


async def test_a_token_of_the_request_ends_a_completion_too(folders: dict[str, Path]) -> None:
    folder = folders["gemma 3"]
    stop_ids = tuple(range(10))
    prompts = [np.array([place, place + 7], np.int32) for place in range(30)]

    async with TorchPolicy(partial(HFModel.from_pretrained, folder), eos_id=len(TEXT)).open(Worker()) as engine:
        sampling = SamplingParams(max_completion_tokens=BOUND, seed=1, stop_ids=stop_ids)
        completions = await engine.generate(prompts, sampling)

    assert any(completion.tokens[-1] in stop_ids for completion in completions)
    assert not set(stop_ids).intersection(t for completion in completions for t in completion.tokens[:-1].tolist())


# -- requests, conversations and rewards -------------------------------------------------------------------------------


class Says(NoOpEngine):
    """A policy that says one thing, and ends it with one token."""

    def __init__(self, tokenizer: PretrainedTokenizer, said: str, end: int) -> None:
        self._tokens = np.array([*tokenizer.encode(said), end], np.int32)
        self.requests: list[tuple[list[int], SamplingParams]] = []

    def open(self, worker: Worker) -> Any:  # noqa: ARG002 (the protocol's)
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing to close."""

    async def generate(self, prompts: Sequence[NDArray[np.int32]], sampling: SamplingParams) -> list[Completion]:
        self.requests += [(prompt.tolist(), sampling) for prompt in prompts]
        count = len(self._tokens)
        return [
            Completion(
                tokens=self._tokens,
                logprobs=np.zeros(count, np.float32),
                stop_reason=StopReason.STOP,
                policy_versions=np.zeros(count, np.int64),
            )
        ]


class Asks:
    """Asks twice."""

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:  # noqa: ARG002 (the protocol's)
        self.actions: list[str] = []
        return "how many?", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        return "sure?", float(action == "72"), len(self.actions) == 2, False, {}


ends_of_families = pytest.mark.parametrize(
    ("name", "end"), [(name, end) for name, family in FAMILIES.items() for end in family.ends]
)


@ends_of_families
async def test_an_environment_and_a_reward_read_the_answer_without_its_end(
    name: str, end: str, tokenizers: dict[str, PretrainedTokenizer]
) -> None:
    tokenizer = tokenizers[name]
    policy = Says(tokenizer, "72", tokenizer.get_vocab()[end])
    read: list[str] = []

    def reads(judged: RewardInput) -> float:
        read.append(judged.text)
        return 1.0

    (group,) = await drive_source(SourceEnv(Asks, policy, tokenizer, group_size=1, groups=1))
    await drive(RewardBridge(functions=[RewardFunction(reads)]), [group], tokenizer=tokenizer)

    assert group.rewards.tolist() == [2]
    assert read == ["72\n72"]


@families
async def test_every_request_names_the_end_tokens(name: str, tokenizers: dict[str, PretrainedTokenizer]) -> None:
    tokenizer = tokenizers[name]
    policy = Says(tokenizer, "72", tokenizer.eos_id)

    await drive_source(
        SourceEnv(Asks, policy, tokenizer, sampling=SamplingParams(stop_ids=(3,)), group_size=1, groups=1)
    )

    assert [sampling.stop_ids for _, sampling in policy.requests] == [tuple(sorted({3, *tokenizer.end_ids}))] * 2


@pytest.mark.parametrize(
    ("name", "end", "between"),
    [
        ("gemma 3", "<end_of_turn>", "\n<start_of_turn>user\nsure?<end_of_turn>\n<start_of_turn>model\n"),
        ("gemma 3", "<eos>", "<end_of_turn>\n<start_of_turn>user\nsure?<end_of_turn>\n<start_of_turn>model\n"),
        ("phi 3", "<|end|>", "\n<|user|>\nsure?<|end|>\n<|assistant|>\n"),
        ("glm 4", "<|user|>", "\nsure?<|assistant|>\n"),
        ("glm 4", "<|endoftext|>", "<|user|>\nsure?<|assistant|>\n"),
        ("qwen base", "<|im_end|>", "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"),
        ("llama 3.1", "<|eom_id|>", None),
    ],
)
async def test_a_turn_ends_once_as_the_template_writes_it(
    name: str, end: str, between: str | None, tokenizers: dict[str, PretrainedTokenizer]
) -> None:
    tokenizer = tokenizers[name]
    chat = ChatFormat(tokenizer)
    policy = Says(tokenizer, "72", tokenizer.get_vocab()[end])
    if between is None:
        between = "<|eot_id|>" + tokenizer.decode(chat.prompt([{"role": "user", "content": "sure?"}])).removeprefix(
            "<|begin_of_text|>"
        )

    await drive_source(SourceEnv(Asks, policy, chat=chat, group_size=1, groups=1))

    (first, _), (second, _) = policy.requests
    assert tokenizer.decode(second[len(first) :]) == f"72{end}{between}"


@families
def test_a_plug_in_knows_the_text_of_the_end_tokens_from_its_own_tokenizer(name: str, folders: dict[str, Path]) -> None:
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folders[name])

    assert set(end_texts_of(tokenizer)) == set(FAMILIES[name].ends)


# -- check -------------------------------------------------------------------------------------------------------------


def checked(folder: Path, model: Path) -> str:
    (folder / "data.jsonl").write_text(json.dumps({"question": "how many?"}) + "\n")
    data = {"path": str(folder / "data.jsonl"), "prompt": "question"}
    reward = {"functions": [{"function": "tests.configured_run:letters_e"}]}
    return describe_run(load_run_config({"model": {"path": str(model)}, "data": data, "reward": reward}))


def test_check_prints_the_end_tokens(folders: dict[str, Path], tmp_path: Path) -> None:
    assert "a completion ends after '<eos>' (66), '<end_of_turn>' (68)\n" in checked(tmp_path, folders["gemma 3"])


def test_check_refuses_a_template_whose_end_of_turn_is_no_token(tmp_path: Path) -> None:
    family = Family(CHATML, ("<|endoftext|>",), "<|endoftext|>", "<|endoftext|>", ())

    with pytest.raises(InvalidConfig, match=r"ends a turn of the assistant .*got '<\|im_end\|>', which is"):
        checked(tmp_path, write_family(family, tmp_path / "model"))


def test_check_accepts_a_template_without_any_end_of_turn(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    family = Family(template, ("<|endoftext|>",), "<|endoftext|>", "<|endoftext|>", ())

    assert "a completion ends after '<|endoftext|>' (65)\n" in checked(
        tmp_path, write_family(family, tmp_path / "model")
    )


@pytest.mark.parametrize("ends", ["106", [1, "106"], [-1], 1.5, True])
def test_end_tokens_that_are_no_ids_are_refused_with_the_file(ends: object, tmp_path: Path) -> None:
    write_tokenizer(FAMILIES["gemma 3"], {token: place for place, token in enumerate(TEXT)}, tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))

    with pytest.raises(InvalidConfig, match=r"generation_config.json: eos_token_id: expected a token id, or a list"):
        PretrainedTokenizer(tmp_path)


def test_the_end_tokens_of_a_model_of_several_parts_are_those_of_its_text(tmp_path: Path) -> None:
    write_tokenizer(FAMILIES["gemma 3"], {token: place for place, token in enumerate(TEXT)}, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": [3, 5]}}))

    assert {3, 5} < PretrainedTokenizer(tmp_path).end_ids
