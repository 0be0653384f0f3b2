"""Tools of a call, the calls that templates write, and conversations that go on after recorded turns."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.models_hf.agent_conversations import (
    ADD,
    AGAIN,
    ANSWER,
    CALLED,
    GOING_ON,
    LOOK,
    QUESTION,
    call,
    called,
    result,
)
from tests.models_hf.chat_templates import (
    CALLING,
    CHATML,
    HERMES,
    JSON_CALLS,
    MISTRAL_CALLS,
    NO_TOOLS,
    THINKING_AHEAD,
    tokenizer_folder,
)

from penstock._stages.tokenizers import chat_format
from penstock.chat import ChatFormat, ToolCall, parse_turn
from penstock.errors import InvalidConfig
from penstock.policies import PretrainedTokenizer

TEMPLATES = {name: template for templates in CALLING.values() for name, template in templates.items()}

FORMATS = {name: parser for parser, templates in CALLING.items() for name in templates}


Make = Callable[..., ChatFormat]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return lambda template, **options: ChatFormat(
        PretrainedTokenizer(tokenizer_folder(tmp_path / str(len(list(tmp_path.iterdir()))), template)), **options
    )


# -- prompts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen", "hermes", "llama", "mistral"])
def test_tools_of_a_call_take_the_place_of_the_formats_own(name: str, make: Make) -> None:
    own, other = make(TEMPLATES[name], tools=(ADD,)), make(TEMPLATES[name], tools=(LOOK,))

    assert own.prompt([QUESTION], tools=[LOOK]) == other.prompt([QUESTION]) != own.prompt([QUESTION])
    assert own.prompt([QUESTION], tools=()) == make(TEMPLATES[name]).prompt([QUESTION])


def test_tools_of_a_call_are_schemas(make: Make) -> None:
    chat = make(CHATML)

    for tools in (ADD, "add", ["add"]):
        with pytest.raises(InvalidConfig, match=r"^tools: expected a sequence of JSON schemas"):
            chat.prompt([QUESTION], tools=tools)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", TEMPLATES)
def test_arguments_of_calls_are_given_as_the_template_writes_them(name: str, make: Make) -> None:
    chat = make(TEMPLATES[name])
    as_json = [QUESTION, called(call("add", 1)), result(1)]
    as_objects = [QUESTION, called(call("add", 1, as_json=False)), result(1)]

    prompt = chat.prompt(as_json)

    assert prompt == chat.prompt(as_objects)
    assert '\\\\"' not in chat.tokenizer.decode(prompt)


def test_arguments_that_are_no_json_stay_as_they_are(make: Make) -> None:
    broken = {"id": "call00001", "function": {"name": "add", "arguments": '{"left": '}}

    text = make(TEMPLATES["qwen"])
    prompt = text.prompt([QUESTION, called(broken), result(1)])

    assert json.dumps('{"left": ') in text.tokenizer.decode(prompt)


def test_a_result_without_a_name_gets_that_of_the_call_with_its_id(make: Make) -> None:
    chat = make(TEMPLATES["hermes"])
    messages = [QUESTION, called(call("add", 1), call("look", 2)), result(2), result(1)]

    text = chat.tokenizer.decode(chat.prompt(messages))

    assert text.index('{"name": "look", "content": "4"}') < text.index('{"name": "add", "content": "4"}')


# -- calls -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_that_a_template_writes_are_read_back_in_its_format(name: str, make: Make) -> None:
    chat = make(TEMPLATES[name])
    calls = [call("add", 1)] if name == "llama" else [call("add", 1), call("look", 2)]
    before, text = (chat.tokenizer.decode(chat.prompt(m)) for m in ([QUESTION], [QUESTION, called(*calls), result(1)]))

    assert chat.tool_call_format == FORMATS[name]
    assert text.startswith(before)
    turn = text[len(before) :].split(chat.tokenizer.decode([chat.tokenizer.eos_id]))[0]
    assert parse_turn(turn, FORMATS[name], tools=[ADD, LOOK]).calls == tuple(
        ToolCall(name=each["function"]["name"], arguments=json.loads(each["function"]["arguments"])) for each in calls
    )


def test_a_template_that_writes_no_calls_has_no_format(make: Make) -> None:
    assert make(CHATML).tool_call_format is None


# -- conversations that go on ------------------------------------------------------------------------------------------


COUNTING = CHATML.replace("message['role'] +", "message['role'] + loop.index | string +")
"""Its text after a turn depends on all before it."""

AFTER_CALLS = JSON_CALLS.replace(
    "<|im_start|>' + message.role",
    "<|im_start|>' + ('results' if loop.index0 and messages[loop.index0 - 1].tool_calls else message.role)",
)
"""Its text after a turn depends on whether that calls."""

EVERY_TEMPLATE = {**TEMPLATES, "counting": COUNTING, "after calls": AFTER_CALLS}


@pytest.mark.parametrize("tools", [[], [ADD, LOOK]], ids=["no tools", "tools"])
@pytest.mark.parametrize("name", EVERY_TEMPLATE)
def test_a_conversation_that_goes_on_has_the_tokens_of_its_prompt(name: str, tools: Any, make: Make) -> None:
    chat = make(EVERY_TEMPLATE[name])
    end = chat.tokenizer.eos_id
    refused = {("llama", "results")}  # one call in a turn

    for number, (said, new) in enumerate(conversation for _ in range(2) for conversation in GOING_ON.values()):
        if (name, list(GOING_ON)[number % len(GOING_ON)]) in refused:
            continue
        whole = chat.prompt([*said, *new], tools=tools)

        between = chat.extend(said, new, sampled=[5, end], tools=tools)

        assert between
        assert whole[-len(between) :] == between
        assert whole[-len(between) - 1] == end
        assert chat.extend(said, new, sampled=[5], tools=tools) == [end, *between]


def test_earlier_messages_are_rendered_once_for_all_turns_of_one_shape(make: Make) -> None:
    class Watched(dict[str, Any]):
        read = 0

        def items(self) -> Any:
            Watched.read += 1
            return super().items()

    chat = make(TEMPLATES["qwen"], observation_role="tool")
    said = [QUESTION, Watched(CALLED), result(1), CALLED]
    first = chat.extend(said, [result(1)], tools=[ADD])
    once = Watched.read

    for _ in range(3):
        said += [result(1), CALLED]
        assert chat.extend(said, [result(1)], tools=[ADD]) == first

    assert Watched.read == once > 0


def test_shapes_of_conversations_are_remembered_within_a_bound(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_format, "KNOWN_SHAPES", 4)
    chat = make(TEMPLATES["qwen"], history="template")

    for _, count in itertools.product(range(2), range(1, 12)):
        said, new = [QUESTION, ANSWER], [AGAIN] * count
        whole, between = chat.prompt([*said, *new]), chat.extend(said, new)
        assert between
        assert whole[-len(between) :] == between

    assert max(len(known) for known in (chat._beginnings, chat._changes)) <= 4


def thinking(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": "<think>\nso\n</think>\n\n" + message["content"]}


@pytest.mark.parametrize(
    ("said", "new", "goes_on"),
    [
        ([QUESTION, ANSWER], AGAIN, True),
        ([QUESTION, thinking(ANSWER)], AGAIN, False),
        ([QUESTION, {**ANSWER, "reasoning_content": "so"}], AGAIN, False),
        ([QUESTION, thinking(CALLED)], result(1), True),
        ([QUESTION, thinking(CALLED), result(1), ANSWER], AGAIN, False),
        ([QUESTION, thinking(ANSWER), AGAIN, ANSWER], AGAIN, True),
    ],
    ids=["no thoughts", "thoughts", "thoughts apart", "before a result", "earlier in the loop", "removed before"],
)
def test_a_conversation_goes_on_as_the_template_writes_it_unless_that_removes_its_thoughts(
    said: list[dict[str, Any]], new: dict[str, Any], goes_on: Any, make: Make
) -> None:
    assert (make(TEMPLATES["qwen"], history="template").extend(said, [new]) is not None) is goes_on
    assert make(TEMPLATES["qwen"]).extend(said, [new])


@pytest.mark.parametrize(
    ("template", "said", "new"),
    [
        (THINKING_AHEAD, [QUESTION, ANSWER], [AGAIN]),
        (MISTRAL_CALLS, [QUESTION, ANSWER], [AGAIN]),
        (HERMES, [QUESTION, called(call("add", 1), content="I add")], [result(1)]),
    ],
    ids=["begins thoughts in the prompt", "moves its tools", "removes text beside calls"],
)
def test_a_template_that_writes_earlier_turns_in_another_way_begins_anew(
    template: str, said: Any, new: Any, make: Make
) -> None:
    assert make(template, history="template").extend(said, new, tools=[ADD]) is None
    assert make(template).extend(said, new, tools=[ADD])


def test_a_template_that_cannot_continue_begins_anew(make: Make) -> None:
    strict = make(TEMPLATES["qwen"], strict=True)

    for history in ("keep", "template"):
        unfinished = make(CHATML.replace("<|im_end|>", "<end>"), history=history)
        assert unfinished.extend([QUESTION, ANSWER], [AGAIN]) is None
        assert make(NO_TOOLS, history=history).extend([QUESTION, CALLED], [result(1)]) is None
    assert strict.extend([QUESTION, ANSWER], [AGAIN]) is None
