"""Prompts and the tokens between turns, compared with transformers' `apply_chat_template`."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import transformers
from numpy.typing import NDArray
from structlog.testing import capture_logs
from tests.models_hf import chat_templates
from tests.models_hf.chat_templates import CHATML, LLAMA, MISTRAL, QWEN, THINKING_AHEAD

from penstock import SourceEnv, StopReason, Worker
from penstock.chat import ChatFormat
from penstock.errors import InvalidConfig, InvalidData, UnstableTemplate
from penstock.policies import Completion, NoOpEngine, PretrainedTokenizer, SamplingParams
from penstock.testing import drive_source

TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "mistral": MISTRAL, "qwen": QWEN}

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"left": {"type": "integer"}}}},
}

QUESTION = {"role": "user", "content": "an answer?"}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "question": [QUESTION],
    "system": [{"role": "system", "content": " short "}, {"role": "user", "content": "1 < 2 & ä?\n"}],
    "turns": [QUESTION, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "sure?"}],
    "tools": [
        QUESTION,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"left": 2}}}],
        },
        {"role": "tool", "content": '{"sum": 4}', "name": None},
        {"role": "tool", "content": "5"},
    ],
}


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[str | None], Path]:
    return lambda template: chat_templates.tokenizer_folder(tmp_path / "tokenizer", template)


@pytest.fixture
def chatml(folder: Callable[[str], Path]) -> ChatFormat:
    return ChatFormat(PretrainedTokenizer(folder(CHATML)))


@pytest.fixture
def qwen(folder: Callable[[str], Path]) -> ChatFormat:
    return ChatFormat(PretrainedTokenizer(folder(QWEN)))


def by_transformers(folder: Path, messages: Sequence[dict[str, Any]], tools: Any = None) -> list[int]:
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    ids: list[int] = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return ids


# -- prompts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "conversation"),
    [
        *product(["chatml", "mistral"], ["question", "turns"]),
        ("chatml", "system"),
        *product(["llama", "qwen"], CONVERSATIONS),
    ],
)
def test_a_prompt_has_the_tokens_of_transformers(
    template: str, conversation: str, folder: Callable[[str], Path]
) -> None:
    path, messages = folder(TEMPLATES[template]), CONVERSATIONS[conversation]

    chat = ChatFormat(PretrainedTokenizer(path))

    assert chat.prompt(messages) == by_transformers(path, messages)


@pytest.mark.parametrize("template", ["llama", "qwen"])
def test_schemas_of_tools_are_a_part_of_the_prompt(template: str, folder: Callable[[str], Path]) -> None:
    path = folder(TEMPLATES[template])

    chat = ChatFormat(PretrainedTokenizer(path), tools=[TOOL])  # type: ignore[arg-type]

    assert chat.prompt([QUESTION]) == by_transformers(path, [QUESTION], tools=[TOOL])
    assert chat.prompt([QUESTION]) != ChatFormat(PretrainedTokenizer(path)).prompt([QUESTION])


def test_of_several_templates_tools_take_theirs(folder: Callable[[str | None], Path]) -> None:
    tokenizer = PretrainedTokenizer(folder(None))
    tokenizer.chat_template = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": QWEN}]

    plain, with_tools = ChatFormat(tokenizer), ChatFormat(tokenizer, tools=(TOOL,))

    assert "# Tools" not in tokenizer.decode(plain.prompt([QUESTION]))
    assert "# Tools" in tokenizer.decode(with_tools.prompt([QUESTION]))


# -- turns -------------------------------------------------------------------------------------------------------------


def answered(tokenizer: PretrainedTokenizer, text: str) -> list[int]:
    return [*tokenizer.encode(text), tokenizer.eos_id]


@pytest.mark.parametrize(
    ("template", "role", "turns"),
    [
        ("chatml", "user", ["an answer", "another"]),
        ("llama", "user", ["an answer", "another"]),
        ("mistral", "user", [" an answer", " another"]),
        ("qwen", "tool", ["<think>\none\n</think>\n\nan answer", "another"]),
    ],
)
def test_turns_and_what_stands_between_them_are_the_conversation_of_transformers(
    template: str, role: Any, turns: list[str], folder: Callable[[str], Path]
) -> None:
    path = folder(TEMPLATES[template])
    tokenizer = PretrainedTokenizer(path)
    chat = ChatFormat(tokenizer, observation_role=role)
    messages: list[dict[str, Any]] = [QUESTION]
    tokens = chat.prompt(messages)

    for turn in turns:
        messages.append({"role": "assistant", "content": turn.removeprefix(" ")})
        new = {"role": role, "content": "go on, an hour"}
        tokens += answered(tokenizer, turn) + (chat.extend(messages, [new], sampled=[tokenizer.eos_id]) or [])
        messages.append(new)

    assert tokens == by_transformers(path, messages)


def test_a_turn_that_was_cut_is_closed_by_the_end_token(folder: Callable[[str], Path]) -> None:
    chat = ChatFormat(PretrainedTokenizer(folder(CHATML)))
    messages, new = [QUESTION, {"role": "assistant", "content": "an ans"}], [QUESTION]

    ended, cut = (chat.extend(messages, new, sampled=sampled) for sampled in ([chat.tokenizer.eos_id], [5]))

    assert ended
    assert cut == [chat.tokenizer.eos_id, *ended]


QWEN_WITHOUT_TOOLS = QWEN.replace("message.role == 'tool'", "message.role == 'result'")

CHANGING = {
    QWEN_WITHOUT_TOOLS: r"as it was sampled.*chat_template.jinja in the tok.*load it too$",
    QWEN: r"as it was sampled.*chat_template.jinja.*; or use ChatFormat\(observation_role=\"tool\"\)",
    THINKING_AHEAD: r"as it was sampled, '.*<think>\\nan answer', got '.*chat_template.jinja in the tok.*load it too$",
}


@pytest.mark.parametrize("template", CHANGING, ids=["qwen without tools", "qwen", "thinking ahead"])
def test_a_template_that_changes_earlier_turns_is_named_in_one_warning(
    template: str, folder: Callable[[str], Path]
) -> None:
    chat = ChatFormat(PretrainedTokenizer(folder(template)))

    with capture_logs() as logs:
        chat.check_turns()
        said = [QUESTION, {"role": "assistant", "content": "<think>\nso\n</think>\n\nyes"}]
        tokens = chat.extend(said, [QUESTION], sampled=[chat.tokenizer.eos_id])

    (warning,) = logs
    assert re.search(f"(?s){CHANGING[template]}", f"{warning['difference']}; {warning['advice']}")
    ahead = "<think>\n" if template == THINKING_AHEAD else ""
    between = f"\n<|im_start|>user\nan answer?<|im_end|>\n<|im_start|>assistant\n{ahead}"
    assert tokens == list(chat.tokenizer.encode(between))


@pytest.mark.parametrize("template", CHANGING, ids=["qwen without tools", "qwen", "thinking ahead"])
def test_a_strict_format_refuses_a_template_that_changes_earlier_turns(
    template: str, folder: Callable[[str], Path]
) -> None:
    chat = ChatFormat(PretrainedTokenizer(folder(template)), strict=True)

    with pytest.raises(UnstableTemplate, match=f"(?s){CHANGING[template]}"):
        chat.check_turns()
    assert chat.extend([QUESTION, {"role": "assistant", "content": "yes"}], [QUESTION]) is None
    assert chat.prompt([QUESTION])


@pytest.mark.parametrize(
    ("template", "role", "message"),
    [
        (
            CHATML.replace("<|im_end|>", "<end>"),
            "user",
            r"writes an end token, one of '<\|im_end\|>' \(\d+\), after a turn of the assistant, got '<end>",
        ),
        (chat_templates.NO_TOOLS, "tool", r"writes a message of the role 'tool' after a turn of the assistant, got '<"),
        (MISTRAL, "tool", r"takes, got roles user, .*: expected messages of user and assistant in turn"),
    ],
    ids=["no end", "no message of tools", "roles"],
)
def test_a_template_that_ends_no_turn_or_has_no_such_role_is_refused_with_what_to_do(
    template: str, role: Any, message: str, folder: Callable[[str], Path]
) -> None:
    chat = ChatFormat(PretrainedTokenizer(folder(template)), observation_role=role)

    with pytest.raises(UnstableTemplate, match=f"(?s){message}"):
        chat.check_turns()
    assert chat.extend([QUESTION, {"role": "assistant", "content": "yes"}], [{"role": role, "content": "no"}]) is None
    assert chat.prompt([QUESTION])


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (chat_templates.CALLS_ONLY, "<|im_end|><|im_start|>tool\n4<|im_end|><|im_start|>assistant\n"),
        (chat_templates.RESULTS_IN_TURNS, "</s>4[/INST]"),
    ],
    ids=["a call", "a result within the turn"],
)
def test_a_message_of_a_tool_follows_a_call_where_the_template_requires_one(
    template: str, expected: str, folder: Callable[[str], Path]
) -> None:
    chat = ChatFormat(PretrainedTokenizer(folder(template)), observation_role="tool")
    turn = {"role": "assistant", "content": "add(2, 2)"}

    between = chat.extend([QUESTION, turn], [{"role": "tool", "content": "4"}])

    assert between
    assert chat.tokenizer.decode(between) == expected


def test_a_template_that_takes_parts_only_is_given_parts(folder: Callable[[str], Path]) -> None:
    path = folder(chat_templates.PARTS)
    chat = ChatFormat(PretrainedTokenizer(path))
    in_parts = [{"role": "user", "content": [{"type": "text", "text": QUESTION["content"]}]}]

    assert chat.prompt([QUESTION]) == by_transformers(path, in_parts)
    assert chat.extend([QUESTION, {"role": "assistant", "content": "yes"}], [QUESTION])


def test_arguments_reach_the_template_and_those_of_transformers_are_refused(folder: Callable[[str], Path]) -> None:
    path = folder(chat_templates.SWITCHED)
    tokenizer = PretrainedTokenizer(path)
    reference: Any = transformers.AutoTokenizer.from_pretrained(path)

    for arguments in ({}, {"thinking": True}, {"thinking": False, "other": 1}):
        ids = reference.apply_chat_template([QUESTION], add_generation_prompt=True, return_dict=False, **arguments)
        assert ChatFormat(tokenizer, arguments=arguments).prompt([QUESTION]) == ids
    for reserved in ("messages", "add_generation_prompt", "tools"):
        with pytest.raises(
            InvalidConfig, match=f"arguments: expected arguments of the template's own, got '{reserved}'"
        ):
            ChatFormat(tokenizer, arguments={reserved: 1})
    with pytest.raises(InvalidConfig, match="arguments: expected arguments by name, got 3"):
        ChatFormat(tokenizer, arguments=3)  # type: ignore[arg-type]


def test_a_tokenizer_without_a_template_and_tools_that_are_none_are_refused(
    folder: Callable[[str | None], Path],
) -> None:
    tokenizer = PretrainedTokenizer(folder(None))

    with pytest.raises(InvalidConfig, match=r"expected a tokenizer with a chat template.* chat_template.jinja"):
        ChatFormat(tokenizer)
    tokenizer.chat_template = CHATML
    with pytest.raises(InvalidConfig, match="expected a sequence of JSON schemas"):
        ChatFormat(tokenizer, tools=TOOL)  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match="observation_role: expected user or tool, got 'bot'"):
        ChatFormat(tokenizer, observation_role="bot")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}",
            "system, user: no system",
        ),
        ("{{ messages[0].nothing.at.all }}", "has no attribute 'nothing'"),
        ("{% for m in messages %}{{ m.content ", "unexpected end of template"),
    ],
)
def test_messages_that_a_template_refuses_are_reported_with_its_reason(
    template: str, message: str, folder: Callable[[str], Path]
) -> None:
    chat = ChatFormat(PretrainedTokenizer(folder(template)))

    with pytest.raises(InvalidData, match="expected messages that its chat template takes, got roles") as refused:
        chat.prompt([{"role": "system", "content": "be brief"}, QUESTION])
    assert message in str(refused.value)


def test_a_chat_format_travels_to_workers(folder: Callable[[str], Path]) -> None:
    chat = ChatFormat(PretrainedTokenizer(folder(CHATML)), tools=(TOOL,))
    chat.check_turns()

    assert pickle.loads(pickle.dumps(chat)).prompt([QUESTION]) == chat.prompt([QUESTION])  # noqa: S301 (our own bytes)


# -- episodes ----------------------------------------------------------------------------------------------------------


class Scripted(NoOpEngine):
    """A policy that writes its turns letter by letter, as its tokenizer never would."""

    def __init__(self, tokenizer: PretrainedTokenizer, turns: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._turns = list(turns)
        self.prompts: list[list[int]] = []

    def open(self, worker: Worker) -> Any:  # noqa: ARG002 (the protocol's)
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing to close."""

    async def generate(self, prompts: Sequence[NDArray[np.int32]], sampling: SamplingParams) -> list[Completion]:
        self.prompts += [prompt.tolist() for prompt in prompts]
        letters = [token for letter in self._turns.pop(0) for token in self._tokenizer.encode(letter)]
        tokens = np.array([*letters, self._tokenizer.eos_id][: sampling.max_completion_tokens], np.int32)
        ended = tokens[-1] == self._tokenizer.eos_id
        return [
            Completion(
                tokens=tokens,
                logprobs=np.zeros(len(tokens), np.float32),
                stop_reason=StopReason.STOP if ended else StopReason.LENGTH,
                policy_versions=np.zeros(len(tokens), np.int64),
            )
        ]


class Greeting:
    """Two turns; begins with messages, and goes on with text."""

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:  # noqa: ARG002 (the protocol's)
        self.actions: list[str] = []
        return [{"role": "system", "content": "be kind"}, QUESTION], {}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        ended = len(self.actions) == 2
        return None if ended else f"you said {action}", 1.0, ended, False, {}


class Asked:
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"question": QUESTION["content"], "answer": "yes"}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        return float(answer == entry["answer"])


async def test_an_episode_has_the_tokens_of_the_template_and_the_policys_own(chatml: ChatFormat) -> None:
    policy = Scripted(chatml.tokenizer, ["an answer", "answers"])  # type: ignore[arg-type]

    (group,) = await drive_source(SourceEnv(Greeting, policy, chat=chatml, group_size=1, groups=1))

    messages = [{"role": "system", "content": "be kind"}, QUESTION]
    sampled = [
        [token for letter in turn for token in chatml.tokenizer.encode(letter)] for turn in ("an answer", "answers")
    ]
    end = [chatml.tokenizer.eos_id]
    said = [*messages, {"role": "assistant", "content": "an answer"}]
    between = chatml.extend(said, [{"role": "user", "content": "you said an answer"}], sampled=end) or []
    prompt = chatml.prompt(messages)
    assert group.tokens.tolist() == [*prompt, *sampled[0], *end, *between, *sampled[1], *end]
    assert sampled[0] != list(chatml.tokenizer.encode("an answer"))
    lengths = [len(prompt), len(sampled[0]) + 1, len(between), len(sampled[1]) + 1]
    assert group.loss_mask.tolist() == np.repeat([False, True, False, True], lengths).tolist()
    assert group.meta["messages"] == messages


async def test_a_turn_that_was_cut_has_an_end_token_that_does_not_train(chatml: ChatFormat) -> None:
    policy = Scripted(chatml.tokenizer, ["an answer", "x"])  # type: ignore[arg-type]
    sampling = SamplingParams(max_completion_tokens=3)

    (group,) = await drive_source(SourceEnv(Greeting, policy, chat=chatml, sampling=sampling, group_size=1, groups=1))

    first = len(policy.prompts[0]) + 3
    assert group.tokens[first] == chatml.tokenizer.eos_id
    assert group.loss_mask[first - 1 : first + 1].tolist() == [True, False]


async def test_a_question_of_a_data_set_is_a_message_of_the_user(chatml: ChatFormat) -> None:
    policy = Scripted(chatml.tokenizer, ["yes"])  # type: ignore[arg-type]

    (group,) = await drive_source(SourceEnv(Asked, policy, chat=chatml, group_size=1, groups=1))

    assert policy.prompts == [chatml.prompt([QUESTION])]
    assert group.meta["messages"] == [QUESTION]
    assert group.rewards.tolist() == [1]


async def test_a_source_with_an_unstable_template_ends_at_its_start(qwen: ChatFormat) -> None:
    chat = replace(qwen, strict=True)

    with pytest.raises(UnstableTemplate):
        await drive_source(SourceEnv(Greeting, Scripted(chat.tokenizer, []), chat=chat, groups=1))  # type: ignore[arg-type]


async def test_an_episode_of_a_template_that_removes_thoughts_keeps_them_as_sampled(qwen: ChatFormat) -> None:
    thought = "<think>\none\n</think>\n\nan answer"
    policy = Scripted(qwen.tokenizer, [thought, "answers"])  # type: ignore[arg-type]

    with capture_logs() as logs:
        (group,) = await drive_source(SourceEnv(Greeting, policy, chat=qwen, group_size=1, groups=1))

    assert [event["event"] for event in logs] == ["earlier_turns_change"]
    text = qwen.tokenizer.decode(group.tokens.tolist())
    assert f"assistant\n{thought}<|im_end|>\n<|im_start|>user\nyou said {thought}<|im_end|>\n" in text
