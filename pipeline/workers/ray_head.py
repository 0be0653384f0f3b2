"""Watch the head of a Ray cluster: notice its loss long before Ray does, and while there is time for a checkpoint.

Knows no worker. Ray's own calls wait for a head that is lost, so it is asked over a connection of its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio

from ..accounting.telemetry import get_logger
from ..errors import ClusterLost
from ..util.exception_groups import unwrap_first

log = get_logger("penstock.pipeline")

HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The beginning of an HTTP/2 connection, as every call of gRPC makes one: a head that runs answers, or hangs up."""

PROBE_INTERVAL_S = 1.0
PROBE_TIMEOUT_S = 5.0

LOST_AFTER = 3
"""Attempts that must fail in a row: one can fail because this process was stopped, or busy."""

LOST_AFTER_S = 15.0
"""Seconds that they must fail for."""


class RayHead:
    """The head of a cluster, by its address for the nodes of the cluster."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.lost = False
        """True once it has not answered for too long: calls of Ray would wait for it."""

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Cancel the body if the head is lost.

        Raises:
            ClusterLost: it did not answer for 15 seconds.
        """
        with unwrap_first():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch)
                yield
                tasks.cancel_scope.cancel()

    async def _watch(self) -> None:
        failed, since, cause = 0, 0.0, ""
        while failed < LOST_AFTER or anyio.current_time() - since < LOST_AFTER_S:
            began = anyio.current_time()
            cause = await self._probe()
            failed = failed + 1 if cause else 0
            if failed == 1:
                since = began
                log.warning("ray_head_silent", address=self.address, cause=cause)
            await anyio.sleep(PROBE_INTERVAL_S)
        self.lost = True
        raise ClusterLost(
            f"expected an answer of the head of the Ray cluster at {self.address}, got none for "
            f"{anyio.current_time() - since:.0f} s: {cause}; start the cluster, and the run again"
        )

    async def _probe(self) -> str:
        """Return the reason why the head gives no answer; an empty text if it gives one."""
        host, _, port = self.address.rpartition(":")
        try:
            with anyio.fail_after(PROBE_TIMEOUT_S):
                async with await anyio.connect_tcp(host.strip("[]"), int(port)) as stream:
                    await stream.send(HELLO)
                    with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                        await stream.receive(1)
        except TimeoutError:
            return f"no answer within {PROBE_TIMEOUT_S:g} s"
        except OSError as error:
            return str(error)
        except anyio.BrokenResourceError:  # it hung up
            return ""
        return ""
