"""A folder in which environments of Atropos run without a network: a tokenizer, and data sets under the hub's names.

`load_dataset("gsm8k", "main")` takes a folder of that name before it asks the hub. Every problem is an addition, which
`scripted_model` can solve.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

__all__ = ["make_workspace", "save_tokenizer"]

PROBLEMS = 240
"""SingleToolCallingEnv sets 100 aside for its evaluation."""

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
<tools>{{ tools | tojson }}</tools><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% set content = message.content or '' %}
{%- if message.role == 'assistant' and '</think>' in content and not loop.last %}
{%- set content = content.split('</think>')[-1].lstrip() %}{% endif %}
{{- content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""ChatML with tools; as that of Qwen3 it strips the thoughts from all answers but the last."""


def make_workspace(folder: Path) -> Path:
    """Make the tokenizer `folder`/tokenizer, and the data sets."""
    save_tokenizer(folder / "tokenizer")
    save_dataset(folder / "gsm8k", "main", {"train": gsm8k, "test": gsm8k})
    save_dataset(folder / "NousResearch/XLAM-Atropos", "default", {"train": single_call})
    for name in ("toolace_hermes_sequential_tool_use", "hermes_reasoning_tool_use"):
        save_dataset(folder / "interstellarninja" / name, "default", {"train": two_calls})
    save_dataset(folder / "nvidia/AceReason-Math", "default", {"train": numeric})
    return folder


def save_tokenizer(folder: Path) -> None:
    """Save one whose tokens are bytes: it knows every text, and nothing is lost on the way back."""
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast
    saved = fast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",  # noqa: S106 (no password)
        pad_token="<|endoftext|>",  # noqa: S106
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    saved.chat_template = CHAT_TEMPLATE
    saved.save_pretrained(folder)


def save_dataset(folder: Path, config: str, splits: dict[str, Callable[[int, int], dict[str, Any]]]) -> None:
    """Save each split as lines of JSON, and the card that names them."""
    folder.mkdir(parents=True)
    card = ["---", "configs:", f"- config_name: {config}", "  data_files:"]
    for split, row in splits.items():
        rows = [json.dumps(row(number % 50, number // 50)) for number in range(PROBLEMS)]
        (folder / f"{split}.jsonl").write_text("\n".join(rows))
        card += [f"  - split: {split}", f"    path: {split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*card, "---", ""]))


def gsm8k(left: int, right: int) -> dict[str, Any]:
    return {"question": question(left, right), "answer": f"They add up.\n#### {left + right}"}


def numeric(left: int, right: int) -> dict[str, Any]:
    return {"problem": question(left, right), "answer": str(left + right)}


def single_call(left: int, right: int) -> dict[str, Any]:
    return conversation(TOOLS, ("human", question(left, right)), ("gpt", call(left, right)))


def two_calls(left: int, right: int) -> dict[str, Any]:
    """Return two turns of a user, each with a call, its result, and a summary."""
    turns = [*exchange(left, right), *exchange(right + 100, left)]
    return conversation(TOOLS, *turns)


def exchange(left: int, right: int) -> Sequence[tuple[str, str]]:
    return [
        ("human", question(left, right)),
        ("gpt", call(left, right)),
        ("tool", f"<tool_response>\n{left + right}\n</tool_response>"),
        ("gpt", "<think>\nThat is all.\n</think>\nDone."),
    ]


def question(left: int, right: int) -> str:
    return f"Add {left} and {right}."


def call(left: int, right: int) -> str:
    asked = json.dumps({"name": "add", "arguments": {"a": left, "b": right}})
    return f"<think>\nI add.\n</think>\n<tool_call>\n{asked}\n</tool_call>"


def conversation(*turns: Any) -> dict[str, Any]:
    return {
        "conversations": [{"from": said_by, "value": value} for said_by, value in (("system", turns[0]), *turns[1:])]
    }


TOOLS = 'You can call tools. <tools>[{"name": "add", "parameters": {"a": "integer", "b": "integer"}}]</tools>'
