"""Data frames are rows: what they lack is None, as in a file."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from penstock.data import PromptDataset
from penstock.errors import InvalidData

pd: Any = pytest.importorskip("pandas")

ROWS: list[dict[str, Any]] = [{"prompt": f"{n}+1=", "answer": n + 1, "parts": [n, 1]} for n in range(10)]


class Stream:
    """A data frame of another library, which has Arrow's interface for C."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._table = pa.Table.from_pylist(rows)

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)


@pytest.mark.parametrize("make", [pd.DataFrame, pa.Table.from_pylist, Stream])
def test_a_frame_gives_its_rows(make: Callable[..., Any]) -> None:
    prompts = PromptDataset(make(ROWS), shuffle=False)()

    assert [prompts.row(n) for n in range(len(prompts))] == ROWS


def test_a_frame_gives_its_rows_whatever_their_index_is() -> None:
    frame = pd.DataFrame(ROWS)

    dataset = pickle.loads(pickle.dumps(PromptDataset(frame[frame["answer"] > 5], shuffle=False)))  # noqa: S301

    assert [dataset().row(n) for n in range(5)] == ROWS[5:]


def test_an_absent_value_of_a_frame_is_none() -> None:
    rows = [
        {"prompt": "a", "answer": None, "at": pd.NaT, "level": 1.0},
        {"prompt": "b", "answer": "x", "at": pd.Timestamp("2026-11-26"), "level": float("nan")},
    ]

    prompts = PromptDataset(pd.DataFrame(rows), shuffle=False)()

    assert prompts.row(0) == {"prompt": "a", "answer": None, "at": None, "level": 1.0}
    assert prompts.row(1) == {"prompt": "b", "answer": "x", "at": "2026-11-26T00:00:00", "level": None}


@pytest.mark.parametrize("frame", [pd.DataFrame({"prompt": ["a", 1]}), pd.Series(["a", "b"])])
def test_a_frame_that_arrow_cannot_hold_is_refused_with_what_to_do(frame: Any) -> None:
    with pytest.raises(InvalidData, match=r"expected columns of one type each, got .*give a list of rows"):
        PromptDataset(frame)()


def test_a_missing_column_of_a_frame_is_named() -> None:
    with pytest.raises(InvalidData, match="column 'question', which does not exist: set prompt to one of 'prompt'"):
        PromptDataset(pd.DataFrame(ROWS), prompt="question")()


@pytest.mark.parametrize("rows", [3000, 20_000])
def test_the_digest_of_a_frame_is_that_of_all_rows(rows: int) -> None:
    frame = pd.DataFrame({"prompt": [str(n) for n in range(rows)]})
    other = frame.copy()
    other.loc[rows // 2 + 1, "prompt"] = "?"

    first, second = PromptDataset(frame).identity(), PromptDataset(other).identity()

    assert first == PromptDataset(frame.copy()).identity()
    assert first["rows"] == second["rows"] == rows
    assert first["digest"] != second["digest"]
