"""`MathVerify`: rewards a completion whose final answer equals the answer in the data, compared by math-verify.

The comparison runs in a process of its own: its time limits need the main thread, and a formula can keep an interpreter
busy without end. A process that hangs or dies is replaced.
"""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..._pipeline.errors import InvalidData, MissingColumn
from ..._pipeline.util.extras import extra
from ..._pipeline.workers.call_process import Callee, CallProcesses
from ..._schemas.config import nearest
from ..._schemas.conversion import decode_json
from . import math_process
from .math_process import TextVerdict
from .reward_functions import RewardComponent
from .reward_input import RewardInput

CALLEE = Callee(math_process.__name__, "math-verify", "math_verify")


@dataclass(frozen=True, slots=True)
class MathVerify(RewardComponent):
    r"""1 for a completion whose final answer equals the answer in the data, 0 for any other. Needs the extra `math`.

    Both may be numbers or LaTeX: `0.5` equals `$\frac{1}{2}$`. The last answer of the completion counts, and one in
    `\boxed{}` before any other. The answer in the data may be a formula with or without dollar signs, a number within a
    sentence or after `####`, words, or a list of right answers. If it is empty, the reward stays as it is.

    >>> MathVerify("solution", weight=2.0).name
    'math_verify'

    Args:
        answer: the column with the right answer.
        concurrency: bound on processes, with one comparison at a time each.
    """

    answer: str = "answer"
    concurrency: int = field(default=1, kw_only=True)

    def default_name(self) -> str:
        """Return "math_verify"."""
        return "math_verify"

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[Callable[[RewardInput], Awaitable[float | None]]]:
        """Start the first process.

        Raises:
            MissingExtra: math-verify is not installed.
        """
        with extra("math", "MathVerify"):
            if importlib.util.find_spec("math_verify") is None:
                raise ModuleNotFoundError(name="math_verify")
        processes = CallProcesses(CALLEE)
        try:
            async with processes.borrowed():
                pass
            yield partial(self._verdict, processes)
        finally:
            await processes.close()

    async def _verdict(self, processes: CallProcesses, completion: RewardInput) -> float | None:
        row = completion.row
        if self.answer not in row:
            raise MissingColumn(
                f"{self.name}: expected the data to have a column {self.answer!r}, got rows with {sorted(row)}"
                f"{nearest(self.answer, row)}. Name the column: MathVerify(answer=…)"
            )
        answers = _answers(self.answer, row[self.answer])
        async with processes.borrowed() as process:
            received = await process.ask(answers, completion.text)
        reply = decode_json(received, TextVerdict)
        if reply.error:
            raise ValueError(reply.error)
        return None if reply.correct is None else float(reply.correct)


def _answers(column: str, value: Any) -> tuple[str, ...]:
    """Return the right answers of a row as text; empty if there is no content.

    Raises:
        InvalidData: they are neither text nor numbers.
    """
    each = value if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    if not all(answer is None or isinstance(answer, str | int | float) for answer in each):
        raise InvalidData(f"{column}: expected an answer that is text or a number, or a list of these, got {value!r}")
    return tuple("" if answer is None else str(answer) for answer in each)
