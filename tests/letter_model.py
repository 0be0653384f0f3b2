"""A tiny Qwen2 whose tokens are letters: what the trainers of other frameworks train in the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def write_letter_model(folder: Path, letters: str, *, template: str = "", width: int = 32, layers: int = 2) -> Path:
    """Write a model with random weights and a tokenizer of `letters` into `folder`; return it.

    The first letter ends the text, the last one is the unknown one.
    """
    import torch  # noqa: PLC0415 (a worker does not need it at once)
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM  # noqa: PLC0415

    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=letters[-1]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    make: Any = PreTrainedTokenizerFast
    fast = make(tokenizer_object=tokenizer, eos_token=letters[0], pad_token=letters[0])
    if template:
        fast.chat_template = template
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(letters),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=0,
        pad_token_id=0,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder
