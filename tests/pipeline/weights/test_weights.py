from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from penstock._pipeline.weights import weights as module
from penstock._pipeline.weights.tensor_layout import WritePlan
from penstock._pipeline.weights.weight_copies import CopiedModel, PrivateCopy
from penstock._pipeline.weights.weight_memory import HostMemory
from penstock._pipeline.weights.weight_specs import Tensor, TensorManifest, TensorSpec, check_weights, specs_of
from penstock._pipeline.weights.weights import NO_VERSION, WeightReader, WeightWriter
from penstock.errors import OutOfSharedMemory, ProtocolMismatch, StaleHandle, WeightsMismatch


def arrays(value: float = 1.0) -> dict[str, Tensor]:
    return {"weight": np.full((3, 5), value, np.float32), "bias": np.full(2, value, np.float64)}


@contextmanager
def opened(tensors: dict[str, Tensor]) -> Iterator[tuple[WeightWriter, WeightReader]]:
    writer = WeightWriter(plan(tensors))
    try:
        yield writer, WeightReader(writer.fd, writer.nbytes, writer.generation)
    finally:
        writer.close()


def plan(tensors: dict[str, Tensor]) -> WritePlan:
    return WritePlan(TensorManifest(specs_of(tensors)))


def read(reader: WeightReader, into: dict[str, Tensor]) -> int:
    model = CopiedModel(into, reader.layout.manifest, (), "weights")
    if (copy := PrivateCopy(reader, "weights").read()) is None:
        return NO_VERSION
    publication, version = copy
    model.load(version)
    return publication.version


def test_a_reader_gets_the_newest_version() -> None:
    target = arrays(0)

    with opened(arrays()) as (writer, reader):
        for version in (3, 4, 9):
            writer.write(arrays(version), version)
        assert (reader.latest, read(reader, target)) == (9, 9)

    assert all((np.asarray(tensor) == 9).all() for tensor in target.values())


def test_before_the_first_version_there_is_nothing_to_read() -> None:
    target = arrays(0)

    with opened(arrays()) as (_, reader):
        assert (reader.latest, read(reader, target)) == (NO_VERSION, NO_VERSION)

    assert (np.asarray(target["weight"]) == 0).all()


@pytest.mark.parametrize("name", ["float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool"])
def test_every_dtype_arrives_bit_for_bit(name: str) -> None:
    dtype = getattr(torch, name)
    source = {"x": torch.randint(0, 2, (7, 3)).to(dtype), "scalar": torch.tensor(1, dtype=dtype)}
    target = {"x": torch.zeros(7, 3, dtype=dtype), "scalar": torch.zeros((), dtype=dtype)}

    with opened(dict(source)) as (writer, reader):
        writer.write(source, 1)
        read(reader, dict(target))

    assert torch.equal(source["x"], target["x"])
    assert torch.equal(source["scalar"], target["scalar"])


def test_nan_payloads_and_negative_zero_arrive_bit_for_bit() -> None:
    iter_bits = np.array([0x7FC00001, 0x80000000, 0xFF800000], np.uint32)
    source, target = {"x": iter_bits.view(np.float32)}, {"x": np.zeros(3, np.float32)}

    with opened(dict(source)) as (writer, reader):
        writer.write(source, 1)
        read(reader, dict(target))

    assert target["x"].view(np.uint32).tolist() == iter_bits.tolist()


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.arange(12.0).reshape(3, 4).T, id="transposed torch"),
        pytest.param(np.arange(12, dtype=np.float32).reshape(3, 4).T, id="transposed numpy"),
        pytest.param(torch.zeros(4, 0), id="empty"),
    ],
)
def test_layout_in_memory_does_not_matter(tensor: Tensor) -> None:
    target = np.zeros(tuple(tensor.shape), np.float32)

    with opened({"x": tensor}) as (writer, reader):
        writer.write({"x": tensor}, 1)
        read(reader, {"x": target})

    assert target.tolist() == tensor.tolist()


def test_tied_tensors_are_published_under_each_of_their_names() -> None:
    def tied() -> nn.Sequential:
        token, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        head.weight = token.weight
        return nn.Sequential(token, head)

    source, target = tied(), tied()
    with opened(source.state_dict()) as (writer, reader):
        writer.write(source.state_dict(), 1)
        read(reader, target.state_dict())

    assert [spec.name for spec in reader.layout.manifest.tensors] == ["0.weight", "1.weight"]
    assert torch.equal(source.get_parameter("1.weight"), target.get_parameter("1.weight"))
    assert target.get_parameter("1.weight") is target.get_parameter("0.weight")


def test_a_mismatch_lists_every_tensor_with_expected_and_found() -> None:
    model: dict[str, Tensor] = {
        "a": np.zeros(3, np.float32),
        "b": np.zeros((2, 2), np.float32),
        "gone": np.zeros(1, np.float32),
    }
    found: dict[str, Tensor] = {
        "a": np.zeros(3, np.float16),
        "b": np.zeros((2, 3), np.float32),
        "new": np.zeros(1, np.int64),
    }

    with pytest.raises(WeightsMismatch) as caught:
        check_weights(specs_of(model), specs_of(found), "weights do not fit the model")

    assert str(caught.value).splitlines() == [
        "weights do not fit the model: 4 tensors differ",
        "  a: expected float32 [3], found float16 [3]",
        "  b: expected float32 [2, 2], found float32 [2, 3]",
        "  gone: expected float32 [1], found none",
        "  new: expected no such tensor, found int64 [1]",
    ]


def test_bfloat16_is_never_read_as_float16() -> None:
    with pytest.raises(WeightsMismatch, match=r"x: expected float16 \[2\], found bfloat16 \[2\]"):
        check_weights(
            specs_of({"x": torch.zeros(2, dtype=torch.float16)}),
            specs_of({"x": torch.zeros(2, dtype=torch.bfloat16)}),
            "weights",
        )


def test_the_order_of_the_tensors_does_not_matter() -> None:
    specs = specs_of(arrays())

    check_weights(specs, specs[::-1], "weights")


@pytest.mark.parametrize("value", [3, "text", np.zeros(2, np.complex64), np.zeros(2, ">f4"), np.array([object()])])
def test_a_tensor_without_numbers_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ValueError, match=r"model\.extra: expected a tensor of bool"):
        specs_of({"model.extra": value})


def test_other_tensors_than_at_construction_are_refused_and_change_nothing() -> None:
    target = arrays(0)

    with opened(arrays()) as (writer, reader):
        writer.write(arrays(1), 1)
        with pytest.raises(WeightsMismatch, match=r"bias: expected float64 \[2\], found none"):
            plan(arrays()).check({"weight": arrays()["weight"]}, 2, newest=1)
        assert read(reader, target) == 1


@pytest.mark.parametrize("version", [1, 2])
def test_versions_only_grow(version: int) -> None:
    with pytest.raises(ValueError, match=f"version: expected one above 2, got {version}"):
        plan(arrays()).check(arrays(), version, newest=2)


def test_a_write_that_fails_half_way_leaves_the_version_before(monkeypatch: pytest.MonkeyPatch) -> None:
    target = arrays(0)

    def broken(memory: HostMemory, start: int, tensor: Tensor, spec: TensorSpec) -> None:
        if tensor.shape == (2,):
            raise RuntimeError("the device is gone")
        original(memory, start, tensor, spec)

    original = HostMemory.store
    with opened(arrays()) as (writer, reader):
        writer.write(arrays(1), 1)
        monkeypatch.setattr(HostMemory, "store", broken)
        with pytest.raises(RuntimeError, match="the device is gone"):
            writer.write(arrays(2), 2)
        monkeypatch.undo()
        assert (reader.latest, read(reader, target)) == (1, 1)
        writer.write(arrays(3), 3)
        assert read(reader, target) == 3


def at_every_look(monkeypatch: pytest.MonkeyPatch, publish: Callable[[], object]) -> None:
    """Call `publish` before every read of a reader."""
    fence = module._fence

    def looked() -> None:
        monkeypatch.setattr(module, "_fence", fence)
        publish()
        monkeypatch.setattr(module, "_fence", looked)

    monkeypatch.setattr(module, "_fence", looked)


def test_a_reader_overtaken_by_the_publisher_starts_over(monkeypatch: pytest.MonkeyPatch) -> None:
    target = arrays(0)

    with opened(arrays()) as (writer, reader):
        writer.write(arrays(1), 1)
        overtaken: list[int] = []

        def overtake() -> None:
            if len(overtaken) < 4:
                overtaken.append(writer.latest + 1)
                writer.write(arrays(overtaken[-1]), overtaken[-1])

        at_every_look(monkeypatch, overtake)
        version = read(reader, target)

    assert version == overtaken[-1]
    assert all((np.asarray(tensor) == version).all() for tensor in target.values())


def test_a_reader_that_is_overtaken_for_ever_gives_up_and_touches_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    target = arrays(0)

    with opened(arrays()) as (writer, reader):
        writer.write(arrays(1), 1)
        at_every_look(monkeypatch, lambda: writer.write(arrays(), writer.latest + 1))
        version = read(reader, target)

    assert version == NO_VERSION
    assert (np.asarray(target["weight"]) == 0).all()


def test_two_publications_during_a_look_give_no_mixture_of_the_old_one_and_the_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with opened(arrays()) as (writer, reader):
        writer.write(arrays(), 5)
        to_come = [6, 7]

        def publish_two() -> None:
            while to_come:
                writer.write(arrays(), to_come.pop(0))

        at_every_look(monkeypatch, publish_two)

        assert reader.newest() == (3, 7)


def test_threads_at_full_speed_never_show_a_mixture() -> None:
    size, versions = 200_000, 300
    target: dict[str, Tensor] = {"a": np.zeros(size, np.int64), "b": np.zeros(size, np.int64)}
    seen: list[int] = []

    with opened(target) as (writer, reader):

        def publish() -> None:
            for version in range(versions):
                writer.write({name: np.full(size, version) for name in target}, version)

        thread = threading.Thread(target=publish)
        thread.start()
        while not seen or seen[-1] != versions - 1:
            if (version := read(reader, target)) != NO_VERSION:
                seen.append(version)
                assert all((np.asarray(tensor) == version).all() for tensor in target.values())
        thread.join()

    assert seen == sorted(seen)


@contextmanager
def switching_every(seconds: float) -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    yield
    sys.setswitchinterval(before)


def test_two_threads_may_look_at_the_same_time() -> None:
    """The event loop looks which version is the newest while the thread that samples looks before every token."""
    seen = list[bool]()

    def look() -> None:
        seen.extend(reader.intact(1) for _ in range(50_000))

    with opened(arrays()) as (writer, reader), switching_every(1e-6):
        writer.write(arrays(), 0)
        threads = [threading.Thread(target=look) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert seen == [True] * 100_000


def test_the_reader_keeps_the_memory_when_the_writer_is_gone() -> None:
    target = arrays(0)
    with opened(arrays()) as (writer, reader):
        writer.write(arrays(5), 5)
    del writer

    assert read(reader, target) == 5


def test_a_reader_cannot_write() -> None:
    with opened(arrays()) as (_, reader), pytest.raises(ValueError, match="read-only"):
        reader.memory.bytes[0] = 1  # type: ignore[union-attr]


def test_a_file_that_could_shrink_under_the_reader_is_refused() -> None:
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(fd, 4096 * 4)

    try:
        with pytest.raises(ProtocolMismatch, match="that cannot shrink"):
            WeightReader(fd, 4096 * 4, 1)
    finally:
        os.close(fd)


def test_a_segment_of_another_size_than_was_declared_is_refused() -> None:
    with opened(arrays()) as (writer, _), pytest.raises(ProtocolMismatch, match="expected 4096 bytes of weights"):
        WeightReader(writer.fd, 4096, writer.generation)


def test_an_empty_segment_is_refused() -> None:
    fd = os.memfd_create("empty", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)

    try:
        with pytest.raises(ProtocolMismatch, match="expected 4096 bytes of weights that cannot shrink, got 0"):
            WeightReader(fd, 0, 1)
    finally:
        os.close(fd)


def written_over(writer: WeightWriter, start: int, content: bytes) -> None:
    os.pwrite(writer.fd, content, mmap.PAGESIZE + start)


@pytest.mark.parametrize(
    ("start", "content", "message"),
    [
        (
            0,
            b"\xff" * 8,
            r"expected a header within \d+ bytes, got one of 18446744073709551615",
        ),
        (0, b"\x03\0", "expected the header of published tensors, got Input data was truncated"),
        (8, b"[]", "expected the header of published tensors, got "),
    ],
    ids=["too long", "too short", "no object"],
)
def test_a_segment_without_a_header_is_refused(start: int, content: bytes, message: str) -> None:
    with opened(arrays()) as (writer, _):
        written_over(writer, start, content)
        with pytest.raises(ProtocolMismatch, match=message):
            WeightReader(writer.fd, writer.nbytes, writer.generation)


def test_a_segment_that_is_smaller_than_its_header_says_is_refused() -> None:
    with opened({"x": np.zeros(8, np.int8)}) as (writer, _):
        written_over(writer, 0, plan({"x": np.zeros(5000, np.int8)}).layout.header)
        with pytest.raises(ProtocolMismatch, match="expected two buffers of 8192 bytes"):
            WeightReader(writer.fd, writer.nbytes, writer.generation)


def test_a_segment_of_another_publisher_is_stale() -> None:
    with opened(arrays()) as (writer, _), pytest.raises(StaleHandle, match="expected weights of publisher 1, got"):
        WeightReader(writer.fd, writer.nbytes, generation=1)


def test_a_machine_without_room_says_how_much_was_wanted() -> None:
    with pytest.raises(OutOfSharedMemory, match="bytes of shared memory for 1 tensors, twice"):
        WeightWriter(WritePlan(TensorManifest((TensorSpec("huge", "float32", (1 << 58,)),))))


def test_memory_that_cannot_be_mapped_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    gc.collect()  # what other tests left is not counted
    held = len([*Path("/proc/self/fd").iterdir()])
    monkeypatch.setattr("penstock._pipeline.weights.weights.mmap.mmap", refuse)

    with pytest.raises(OutOfSharedMemory, match="Cannot allocate memory"):
        WeightWriter(plan(arrays()))

    assert len([*Path("/proc/self/fd").iterdir()]) == held


def test_closing_twice_is_fine() -> None:
    writer = WeightWriter(plan(arrays()))

    writer.close()
    writer.close()
