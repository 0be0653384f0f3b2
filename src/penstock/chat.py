"""Messages to tokens by the chat template of a tokenizer."""

from __future__ import annotations

from ._stages.tokenizers.chat_format import ChatFormat

__all__ = ["ChatFormat"]
