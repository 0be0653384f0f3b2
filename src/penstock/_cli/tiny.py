"""The model of 76,000 parameters and the task of `penstock init --tiny`: to try a run without a download.

The model has random weights, and a token for each letter. Its task is to answer a word with the last letter of it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from .._pipeline.util.atomic_file import write_atomically
from .._stages.models.transformers_import import quiet_transformers

END, QUESTION, UNKNOWN = "#", ":", "?"
LETTERS = "abcdefghijklmnopqrstuvwxyz"

TEMPLATE = (
    "{% for message in messages %}{{ message.content }}" + END + "{% endfor %}"
    "{% if add_generation_prompt %}" + QUESTION + "{% endif %}"
)

WORDS, LONGEST = 600, 4


def write_words(path: Path) -> None:
    """Write rows with a word and the last letter of it."""
    numbers = random.Random(0)  # noqa: S311 (no secret)
    words = ["".join(numbers.choices(LETTERS, k=numbers.randint(2, LONGEST))) for _ in range(WORDS)]
    rows = [{"word": word, "answer": word[-1]} for word in words]
    write_atomically(path, "".join(f"{json.dumps(row)}\n" for row in rows).encode())


def write_model(folder: Path) -> None:
    """Write a Qwen2 with random weights, and its tokenizer. Blocks.

    Raises:
        MissingExtra: the extra `train` is not installed.
    """
    with quiet_transformers("penstock init --tiny") as transformers:
        import torch  # noqa: PLC0415 (as transformers: not needed for --help)

        tokenizer = _tokenizer(transformers)
        tokenizer.save_pretrained(folder)
        torch.manual_seed(0)
        config = transformers.Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            initializer_range=0.1,  # with the usual 0.02 so small a model begins to learn later
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=0,
        )
        transformers.Qwen2ForCausalLM(config).save_pretrained(folder)


def _tokenizer(transformers: Any) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415 (as above)

    vocabulary = {letter: number for number, letter in enumerate(END + LETTERS + QUESTION + UNKNOWN)}
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    letters.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=letters, eos_token=END, pad_token=END, chat_template=TEMPLATE
    )
