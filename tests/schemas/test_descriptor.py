import numpy as np
import pytest

from penstock.errors import InvalidRecord
from penstock.schemas.columns import Array, ColumnSpec
from penstock.schemas.descriptor import DTYPES, aligned, read_contents, view_columns, write_contents


def laid_out(columns: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate(
        [np.frombuffer(c.tobytes().ljust(aligned(c.nbytes), b"\0"), np.uint8) for c in columns.values()]
    )


@pytest.mark.parametrize("code", DTYPES)
def test_every_dtype_comes_out_bit_for_bit(code: str) -> None:
    column = np.frombuffer(np.random.default_rng(0).bytes(24 * 8), DTYPES[code]).reshape(2, -1)
    if code == "|b1":
        column = np.arange(24).reshape(2, 12) % 3 == 0

    contents = read_contents(write_contents("group", {"x": column}, b"h"))
    seen = view_columns(contents.columns, laid_out({"x": column}), 0)["x"]

    assert (seen.dtype, seen.shape, seen.tobytes()) == (column.dtype, column.shape, column.tobytes())


def test_columns_lie_one_behind_the_other_on_cache_lines() -> None:
    columns: dict[str, Array] = {
        "a": np.arange(3, dtype=np.int8),
        "b": np.zeros((0, 4), np.int32),
        "c": np.arange(40.0),
    }
    contents = read_contents(write_contents("group", columns, b""))

    seen = view_columns(contents.columns, laid_out(columns), 0)

    assert {name: column.tolist() for name, column in seen.items()} == {n: c.tolist() for n, c in columns.items()}
    assert contents.kind == "group"


@pytest.mark.parametrize("column", [np.array([object()]), np.array(["a"]), np.array([1 + 2j]), np.zeros(1, "i4,f4")])
def test_what_is_not_plain_numbers_is_not_carried(column: np.ndarray) -> None:
    with pytest.raises(InvalidRecord, match="expected dtypes among"):
        write_contents("group", {"x": column}, b"")


@pytest.mark.parametrize("code", ["O", "|O", "V8", "<U3", "i4,i4", "<M8[s]", "nonsense", ""])
def test_a_dtype_that_a_peer_may_not_name_is_refused(code: str) -> None:
    with pytest.raises(InvalidRecord, match="x: expected a dtype among"):
        view_columns([ColumnSpec("x", code, (1,))], np.zeros(64, np.uint8), 0)


@pytest.mark.parametrize("shape", [(17,), (2**62,), (2**62, 2**62), (-1,), (4, -4)])
def test_a_column_beyond_its_record_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRecord, match="within 64 bytes from byte 0"):
        view_columns([ColumnSpec("x", "<i4", shape)], np.zeros(64, np.uint8), 0)


@pytest.mark.parametrize("junk", [b"", b"\x00", b"\xc1" * 40, b"\x93\xa1a\x90", b"\x93\x01\x90\xc4\x00"])
def test_bytes_that_are_no_contents_are_refused(junk: bytes) -> None:
    with pytest.raises(InvalidRecord, match="contents: expected"):
        read_contents(junk)
