import gc
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock._schemas.buffer_pool import SPARE_BUFFERS, BufferPool
from penstock._schemas.layout import DTYPES
from penstock.records import Packer
from penstock.testing import group


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_is_used_again_when_the_last_view_has_died() -> None:
    memory = BufferPool()
    block = memory.block(1024).array
    first, view = address(block), block[10:20].view(np.int16)
    del block
    gc.collect()

    meanwhile = memory.block(1024).array
    del view
    after = memory.block(1024).array

    assert address(meanwhile) != first
    assert address(after) == first


def test_values_written_item_by_item_are_in_the_array() -> None:
    block = BufferPool().block(100)
    for dtype, view in zip(DTYPES, block.typed, strict=True):
        view[3:5] = np.array([1, 0], dtype)
        assert block.array.view(dtype)[3:5].tolist() == [1, 0]


def test_a_block_that_is_too_small_is_let_go() -> None:
    memory = BufferPool()
    for few, more in ((10, 1 << 20), (64, 65)):
        del_me = memory.block(few)
        del del_me
        assert memory.block(more).array.nbytes >= more


def test_a_last_view_may_die_in_any_thread() -> None:
    memory = BufferPool()
    held = [memory.block(64)]
    first = address(held[0].array)
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert address(memory.block(64).array) == first


def test_no_more_than_a_few_blocks_are_kept() -> None:
    memory = BufferPool()
    blocks = [memory.block(64) for _ in range(10)]
    del blocks
    assert len(memory._spare) == SPARE_BUFFERS


def test_a_batch_that_is_held_is_never_written_again() -> None:
    packer, held = Packer(64), []
    for number in range(8):
        packer.add(group(completion_lengths=[20], instance_id=str(number), seed=number))
        held.append(packer.pack())
        if number % 3 == 2:
            del held[0]
    for batch in held:
        number = int(batch.groups[0].instance_id)
        assert batch.tokens.tolist() == group(completion_lengths=[20], seed=number).tokens.tolist()


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "a slice": lambda column: column[3:],
    "a slice of a slice": lambda column: column[1:][2:],
    "a view of another dtype": lambda column: column.view(np.uint8)[12:].view(np.int32),
    "another shape": lambda column: column[3:].reshape(1, -1)[0],
    "strides": lambda column: np.lib.stride_tricks.as_strided(column)[3:],
    "a subclass": lambda column: column.view(np.recarray)[3:],
    "a buffer": lambda column: memoryview(column)[3:],
    "a buffer for pickle": lambda column: pickle.PickleBuffer(column).raw().cast("i")[3:],
    "what DLPack hands over": lambda column: np.from_dlpack(column)[3:],
}


@pytest.mark.parametrize("hold", HOLDERS)
def test_a_reader_of_a_batch_holds_its_buffer(hold: str) -> None:
    packer = Packer(64)

    def packed(number: int) -> np.ndarray:
        packer.add(group(completion_lengths=[20], instance_id=str(number), seed=number))
        return packer.pack().tokens

    expected = packed(0)[3:].tolist()
    held = HOLDERS[hold](packed(0))
    gc.collect()

    for number in range(1, 6):
        packed(number)
    assert held.tolist() == expected
