"""The chat templates that TRL ships: several turns by each, in both roles. `make test-trl` runs this file."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import transformers
from structlog.testing import capture_logs
from tests.models_hf.agent_conversations import ADD, CALLED, GOING_ON, LOOK, result
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from penstock.chat import ChatFormat, parse_turn
from penstock.errors import InvalidData, UnstableTemplate
from penstock.policies import PretrainedTokenizer

TEMPLATES = sorted(
    (each.name.removesuffix(".jinja"), each.read_text())
    for each in files("trl").joinpath("chat_templates").iterdir()
    if each.name.endswith(".jinja")
)

SPECIAL = re.compile(r"<\|?[A-Za-z_ ]+\|?>|<[|｜][^<>]*[|｜]>|</s>|\[/?INST\]")

ENDS = {
    "cohere": ["<|END_OF_TURN_TOKEN|>"],
    "deepseek": ["<｜end▁of▁sentence｜>"],
    "diffusion_gemma": ["<turn|>", "<|tool_response>"],
    "gemma4": ["<turn|>", "<|tool_response>"],
    "gemma": ["<end_of_turn>"],
    "glm4": ["<|user|>", "<|observation|>"],
    "gptoss": ["<|return|>", "<|call|>"],
    "idefics3": ["<end_of_utterance>"],
    "llama3": ["<|eot_id|>"],
    "llava": ["</s>"],
    "muse": ["<|eot|>"],
    "phi3": ["<|end|>"],
    "smolvlm": ["<end_of_utterance>"],
}
"""The tokens that end a completion, by the beginning of a template's name; `<|im_end|>` with all others."""

QUESTION = {"role": "user", "content": "2 + 2?"}

WITHOUT_TOOLS = ("cohere", "gemma", "llava", "phi")
"""Beginnings of the names of templates that have no messages of tools."""

OBSERVED = "no, look again"


def tokenizer_of(name: str, template: str, folder: Path) -> PretrainedTokenizer:
    """Write a tokenizer of bytes with the special tokens that the template names."""
    ends = next((ends for begin, ends in ENDS.items() if name.startswith(begin)), ["<|im_end|>"])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(sorted({*SPECIAL.findall(template), *ends, "<s>"}))
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": ends[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(map(tokenizer.token_to_id, ends))}))
    (folder / "chat_template.jinja").write_text(template)
    return PretrainedTokenizer(folder)


def conversations(role: str) -> list[list[dict[str, Any]]]:
    """Return a conversation of two turns, and those in which its second one calls a tool."""
    observed: dict[str, Any] = {"role": role, "content": OBSERVED, "name": "tool", "tool_call_id": "call00000"}
    turn: dict[str, Any] = {"role": "assistant", "content": "an answer"}
    forms: list[dict[str, Any]] = [{}]
    if role == "tool":
        arguments: list[Any] = [{}, "{}"]
        forms += [{"tool_calls": [call(each)]} for each in arguments]
        forms += [{"content": "", "tool_calls": [call({})]}]
    return [[QUESTION, turn | form, observed, turn | form, observed] for form in forms]


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "call00000", "type": "function", "function": {"name": "tool", "arguments": arguments}}


def by_transformers(folder: Path, messages: list[dict[str, Any]], *, parts: bool) -> list[int]:
    """Return the tokens of transformers; none where its template refuses the messages, or leaves the last one out."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    if parts:
        messages = [each | {"content": [{"type": "text", "text": each["content"]}]} for each in messages]
    try:
        ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    except Exception:  # noqa: BLE001 (a template refuses in any way)
        return []
    return ids if OBSERVED in tokenizer.decode(ids[-200:]) else []


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize(("name", "template"), TEMPLATES, ids=[name for name, _ in TEMPLATES])
def test_a_template_gives_the_tokens_of_transformers_between_turns_unless_it_has_no_such_role(
    name: str, template: str, role: Any, tmp_path: Path
) -> None:
    chat = ChatFormat(tokenizer_of(name, template, tmp_path), observation_role=role)
    expected = [
        ids
        for said in conversations(role)
        for parts in (False, True)
        if (ids := by_transformers(tmp_path, said, parts=parts))
    ]
    first, turn, seen, _, new = conversations(role)[0]

    with capture_logs() as logs:
        between = chat.extend([first, turn, seen, turn], [new])
    if between is None:
        assert expected == []
        return

    assert any(ids[-len(between) :] == between for ids in expected)
    assert OBSERVED in chat.tokenizer.decode(between)
    assert len([event for event in logs if event["event"] == "earlier_turns_change"]) <= 1


def test_most_templates_take_both_roles(tmp_path: Path) -> None:
    refused = []
    for name, template in TEMPLATES:
        (folder := tmp_path / name).mkdir()
        tokenizer = tokenizer_of(name, template, folder)
        for role in ("user", "tool"):
            with capture_logs():
                try:
                    ChatFormat(tokenizer, observation_role=role).check_turns()
                except UnstableTemplate:
                    refused.append((name, role))

    assert {role for _, role in refused} == {"tool"}
    assert {name.split("_")[0].rstrip("23") for name, _ in refused} == set(WITHOUT_TOOLS)


@pytest.mark.parametrize(("name", "template"), TEMPLATES, ids=[name for name, _ in TEMPLATES])
def test_a_recorded_conversation_goes_on_with_the_tokens_of_its_prompt(
    name: str, template: str, tmp_path: Path
) -> None:
    chat = ChatFormat(tokenizer_of(name, template, tmp_path))

    with capture_logs():
        for tools, (said, new), _ in product(([], [ADD, LOOK]), GOING_ON.values(), range(2)):
            try:
                whole = chat.prompt([*said, *new], tools=tools)
            except InvalidData:
                continue
            between = chat.extend(said, new, tools=tools)
            assert between is None or whole[-len(between) :] == between
            assert between or (new[0]["role"] == "tool" and name.startswith(WITHOUT_TOOLS))


def test_calls_are_read_back_from_the_text_of_the_templates_of_their_formats(tmp_path: Path) -> None:
    formats: dict[str | None, set[str]] = {}
    for name, template in TEMPLATES:
        (folder := tmp_path / name).mkdir()
        chat = ChatFormat(tokenizer_of(name, template, folder))
        found = chat.tool_call_format
        formats.setdefault(found, set()).add(name.removesuffix("_training"))
        if found is not None:
            text = chat.tokenizer.decode(chat.prompt([QUESTION, CALLED, result(1)]))
            said = text.removeprefix(chat.tokenizer.decode(chat.prompt([QUESTION])))
            assert [call.name for call in parse_turn(said, found, tools=[ADD]).calls] == ["add"]

    assert formats["llama"] == {"llama3_1", "llama3_2"}
    assert formats["hermes"] == {"qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl"}
