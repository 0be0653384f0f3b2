"""Tools of a call, the calls that templates write, and conversations that go on after recorded turns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.models_hf.chat_templates import CALLING, CHATML, tokenizer_folder

from penstock.chat import ChatFormat, ToolCall, parse_turn
from penstock.errors import InvalidConfig
from penstock.policies import PretrainedTokenizer

TEMPLATES = {name: template for templates in CALLING.values() for name, template in templates.items()}

FORMATS = {name: parser for parser, templates in CALLING.items() for name in templates}


def schema(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "one", "parameters": {"type": "object"}}}


ADD, LOOK = schema("add"), schema("look")

QUESTION = {"role": "user", "content": "a question?"}


def call(name: str, number: int, *, as_json: bool = True) -> dict[str, Any]:
    """Return a call as OpenAI's API sends it, or with an object as arguments."""
    arguments = {"left": number, "text": 'a "b" <é>'}
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False) if as_json else arguments}
    return {"id": f"call0000{number}", "type": "function", "function": function}


def called(*calls: dict[str, Any], content: str = "") -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def result(number: int, content: str = "4") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call0000{number}", "content": content}


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
