"""Start torchrun, on this host or on two network namespaces, and watch the processes of its ranks."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple, Self

import numpy as np
from chaos.network import FAR, NEAR, Link, apart, within
from tests.failsafe import FAILSAFE_S
from tests.ranks.script_of_a_run import GROUPS, STEPS, trainer_of
from tests.tiny_model import ReadModel

from penstock import GroupId

__all__ = ["PORT", "Host", "Hosts", "Rank", "Torchrun", "check_trained_once", "pipe", "two_hosts"]

ROOT = Path(__file__).parent.parent.parent

PORT = 29500
"""Free, because each network namespace has ports of its own."""


class Host(NamedTuple):
    """A network namespace, as a host of a torchrun."""

    node_rank: int
    pid: int
    """The process that holds it."""
    device: str
    address: str

    def options(self) -> list[str]:
        """Return the options of torchrun on this host."""
        where = [f"--master-addr={NEAR}", f"--master-port={PORT}"]
        return ["--nnodes=2", "--nproc-per-node=1", f"--node-rank={self.node_rank}", *where]

    def variables(self) -> dict[str, str]:
        """Return what torchrun sets for the rank of this host."""
        where = {"MASTER_ADDR": NEAR, "MASTER_PORT": str(PORT)}
        return {"RANK": str(self.node_rank), "WORLD_SIZE": "2", **where}


class Hosts(NamedTuple):
    """Two hosts, and the link between them."""

    first: Host
    second: Host
    link: Link

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Set the link down within the body, without a sign to either end of a connection."""
        self.link.cut()
        try:
            yield
        finally:
            self.link.restore()


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Make two network namespaces with a link within the body.

    Raises:
        LinkNotPossible: this machine does not permit it.
    """
    with ExitStack() as stack:
        first, second = (stack.enter_context(_holder()) for _ in range(2))
        link = Link(first, second)
        yield Hosts(Host(0, first, "near", NEAR), Host(1, second, "far", FAR), link)


@contextmanager
def _holder() -> Iterator[int]:
    """Hold a network namespace by a process that ends when its input does, and so with this one."""
    command = [*apart(), "cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        print("begun", file=process.stdin, flush=True)
        assert process.stdout.readline() == "begun\n"
        yield process.pid


class Torchrun:
    """A torchrun of `script_of_a_run`, on this host with two ranks, or on one of two hosts with one rank.

    A restart of ranks needs a store of its own: torch 2.13 leaves the addresses of the dead ones in a shared store.
    """

    def __init__(self, *arguments: object, options: Sequence[str] = (), host: Host | None = None) -> None:
        where = ["--nproc-per-node=2"] if host is None else host.options()
        self._start(["-m", "torch.distributed.run", *where, *options], arguments, host, {})

    def _start(
        self, launcher: Sequence[str], arguments: Sequence[object], host: Host | None, variables: dict[str, str]
    ) -> None:
        prefix, device = ([], {}) if host is None else (within(host.pid), {"GLOO_SOCKET_IFNAME": host.device})
        torch = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self._process = subprocess.Popen(
            [*prefix, sys.executable, *launcher, "-m", "tests.ranks.script_of_a_run", *map(str, arguments)],
            cwd=ROOT,
            env=os.environ | torch | device | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output = ""
        """What it and its ranks have printed, as far as it was read."""
        self._ranks: list[int] = []
        """Descriptors of the processes of its ranks."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill what is left, and wait for it."""
        for pidfd in self._ranks:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        self.kill()
        self._stdout.close()
        self._process.wait()

    @property
    def _stdout(self) -> IO[str]:
        assert self._process.stdout is not None
        return self._process.stdout

    def read_until(self, text: str) -> None:
        """Read its output until a line contains `text`."""
        while text not in self._read_line():
            pass

    def _read_line(self) -> str:
        line = self._stdout.readline()
        assert line, self.output
        self.output += line
        for pid in re.findall(r"rank \d+ is process (\d+)", line):
            self._ranks.append(os.pidfd_open(int(pid)))
        return line

    def kill(self) -> None:
        """Kill torchrun itself by SIGKILL."""
        self._process.kill()

    def wait(self) -> int:
        """Wait until its ranks and everything that they started have ended; return the exit status of torchrun."""
        assert all(select.select([pidfd], [], [], FAILSAFE_S)[0] for pidfd in self._ranks), "a rank is left"
        self.output += self._stdout.read()  # whoever has the other end has ended
        return self._process.wait()


class Rank(Torchrun):
    """A rank of `script_of_a_run` on one of two hosts, without a torchrun, which takes seconds to begin."""

    def __init__(self, *arguments: object, host: Host) -> None:
        self._start((), arguments, host, host.variables())


def pipe(folder: Path, rank: int) -> Path:
    """Make the pipe for which `rank` waits in its last step."""
    path = folder / f"go-{rank}"
    os.mkfifo(path)
    return path


def check_trained_once(folder: Path, alone: Path) -> None:
    """Check that the run has trained every group once, each step once, and to the weights of a single process."""
    checkpoint = trainer_of(ReadModel())
    checkpoint.resume(folder / "checkpoints" / f"step-{STEPS:08}")
    assert checkpoint.committed == {GroupId("test", str(number)): 0b111 for number in range(GROUPS)}
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS + 1))
    weights, expected = (json.loads((each / "weights.json").read_text()) for each in (folder, alone))
    for name, tensor in expected.items():
        np.testing.assert_allclose(weights[name], tensor, atol=1e-5)
