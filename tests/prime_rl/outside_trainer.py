"""A trainer that has prime-rl's transports and folders, and trains nothing: for tests that run without prime-rl.

`against_prime_rl.py` holds FIELDS against prime-rl's own type, and runs its own receivers and loss in this one's place.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
import zmq
from safetensors.torch import save_file
from tests.failsafe import FAILSAFE_S

FIELDS: tuple[str, ...] = (
    "input_ids",
    "loss_mask",
    "advantages",
    "inference_logprobs",
    "position_ids",
    "sequence_lengths",
    "temperatures",
    "env_names",
    "seq_lens",
    "ref_logprobs",
    "routed_experts",
    "mm_kwargs",
    "mm_token_type_ids",
    "rl_weights",
    "ce_weights",
    "ref_kl_weights",
)
"""The fields of prime-rl's MicroBatch, in the order of its message."""

Received = dict[str, Any]
"""A micro-batch by its fields; those at the end that are None may be absent."""


class OutsideTrainer:
    """Receives micro-batches and writes the weights of each step: one tensor, `w`, which is the step.

    Args:
        output: the output_dir.
        ranks: its data-parallel ranks.
        url: where its ranks subscribe; None for files.
        resumed_at: the step whose checkpoint it resumed from.
        last: the step after which it ends.
    """

    def __init__(
        self, output: Path, ranks: int = 1, url: str | None = None, resumed_at: int = 0, last: int | None = None
    ) -> None:
        self.steps: list[list[list[Received]]] = []
        """The micro-batches of each rank, of each step."""
        self._output, self._ranks, self._url = output, ranks, url
        self._step, self._last = resumed_at, last
        self._stopped = threading.Event()

    @contextmanager
    def running(self) -> Iterator[OutsideTrainer]:
        """Run it in a thread within the body."""
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield self
        finally:
            self._stopped.set()
            thread.join(FAILSAFE_S)

    def _run(self) -> None:
        receive = self._files() if self._url is None else self._messages(self._url)
        write_weights(self._output, self._step)
        for received in receive:
            self._step += 1
            self.steps.append([decoded(data) for data in received])
            write_weights(self._output, self._step)
            if self._step == self._last:
                receive.close()
                return

    def _files(self) -> Generator[list[bytes], None, None]:
        while True:
            folder = self._output / "rollouts" / f"step_{self._step + 1}"
            paths = [folder / f"rank_{rank}.bin" for rank in range(self._ranks)]
            while not all(path.exists() for path in paths):
                if self._stopped.wait(0.001):
                    return
            yield [path.read_bytes() for path in paths]

    def _messages(self, url: str) -> Generator[list[bytes], None, None]:
        host, _, port = url.rpartition(":")
        with zmq.Context() as context, ExitStack() as opened:
            sockets = []
            for rank in range(self._ranks):
                socket, said = (opened.enter_context(context.socket(kind)) for kind in (zmq.SUB, zmq.PUSH))
                said.linger = 0
                socket.connect(url)
                socket.subscribe(f"data_rank|{rank}|")
                said.connect(f"{host}:{int(port) + 1}")
                said.send(str(rank).encode())
                sockets.append(socket)
            while not self._stopped.is_set():
                if all(socket.poll(1) for socket in sockets):
                    yield [socket.recv_multipart()[1] for socket in sockets]


def decoded(data: bytes) -> list[Received]:
    """Return the micro-batches of a message, as plain values."""
    return [dict(zip(FIELDS, fields, strict=False)) for fields in msgspec.msgpack.decode(data)]


def write_weights(output: Path, step: int) -> None:
    """Write the weights of `step` as prime-rl does: a file, and then STABLE."""
    folder = output / "broadcasts" / f"step_{step}"
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"w": torch.full((2,), float(step))}, folder / "model.safetensors")
    (folder / "STABLE").touch()
