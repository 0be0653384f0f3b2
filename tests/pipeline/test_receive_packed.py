"""Groups go from a channel straight into a batch, without a view in between."""

import anyio
import msgspec
import numpy as np
import pytest

from penstock import TrainBatch, TrajectoryGroup
from penstock.channels import connect, serve
from penstock.errors import InvalidRecord
from penstock.records import Packer
from penstock.testing import batch as a_batch
from penstock.testing import group

URLS = ("shm://", "tcp://127.0.0.1:0")


async def test_groups_are_packed_from_where_they_lie_until_the_next_has_no_room() -> None:
    sent = [group(completion_lengths=[n, 3], instance_id=str(n), meta={"n": n}) for n in range(1, 7)]
    tokens = len(sent[0].tokens) + len(sent[1].tokens) + len(sent[2].tokens)

    for url in URLS:
        packer = Packer(tokens)
        async with serve(url, TrajectoryGroup, capacity=5) as inbox:
            async with connect(inbox.url, TrajectoryGroup) as outbox:
                for record in sent[:5]:
                    outbox.send_nowait(record)
                first = await inbox.receive_packed(packer)
                await outbox.send(sent[5])  # for what was copied is released
            second = await inbox.receive_packed(packer)
            third = await inbox.receive_packed(packer)
            with pytest.raises(anyio.EndOfStream):
                await inbox.receive_packed(packer)

        _same(first, TrainBatch.pack(sent[:3]))
        _same(second, TrainBatch.pack(sent[3:5]))
        _same(third, TrainBatch.pack(sent[5:]))


async def test_a_packed_batch_ends_where_the_columns_change() -> None:
    plain = group(completion_lengths=[2, 3])
    scored = plain.with_rewards(plain.rewards, parts={"score": plain.rewards})
    teacher = np.zeros((len(plain.tokens), 2), np.float32)
    taught = msgspec.structs.replace(plain, teacher_ids=teacher.astype(np.int32), teacher_logprobs=teacher)
    more = np.zeros((len(plain.tokens), 3), np.float32)
    taught_more = msgspec.structs.replace(plain, teacher_ids=more.astype(np.int32), teacher_logprobs=more)
    sent = [plain, scored, scored, taught, taught_more]

    for url in URLS:
        packer = Packer(1000)
        async with serve(url, TrajectoryGroup) as inbox:
            async with connect(inbox.url, TrajectoryGroup) as outbox:
                for record in sent:
                    outbox.send_nowait(record)
            got = [await inbox.receive_packed(packer) for _ in range(4)]

        assert [len(batch.groups) for batch in got] == [1, 2, 1, 1]
        for batch, groups in zip(got, ([plain], [scored, scored], [taught], [taught_more]), strict=True):
            _same(batch, TrainBatch.pack(groups))


async def test_a_group_that_no_batch_has_room_for_is_refused_and_not_lost() -> None:
    large, small = group(completion_lengths=[50]), group(completion_lengths=[3])

    for url in URLS:
        packer = Packer(10)
        async with serve(url, TrajectoryGroup) as inbox, connect(inbox.url, TrajectoryGroup) as outbox:
            outbox.send_nowait(large)
            outbox.send_nowait(small)
            for _ in range(2):
                with pytest.raises(InvalidRecord, match="expected a group of at most 10 tokens"):
                    await inbox.receive_packed(packer)

            assert len((await inbox.receive()).tokens) == len(large.tokens)
            assert len((await inbox.receive()).tokens) == len(small.tokens)


async def test_a_cancelled_wait_loses_nothing_that_was_packed() -> None:
    for url in URLS:
        packer = Packer(1000)
        async with serve(url, TrajectoryGroup) as inbox:
            async with connect(inbox.url, TrajectoryGroup) as outbox:
                await outbox.send(group(instance_id="0"))
                with anyio.move_on_after(0) as moment:
                    moment.cancel()
                    await inbox.receive_packed(packer)
                await outbox.send(group(instance_id="1"))
            batch = await inbox.receive_packed(packer)

        assert [packed.instance_id for packed in batch.groups] == ["0", "1"]


async def test_a_bundle_is_cut_where_a_batch_is_full() -> None:
    sent = [group(completion_lengths=[n % 5, 3], instance_id=str(n), meta={"n": n}) for n in range(16)]
    room = sum(len(record.tokens) for record in sent[:6])
    packer = Packer(room)

    async with serve("shm://", TrajectoryGroup, capacity=64) as inbox:  # so eight in a bundle
        async with connect(inbox.url, TrajectoryGroup) as outbox:
            for record in sent:
                outbox.send_nowait(record)
            first = await inbox.receive_packed(packer)
            assert inbox.statistics().received == 6
            alone = await inbox.receive()
        rest = await inbox.receive_packed(packer)

    _same(first, TrainBatch.pack(sent[:6]))
    assert alone.meta == {"n": 6}
    _same(rest, TrainBatch.pack(sent[7 : 7 + len(rest.groups)]))


@pytest.mark.parametrize("by_token", [[], [1], [0, 3], [0, 1, 2, 3, 4, 5, 6, 7]])
async def test_versions_by_token_and_by_sequence_are_packed_together(by_token: list[int]) -> None:
    sent = [group(completion_lengths=[2, n + 1], instance_id=str(n), policy_version=n) for n in range(8)]
    for n in by_token:
        versions = np.arange(len(sent[n].tokens), dtype=np.int64)
        sent[n] = msgspec.structs.replace(sent[n], policy_versions=versions)

    async with serve("shm://", TrajectoryGroup, capacity=64) as inbox:
        async with connect(inbox.url, TrajectoryGroup) as outbox:
            for record in sent:
                outbox.send_nowait(record)
        batch = await inbox.receive_packed(Packer(1000))

    expected = [
        version
        for n, record in enumerate(sent)
        for version in (
            record.policy_versions.tolist() if n in by_token else [n] * (len(record.tokens) if by_token else 2)
        )
    ]
    assert batch.policy_versions.tolist() == expected


def _same(one: TrainBatch, other: TrainBatch) -> None:
    assert one.groups == other.groups
    assert (one.loss_tokens, one.loss_sequences) == (other.loss_tokens, other.loss_sequences)
    assert {n: (c.dtype, c.tolist()) for n, c in one.columns().items()} == {
        n: (c.dtype, c.tolist()) for n, c in other.columns().items()
    }


async def test_only_groups_are_packed() -> None:
    async with serve("shm://", TrainBatch) as inbox, connect(inbox.url, TrainBatch) as outbox:
        await outbox.send(a_batch())

        with pytest.raises(TypeError, match="expected a channel of groups of its own, got one of kind batch"):
            await inbox.receive_packed(Packer(100))
