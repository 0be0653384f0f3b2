"""`CallTree`: the calls of one rollout, and the sequences in which each of their tokens trains once.

Knows tokens only: no message, no engine, no clock.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..._schemas import StopReason
from ..contracts.policies import Call
from ..contracts.rollouts import Branch, Turn


@dataclass(frozen=True, slots=True, eq=False)
class _Recorded:
    """A call, with all tokens up to its end."""

    tokens: NDArray[np.int32]
    call: Call
    client: Hashable
    parent: _Recorded | None

    @property
    def prompt_tokens(self) -> int:
        return len(self.tokens) - len(self.call.tokens)


class CallTree:
    """The calls so far. One continues another of its client if its prompt begins with all tokens of that.

    Else it begins a branch.
    """

    def __init__(self) -> None:
        self._recorded: list[_Recorded] = []

    def __len__(self) -> int:
        return len(self._recorded)

    def add(self, prompt: NDArray[np.int32], call: Call, client: Hashable) -> None:
        """Record the completion of `prompt`, which a client asked for."""
        tokens = np.concatenate([prompt, call.tokens])
        self._recorded.append(_Recorded(tokens, call, client, self._continued(prompt, client)))

    @property
    def clients(self) -> dict[str, Hashable]:
        """Return the client of each recorded call, by the call's id."""
        return {each.call.id: each.client for each in self._recorded}

    def _continued(self, prompt: NDArray[np.int32], client: Hashable) -> _Recorded | None:
        """Return the recorded call that `prompt` continues, the longest one; of equal ones the last."""
        longest: _Recorded | None = None
        for each in reversed(self._recorded):
            length = len(each.tokens)
            if (
                each.client == client
                and length <= len(prompt)
                and (longest is None or length > len(longest.tokens))
                and each.tokens[-1] == prompt[length - 1]
                and np.array_equal(each.tokens, prompt[:length])
            ):
                longest = each
        return longest

    def branches(self) -> list[Branch]:
        """Return a sequence for each call that no other continues, in the order of these calls.

        A call that several sequences hold trains in the first of them; in the others its tokens are context.
        """
        parents = {id(each.parent) for each in self._recorded}
        trained: set[int] = set()
        branches = []
        for leaf in self._recorded:
            if id(leaf) not in parents:
                path = list(_path(leaf))[::-1]
                new = [each for each in path if id(each) not in trained and len(each.call.tokens)]
                trained |= {id(each) for each in new}
                if new:
                    branches.append(_branch(leaf, new))
        return branches


def _path(leaf: _Recorded) -> Iterator[_Recorded]:
    """Yield a call, and all that it continues, the first one last."""
    each: _Recorded | None = leaf
    while each is not None:
        yield each
        each = each.parent


def _branch(leaf: _Recorded, trained: list[_Recorded]) -> Branch:
    """Return the sequence up to the end of `leaf`, in which the calls of `trained` train."""
    turns: list[Turn] = []
    end = 0
    for each in trained:
        if each.prompt_tokens > end:
            turns.append(leaf.tokens[end : each.prompt_tokens])
        turns.append(each.call)
        end = len(each.tokens)
    reason = StopReason.LENGTH if leaf.call.stop_reason == StopReason.LENGTH else StopReason.STOP
    return Branch(turns=turns, stop_reason=reason)
