"""Hosts in network namespaces of their own, behind a router: for cuts, slow links, IPv6 and NAT as kernels do them.

The namespaces have no names: each exists as long as the process that holds it, which ends with the test, whatever
becomes of that, and the links are deleted with them. Needs root and iproute2, and nft for NAT.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import anyio.to_thread
import msgspec
import pytest
from chaos.network import LinkNotPossible, apart, within

__all__ = ["Host", "Network", "Program", "network"]

SCRIPT = "tests.networks.script_of_a_host"

ROOT = Path(__file__).parents[2]

FORWARD = ["/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv6/conf/all/forwarding"]


class Program:
    """A role of `script_of_a_host` in a process on a host: it prints lines, and takes commands by lines."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.lines: list[str] = []
        """The lines that were read."""
        self.process = process

    def tell(self, command: object) -> None:
        """Write a command."""
        self._stdin.write(f"{command}\n")
        self._stdin.flush()

    def finish(self) -> None:
        """Close the commands: the program is to end."""
        self._stdin.close()

    @property
    def _stdin(self) -> IO[str]:
        assert self.process.stdin is not None
        return self.process.stdin

    async def until(self, beginning: str) -> str:
        """Read lines up to the next that begins so, and return the rest of it."""
        while not (line := await self._line()).startswith(beginning):
            pass
        return line.removeprefix(beginning).strip()

    async def until_end(self) -> None:
        """Read lines until the program has ended without an error."""
        assert self.process.stdout is not None
        rest = await anyio.to_thread.run_sync(self.process.stdout.read, abandon_on_cancel=True)
        self.lines += rest.splitlines()
        assert await anyio.to_thread.run_sync(self.process.wait, abandon_on_cancel=True) == 0, self.lines

    async def _line(self) -> str:
        assert self.process.stdout is not None
        line = await anyio.to_thread.run_sync(self.process.stdout.readline, abandon_on_cancel=True)
        assert line, f"it ended after {self.lines}"
        self.lines.append(line.strip())
        return self.lines[-1]

    def count(self, beginning: str) -> int:
        """Return how many lines began so."""
        return sum(line.startswith(beginning) for line in self.lines)


class Host:
    """A network namespace with one link to the router."""

    def __init__(self, pid: int, number: int, folder: Path, stack: ExitStack) -> None:
        self.pid = pid
        self.address, self.gateway = f"10.231.{number}.2", f"10.231.{number}.1"
        self.address6, self.gateway6 = f"fd00:231:{number}::2", f"fd00:231:{number}::1"
        self.device = f"to{number}"
        """The router's end of the link."""
        self._folder = folder
        self._stack = stack

    def start(self, role: str, **options: object) -> Program:
        """Start a role of `script_of_a_host` here; it is killed when the network ends."""
        command = [*within(self.pid), "env", f"XDG_RUNTIME_DIR={self._folder}", sys.executable, "-m", SCRIPT, role]
        process = self._stack.enter_context(
            subprocess.Popen(
                [*command, msgspec.json.encode(options).decode()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
        )
        self._stack.callback(process.kill)
        return Program(process)


class Network:
    """A router, and hosts around it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._router = _holder(stack)
        self._hosts = 0
        for path in FORWARD:
            self._write(path, 1)

    def host(self) -> Host:
        """Add a host."""
        self._hosts += 1
        folder = self._folder / str(self._hosts)
        folder.mkdir()
        host = Host(_holder(self._stack), self._hosts, folder, self._stack)
        _ip(self._router, "link", "add", host.device, "type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
        for pid, device, addresses in [
            (self._router, host.device, (f"{host.gateway}/24", f"{host.gateway6}/64")),
            (host.pid, "eth0", (f"{host.address}/24", f"{host.address6}/64")),
        ]:
            for address in addresses:
                _ip(pid, "address", "add", address, "dev", device, *(["nodad"] if ":" in address else []))
            _ip(pid, "link", "set", device, "up")
            _ip(pid, "link", "set", "lo", "up")
        _ip(host.pid, "route", "add", "default", "via", host.gateway)
        _ip(host.pid, "-6", "route", "add", "default", "via", host.gateway6)
        return host

    def cut(self, host: Host) -> None:
        """Drop every packet from and to `host` at the router; neither side is notified."""
        for direction in ("from", "to"):
            _ip(self._router, "rule", "add", direction, host.address, "blackhole")

    def restore(self, host: Host) -> None:
        """Forward packets again."""
        for direction in ("from", "to"):
            _ip(self._router, "rule", "delete", direction, host.address, "blackhole")

    def slow(self, host: Host, rate: str) -> None:
        """Limit the link from and to `host` to `rate`, such as 1mbit."""
        for pid, device in (self._router, host.device), (host.pid, "eth0"):
            limit = ["rate", rate, "burst", "16k", "latency", "300ms"]
            _checked([*within(pid), "tc", "qdisc", "add", "dev", device, "root", "tbf", *limit])

    def hide(self, host: Host) -> None:
        """Translate the address of `host` into that of the router, and let no connection to it be made."""
        if shutil.which("nft") is None:
            pytest.skip("expected nft on the path: apt install nftables")
        rules = (
            "add table ip nat",
            "add chain ip nat post { type nat hook postrouting priority 100; }",
            f"add rule ip nat post ip saddr {host.address} masquerade",
            "add chain ip nat forward { type filter hook forward priority 0; }",
            f"add rule ip nat forward ip daddr {host.address} ct state new drop",
        )
        for rule in rules:
            _checked([*within(self._router), "nft", rule])

    def _write(self, path: str, value: int) -> None:
        _checked([*within(self._router), "sh", "-c", f"echo {value} > {path}"])


def _holder(stack: ExitStack) -> int:
    """Start the process that holds a network namespace, and return its id."""
    held = [*apart(), "sh", "-c", "echo held; exec cat"]
    process = stack.enter_context(subprocess.Popen(held, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    stack.callback(process.kill)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process.pid


@contextmanager
def network(folder: Path) -> Iterator[Network]:
    """Make a network within the body, with files in `folder`; skip the test where this machine does not permit it."""
    with ExitStack() as stack:
        try:
            made = Network(folder, stack)
        except LinkNotPossible as error:
            pytest.skip(str(error))
        yield made


def _ip(pid: int, *arguments: str) -> None:
    _checked([*within(pid), "ip", *arguments])


def _checked(command: Sequence[str]) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise LinkNotPossible(f"{' '.join(command)}: {ran.stderr.strip()}")
