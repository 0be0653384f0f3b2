"""Make a small model and the data for gsm8k.yaml: `python prepare.py FOLDER`.

The data are sums under the name that Atropos' GSM8k environment loads, so that no hub is asked. The model has learned
to answer in the form that the environment asks for: some of the time, with long or short thoughts, and with a right sum
in every other answer. It is left to learn which of its answers are good.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

END = "<|im_end|>"
SPECIAL = ["<|endoftext|>", "<|im_start|>", END]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SYSTEM = (
    "You are a deep thinking AI, you may use extremely long chains of thought to deeply consider the problem and "
    "deliberate with yourself via systematic reasoning processes to help come to a correct solution prior to "
    "answering. You should enclose your thoughts and internal monologue inside <think> </think> tags, and then provide "
    "your solution or response to the problem.\n\nYou are allocated a maximum of 2048 tokens, please strive to use "
    "less.\n\n"
    "You will then provide your answer like this: \\boxed{your answer here}\nIt is important that you provide your "
    "answer in the correct format.\nIf you do not, you will not receive credit for your answer.\nSo please end your "
    "answer with \\boxed{your answer here}"
)
"""What Atropos' GSM8k environment says first, as a beginning of every prompt."""

STEPS = 300


def question(left: int, right: int) -> str:
    """Return a question with one number as its answer."""
    return f"Add {left} and {right}."


def answer(draw: random.Random, left: int, right: int) -> str:
    """Return an answer of the quality that the model begins with."""
    said = left + right if draw.random() < 1 / 2 else draw.randrange(9)
    thoughts = "I add. " * draw.randint(1, 4)
    begun = f"<think>{thoughts}</think>" if draw.random() < 2 / 3 else thoughts
    return f"{begun} The answer is \\boxed{{{said}}}"


def save_data(folder: Path) -> None:
    """Save sums as rows of gsm8k."""
    folder.mkdir(parents=True)
    card = ["---", "configs:", "- config_name: main", "  data_files:"]
    for split in ("train", "test"):
        rows = [
            json.dumps({"question": question(left, right), "answer": f"They add up.\n#### {left + right}"})
            for left in range(5)
            for right in range(5)
        ]
        (folder / f"{split}.jsonl").write_text("\n".join(rows))
        card += [f"  - split: {split}", f"    path: {split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*card, "---", ""]))


def save_tokenizer(folder: Path) -> Any:
    """Save a tokenizer of bytes, to which an instruction and a question are a token each; return it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        min_frequency=1,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    asked = [question(left, right) for left in range(5) for right in range(5)]
    tokenizer.train_from_iterator(["system\n" + SYSTEM, *("user\n" + each for each in asked), "assistant\n"], trainer)
    make: Any = PreTrainedTokenizerFast
    made = make(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=SPECIAL[0],
        additional_special_tokens=[SPECIAL[1]],
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)
    # transformers 5 writes a class and a list that the older one of Atropos cannot read; both read this.
    settings = folder / "tokenizer_config.json"
    known = json.loads(settings.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    known.pop("extra_special_tokens", None)
    settings.write_text(json.dumps(known))
    return AutoTokenizer.from_pretrained(folder)


def example(tokenizer: Any, draw: random.Random) -> tuple[list[int], list[int]]:
    """Return the tokens of a prompt, and of an answer to it."""
    left, right = draw.randrange(5), draw.randrange(5)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question(left, right)}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(prompt), tokenizer.encode(answer(draw, left, right) + END)


def train(model: Any, tokenizer: Any) -> None:
    """Teach `model` to answer as `answer` does."""
    torch.set_num_threads(1)
    draw = random.Random(0)  # noqa: S311 (no secret)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=STEPS)
    for step in range(STEPS):
        rows = [example(tokenizer, draw) for _ in range(32)]
        length = max(len(prompt) + len(said) for prompt, said in rows)
        ids = torch.full((len(rows), length), tokenizer.pad_token_id)
        labels = torch.full((len(rows), length), -100)
        for row, (prompt, said) in enumerate(rows):
            ids[row, : len(prompt) + len(said)] = torch.tensor(prompt + said)
            labels[row, len(prompt) : len(prompt) + len(said)] = torch.tensor(said)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


def main(folder: Path) -> None:
    """Make `folder`/model and `folder`/gsm8k."""
    save_data(folder / "gsm8k")
    tokenizer = save_tokenizer(folder / "model")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        tie_word_embeddings=True,
        initializer_range=0.1,  # with 0.02 the answers of a model as small as this do not depend on the question
    )
    model = Qwen2ForCausalLM(config)
    train(model, tokenizer)
    model.save_pretrained(folder / "model")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
