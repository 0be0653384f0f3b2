"""Calls of tools in the text of a turn, by format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from time import process_time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.chat import TOOL_CALL_PARSERS, CallBlock, ToolCall, parse_turn

ADD = {"name": "add", "arguments": {"left": 2, "text": "</tool_call> ; ``` [TOOL_CALLS] {"}}
SUB = {"name": "sub", "arguments": {}}
TEXT, OTHER = json.dumps(ADD), json.dumps(SUB)
LLAMA = TEXT.replace("arguments", "parameters")

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]

FORMS = {
    "hermes": [f"<tool_call>\n{TEXT}\n</tool_call>\n<tool_call>{OTHER}</tool_call>"],
    "llama": [f"{LLAMA}; {OTHER}", f"<|python_tag|>{LLAMA};{OTHER}<|eom_id|>".removesuffix("<|eom_id|>")],
    "mistral": [
        f"[TOOL_CALLS] [{TEXT}, {OTHER}]",
        f"[TOOL_CALLS]add[ARGS]{json.dumps(ADD['arguments'])}[TOOL_CALLS]sub[ARGS]{{}}",
        f"[TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{json.dumps(ADD['arguments'])}[TOOL_CALLS]sub{{}}",
    ],
    "json": [f"[{TEXT}, {OTHER}]", f"\n```json\n{TEXT}\n```\n```json\n{OTHER}\n```\n"],
}

EVERY_FORM = [(name, text) for name, texts in FORMS.items() for text in texts]


@pytest.mark.parametrize(("parser", "text"), EVERY_FORM)
def test_calls_are_read_in_order_from_the_text_of_their_format(parser: str, text: str) -> None:
    turn = parse_turn(text, parser)

    assert turn.calls == (ToolCall(**ADD), ToolCall(**SUB))  # type: ignore[arg-type]
    assert (turn.content, turn.reasoning, turn.malformed) == ("", None, 0)


LETTERS = 'abcdefghijklmnopqrstuvwxyz\\ä€😀 0123456789\n"'


@pytest.mark.parametrize("size", [1000, 1010, 1017, 1024, 2050, 100_000])
def test_arguments_of_any_length_are_read(size: int) -> None:
    padding = "x" * size
    for cut in range(40):
        arguments = {"pad": padding[cut:], "text": LETTERS, "values": [True, None, -1.5e-7]}
        text = f"<tool_call>{json.dumps({'name': 'add', 'arguments': arguments})}</tool_call>"

        assert parse_turn(text, "hermes").calls == (ToolCall(name="add", arguments=arguments),)


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", f"I look\n<tool_call>\n{TEXT}\n</tool_call>"),
        ("llama", f"I look<|python_tag|>{LLAMA}"),
        ("mistral", f"I look[TOOL_CALLS][{TEXT}]"),
        ("json", f"I look\n```json\n{TEXT}\n```"),
    ],
)
def test_thoughts_and_the_text_around_calls_are_apart(parser: str, text: str) -> None:
    turn = parse_turn(f"<think>\n<tool_call>?\n</think>\n\n{text}", parser)

    assert (turn.reasoning, turn.content, turn.malformed) == ("\n<tool_call>?\n", "I look", 0)
    assert turn.calls == (ToolCall(**ADD),)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("so\n</think>\n\nyes", "so\n", "yes"),
        ("\n<think>\nso", "\nso", ""),
        (" a <think>so</think> b ", None, " a <think>so</think> b "),
    ],
    ids=["begun by the prompt", "cut", "not at the beginning"],
)
def test_thoughts_begin_a_turn(text: str, reasoning: str | None, content: str) -> None:
    turn = parse_turn(text, "hermes")

    assert (turn.reasoning, turn.content) == (reasoning, content)


MALFORMED = {
    "no JSON": '{"name": "add", "arguments": {',
    "no name": '{"names": ["name"], "arguments": {}}',
    "a name that is no text": '{"name": 3, "arguments": {}}',
    "no tool": '{"name": "rm", "arguments": {}}',
    "arguments that are text": '{"name": "add", "arguments": "{}"}',
    "no arguments": '{"name": "add"}',
    "a number that JSON has not": '{"name": "add", "arguments": {"left": NaN}}',
    "half a character": '{"name": "add", "arguments": {"left": "\\ud800"}}',
    "a number of too many digits": '{"name": "add", "arguments": {"left": ' + "1" * 5000 + "}}",
    "too deep": '{"name": "add", "arguments": {"left": ' + "[" * 100_000 + "}}",
}


@pytest.mark.parametrize("reason", MALFORMED)
@pytest.mark.parametrize(
    ("parser", "form"),
    [
        ("hermes", "<tool_call>{}</tool_call> "),
        ("llama", "{} "),
        ("mistral", "[TOOL_CALLS][{}] "),
        ("json", "{}"),
        ("json", "```json\n{}\n```"),
    ],
)
def test_a_malformed_call_stays_in_the_text_and_is_counted(parser: str, form: str, reason: str) -> None:
    text = form.replace("{}", MALFORMED[reason])

    turn = parse_turn(text, parser, tools=TOOLS)

    assert (turn.content, turn.calls, turn.malformed) == (text, (), 1)


def test_a_list_of_which_one_call_is_malformed_is_text_and_other_calls_are_read() -> None:
    mixed = f"[TOOL_CALLS][{TEXT}, {OTHER}]"

    turn = parse_turn(f"{mixed}[TOOL_CALLS][{TEXT}]", "mistral", tools=TOOLS)

    assert (turn.content, turn.malformed, len(turn.calls)) == (mixed, 1, 1)


@pytest.mark.parametrize("parser", ["llama", "json"])
@pytest.mark.parametrize("text", ['{"answer": 4}', "{x} is the set", '```json\n{"answer": 4}\n```', "[1]", ""])
def test_an_answer_in_json_is_no_malformed_call(parser: str, text: str) -> None:
    turn = parse_turn(text, parser)

    assert (turn.content, turn.calls, turn.malformed) == (text, (), 0)


def test_a_parser_of_ones_own_is_used_and_its_calls_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def commands(text: str) -> Iterator[CallBlock]:
        if text.startswith("/"):
            yield CallBlock(0, len(text), {"name": text[1:], "arguments": {}})

    monkeypatch.setitem(TOOL_CALL_PARSERS, "commands", commands)

    assert parse_turn("/add", commands, tools=TOOLS) == parse_turn("/add", "commands", tools=TOOLS)
    assert [call.name for call in parse_turn("/add", commands).calls] == ["add"]
    assert parse_turn("/rm", commands, tools=TOOLS).malformed == 1


PIECES = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *("```json", "```", TEXT, LLAMA, OTHER, ";", "{", "}", "[", "]", '"', ",", ":", '"name"', "\\", "1e999", " "),
]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=20), st.sampled_from(sorted(TOOL_CALL_PARSERS)))
def test_any_text_is_parsed_and_without_calls_and_thoughts_it_is_the_content(pieces: list[str], parser: str) -> None:
    text = "".join(pieces)

    turn = parse_turn(text, parser, tools=TOOLS)

    assert turn.malformed >= 0
    assert all(call.name == "add" for call in turn.calls)
    if turn.reasoning is None and not turn.calls:
        assert turn.content == text


UNITS = [
    *PIECES,
    '<tool_call>{"',
    "<tool_call>[",
    '{"name":',
    "[TOOL_CALLS]a[ARGS]{",
    '```json{"name":',
    '<tool_call>"',
]


@pytest.mark.parametrize("parser", sorted(TOOL_CALL_PARSERS))
def test_a_long_text_is_parsed_in_time_in_proportion_to_its_length(parser: str) -> None:
    def seconds(unit: Any) -> float:
        text = unit * (200_000 // len(unit))
        begun = process_time()
        parse_turn(text, parser)
        return process_time() - begun

    assert max(map(seconds, UNITS)) < 2
