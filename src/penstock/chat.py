"""Messages to tokens by the chat template of a tokenizer, and calls of tools in the text of a turn."""

from __future__ import annotations

from ._stages.tokenizers.chat_format import ChatFormat
from ._stages.tokenizers.tool_calls import (
    TOOL_CALL_PARSERS,
    CallBlock,
    ParsedTurn,
    ToolCall,
    ToolCallParser,
    parse_turn,
)

__all__ = ["TOOL_CALL_PARSERS", "CallBlock", "ChatFormat", "ParsedTurn", "ToolCall", "ToolCallParser", "parse_turn"]
