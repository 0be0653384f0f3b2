"""The input of a reward function: one completion, with the columns of the prompt's row.

The columns come with the group, in `meta`: "row" is the row of the data set, "messages" the prompt of a conversation,
"prompt" a prompt of text. This is the only module that reads them.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from ..._schemas import Trajectory

Messages: TypeAlias = list[dict[str, Any]]
"""A conversation: `[{"role": "user", "content": …}, …]`."""


class RewardInput(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The argument of a reward function."""

    trajectory: Trajectory
    """The tokens, with all other columns; of a rollout with branches those of the last one."""
    score: float
    """The raw score, from the environment."""
    text: str
    """The text of the completion, with a line break between turns; empty if the function does not read text."""
    turns: tuple[str, ...] = ()
    """The text of each turn of the policy."""
    meta: dict[str, Any]
    """The `meta` of the group, for example the question."""

    @property
    def row(self) -> dict[str, Any]:
        """Return the columns of the prompt's row in the data set; empty if the prompt is from no data set."""
        row: dict[str, Any] = self.meta.get("row") or {}
        return row

    @property
    def prompt(self) -> str | Messages:
        """Return the prompt: its messages if it is a conversation, else its text; empty if the environment has none."""
        prompt: str | Messages = self.meta.get("messages") or self.meta.get("prompt") or ""
        return prompt

    @property
    def prompt_text(self) -> str:
        """Return the prompt as text: of a conversation of one message its content, of others a line for each."""
        if isinstance(self.prompt, str):
            return self.prompt
        if len(self.prompt) == 1:
            return str(self.prompt[0]["content"])
        return "\n".join(f"{message['role']}: {message['content']}" for message in self.prompt)

    @property
    def completion(self) -> str | Messages:
        """Return the completion in the form of the prompt: a message for each turn of the policy, or the text."""
        if isinstance(self.prompt, str):
            return self.text
        return [{"role": "assistant", "content": turn} for turn in self.turns or ("",)]
