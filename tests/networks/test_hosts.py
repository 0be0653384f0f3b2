"""Records and weights between hosts with kernels' own network stacks: NAT, IPv6, links that are cut and slow links."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.networks.network import Host, Network, Program, network

from penstock.channels import ChannelKey

PORT = 5555

HEARTBEAT_S = 4.0
"""Longer than a process waits for a core on a busy machine."""

pytestmark = pytest.mark.timeout(300)  # several processes begin in each, and a link is cut for some heartbeats


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Network]:
    with network(tmp_path) as made:
        yield made


@pytest.fixture
def key(tmp_path: Path) -> str:
    path = tmp_path / "run.key"
    ChannelKey.create(path)
    return str(path)


def at(host: Host) -> str:
    return f"tcp://{host.address}:{PORT}"


def trained(program: Program) -> list[str]:
    return sorted(line for line in program.lines if line.startswith("trained"))


def training(host: Host, folder: Path, **options: object) -> Program:
    return host.start("train", url=at(host), folder=str(folder), heartbeat_timeout_s=HEARTBEAT_S, **options)


def replaying(host: Host, to: Host, name: str) -> Program:
    return host.start("replay", url=at(to), name=name, heartbeat_timeout_s=HEARTBEAT_S)


async def sampling(net: Network, **options: object) -> tuple[Host, Program, Program]:
    """Publish on one host and sample on another; return that one, the publisher and the sampler."""
    trainer, far = net.host(), net.host()
    publisher = trainer.start("publish", url=at(trainer), heartbeat_timeout_s=HEARTBEAT_S, **options)
    sampler = far.start("sample", address=await publisher.until("address"), **options)
    await sampler.until("attached")
    return far, publisher, sampler


# -- NAT and IPv6 ------------------------------------------------------------------------------------------------------


async def test_senders_and_samplers_behind_nat_need_one_open_port(net: Network) -> None:
    trainer, far = net.host(), net.host()
    net.hide(far)

    receiver = trainer.start("receive", url=at(trainer), senders=2)
    await receiver.until("url")
    senders = [far.start("send", url=at(trainer), name=name) for name in "ab"]
    for sender in senders:
        sender.tell(3)
        sender.finish()
        await sender.until_end()
    await receiver.until_end()
    assert receiver.count("received") == 6

    publisher = trainer.start("publish", url=at(trainer))
    sampler = far.start("sample", address=await publisher.until("address"))
    await sampler.until("attached")
    publisher.tell(7)
    assert await sampler.until("version") == "7"


async def test_a_worker_of_a_middle_stage_that_cannot_be_reached_ends_and_another_takes_its_place(
    net: Network, key: str
) -> None:
    trainer, hidden, far = net.host(), net.host(), net.host()
    net.hide(hidden)

    pipeline = trainer.start("double", url=at(trainer), key=key, heartbeat_timeout_s=HEARTBEAT_S)
    unreachable = hidden.start("worker", url=at(trainer), key=key)
    assert "disconnected this sender: it could not be reached" in await unreachable.until("SenderRejected")
    reached = far.start("worker", url=at(trainer), key=key)
    ended = await pipeline.until("ended")
    await reached.until_end()

    assert "'trained': 40" in ended
    assert pipeline.count("log worker_died") == 1


@pytest.mark.long
async def test_hosts_reach_each_other_over_ipv6(net: Network) -> None:
    trainer, far = net.host(), net.host()
    url = f"tcp://[{trainer.address6}]:{PORT}"

    receiver = trainer.start("receive", url=url, senders=1)
    assert await receiver.until("url") == url
    sender = far.start("send", url=url, name="a")
    sender.tell(3)
    sender.finish()
    await receiver.until_end()
    assert receiver.count("received a") == 3

    publisher = trainer.start("publish", url=url)
    sampler = far.start("sample", address=await publisher.until("address"))
    await sampler.until("attached")
    publisher.tell(7)
    assert await sampler.until("version") == "7"


@pytest.mark.long
async def test_a_receiver_at_every_address_is_reached_over_ipv4_and_ipv6(net: Network) -> None:
    trainer, far = net.host(), net.host()

    receiver = trainer.start("receive", url=f"tcp://[::]:{PORT}", senders=2)
    await receiver.until("url")
    for address in (trainer.address, f"[{trainer.address6}]"):
        sender = far.start("send", url=f"tcp://{address}:{PORT}", name=address)
        sender.tell(1)
        sender.finish()
        await sender.until_end()
    await receiver.until_end()
    assert receiver.count("received") == 2


# -- cut links ---------------------------------------------------------------------------------------------------------


async def cut_off(net: Network, folder: Path) -> tuple[Host, Program, Program]:
    """Return a host that was cut off when four of its eight records were trained, the trainer, and the sender there."""
    trainer, far = net.host(), net.host()
    receiver = training(trainer, folder, senders=1)
    sender = replaying(far, trainer, "a")
    sender.tell(4)
    await receiver.until("trained a 3")
    net.cut(far)
    sender.tell(4)
    return far, receiver, sender


async def all_trained(receiver: Program, sender: Program) -> None:
    """Wait for the ends of both, and expect that the eight records were trained once."""
    sender.finish()
    await receiver.until_end()
    await sender.until_end()
    assert trained(receiver) == [f"trained a {number}" for number in range(8)]


@pytest.mark.long
async def test_of_a_cut_for_seconds_nothing_is_lost_and_nothing_is_said(net: Network, tmp_path: Path) -> None:
    far, receiver, sender = await cut_off(net, tmp_path)

    await sender.until("sent 8")
    net.restore(far)
    await all_trained(receiver, sender)

    assert [line for each in (receiver, sender) for line in each.lines if line.startswith("log")] == []


async def test_of_a_longer_cut_nothing_is_lost_and_each_side_says_it_once(net: Network, tmp_path: Path) -> None:
    far, receiver, sender = await cut_off(net, tmp_path)

    await receiver.until("log peer_lost")
    await sender.until("log receiver_disconnected")
    net.restore(far)
    await all_trained(receiver, sender)

    assert [each.count("log") for each in (receiver, sender)] == [1, 1]


@pytest.mark.long
async def test_a_member_whose_host_stays_away_is_replaced_and_harms_nothing_when_it_returns(net: Network) -> None:
    trainer, far, other = net.host(), net.host(), net.host()
    receiver = trainer.start("receive", url=at(trainer), senders=1, heartbeat_timeout_s=HEARTBEAT_S)
    await receiver.until("url")
    first = far.start("send", url=at(trainer), name="a", heartbeat_timeout_s=HEARTBEAT_S)
    first.tell(2)
    await receiver.until("received a 1")

    net.cut(far)
    first.tell(1)
    await receiver.until("log peer_lost")
    second = other.start("send", url=at(trainer), name="a", heartbeat_timeout_s=HEARTBEAT_S)
    await second.until("connected")
    net.restore(far)
    assert "receiver" in await first.until("failed")
    second.tell(3)
    second.finish()
    await receiver.until_end()

    assert [line for line in receiver.lines if line.startswith("received")] == [
        f"received a {number}" for number in (0, 1, 0, 1, 2)
    ]


@pytest.mark.parametrize(("on_absence", "end"), [("continue", "ended"), ("fail", "absent")])
@pytest.mark.long
async def test_a_member_whose_host_stays_away_is_awaited_for_its_time(net: Network, on_absence: str, end: str) -> None:
    trainer, far = net.host(), net.host()
    sender = far.start("send", url=at(trainer), name="a", heartbeat_timeout_s=HEARTBEAT_S, told=True)
    await sender.until("ready")
    receiver = trainer.start(
        "receive",
        url=at(trainer),
        senders=1,
        heartbeat_timeout_s=HEARTBEAT_S,
        absence_timeout_s=HEARTBEAT_S,
        on_absence=on_absence,
    )
    await receiver.until("url")
    sender.tell("connect")
    sender.tell(2)
    await receiver.until("received a 1")

    net.cut(far)
    await receiver.until(end)

    assert [receiver.count(f"log {event}") for event in ("peer_lost", "member_absent")] == [1, 1]


# -- weights, and cut links --------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_of_a_cut_for_seconds_a_sampler_notices_nothing(net: Network) -> None:
    far, publisher, sampler = await sampling(net)
    publisher.tell(1)
    assert await sampler.until("version") == "1"

    net.cut(far)
    publisher.tell(2)
    await publisher.until("published 2")
    net.restore(far)

    assert await sampler.until("version") == "2"
    assert not sampler.count("log") + publisher.count("log")


async def test_after_a_longer_cut_a_sampler_takes_up_the_newest_version_and_others_are_not_delayed(
    net: Network,
) -> None:
    far, publisher, sampler = await sampling(net)
    other = net.host().start("sample", address=publisher.lines[0].removeprefix("address "))
    await other.until("attached")
    publisher.tell(1)
    assert [await each.until("version") for each in (sampler, other)] == ["1", "1"]

    net.cut(far)
    for version in range(2, 5):
        publisher.tell(version)
        assert await other.until("version") == str(version)
    await sampler.until("log weights_reconnect")
    publisher.tell("pause")  # its host is not waited for once its connection has ended
    await publisher.until("paused")
    for version in range(5, 8):
        publisher.tell(version)
        assert await other.until("version") == str(version)
    net.restore(far)

    assert await sampler.until("version") == "7"
    assert [each.count("log") for each in (sampler, other)] == [1, 0]


# -- slow links --------------------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_over_a_slow_link_records_that_take_longer_than_a_heartbeat_arrive(net: Network) -> None:
    trainer, far = net.host(), net.host()
    net.slow(far, "2mbit")
    receiver = trainer.start("receive", url=at(trainer), senders=1, heartbeat_timeout_s=HEARTBEAT_S)
    await receiver.until("url")
    sender = far.start("send", url=at(trainer), name="a", tokens=100_000, heartbeat_timeout_s=HEARTBEAT_S)
    sender.tell(1)  # of 2 MB: 8 s
    sender.finish()
    await receiver.until_end()

    assert receiver.count("received") == 1
    assert [line for each in (receiver, sender) for line in each.lines if line.startswith("log")] == []


@pytest.mark.long
async def test_over_a_slow_link_a_version_that_takes_longer_than_a_heartbeat_arrives(net: Network) -> None:
    far, publisher, sampler = await sampling(net, megabytes=2)
    net.slow(far, "2mbit")
    publisher.tell(1)  # 8 s

    assert await sampler.until("version") == "1"
    assert not sampler.count("log") + publisher.count("log")
