"""RankedTrainer: several ranks train on one stream of batches, with DistributedDataParallel or FSDP2.

Rank 0 runs the pipeline. Its SinkTrainer feeds this trainer as it would a TorchTrainer; the others `follow`: each gets
its share of every batch, whole groups, as even in tokens as these allow. All run the same number of micro-batches, some
of them empty, so that their collective operations match. The totals in the denominator of a loss are those of the whole
batch, so the step equals that of a single process up to rounding.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..._pipeline.durability.resumption import Stateful
from ..._pipeline.durability.run_changes import StageFacts
from ..._pipeline.errors import InvalidConfig, PeerLost
from ..._pipeline.util.checkpoint import verify_checkpoint
from ..._pipeline.util.exception_groups import single_exception
from ..._pipeline.util.signals import STOP_SIGNALS
from ..._pipeline.util.user_code import call_user
from ..._schemas import GroupId, TokenizerIdentity, TrainBatch
from .shares import decode_share, encode_share, shares
from .torch_saved_tensors import Address
from .torch_trainer import TorchTrainer

STEP, STEP_KEEPING_LOGPROBS, GATHER, RESUME, END, FAILED = range(6)
"""Commands of the leader."""

_decode_address = msgspec.msgpack.Decoder(Address).decode


class RankedTrainer:
    """A TorchTrainer on every rank of a torchrun: rank 0 leads, the others follow.

    with RankedTrainer(TorchTrainer(DistributedDataParallel(model), optimizer=adam)) as trainer:
        if trainer.leads:
            anyio.run(run_pipeline, trainer)
        else:
            trainer.follow()

    Args:
        trainer: made in the same way on every rank, of a model that is wrapped in DistributedDataParallel or was given
            to `fully_shard`; all begin with the same weights.

    Raises:
        InvalidConfig: its model is neither.
    """

    def __init__(self, trainer: TorchTrainer) -> None:
        if trainer.ranks is None:
            raise InvalidConfig(
                "trainer: expected one of a model that its ranks share: wrap it in DistributedDataParallel, or call "
                "fully_shard(model), before the TorchTrainer is made"
            )
        self._trainer = trainer
        self._ranks = trainer.ranks
        self.keeps_logprobs = False
        """True on the leader for the next steps to keep `logprobs`; see `TorchTrainer.keeps_logprobs`."""
        self.logprobs: NDArray[np.float32] | None = None
        """On the leader, [N] the log-probabilities of the last batch; see `TorchTrainer.logprobs`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """End the other ranks, with an error if the body raised one."""
        if self.leads and isinstance(error, Exception):
            self._ranks.fail(FAILED, _loss_of(error))
        elif self.leads:
            with suppress(RuntimeError):
                self._ranks.end(END)
        self._ranks.close()

    @property
    def leads(self) -> bool:
        """Return whether this is the rank that runs the pipeline."""
        return self._ranks.index == 0

    # -- on the leader -------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> TokenizerIdentity | None:
        """Return the identity of the tokenizer; see `TorchTrainer.tokenizer`."""
        return self._trainer.tokenizer

    def keep_tokenizer(self, tokenizer: object) -> None:
        """Include the tokenizer in checkpoints; see `TorchTrainer.keep_tokenizer`."""
        self._trainer.keep_tokenizer(tokenizer)

    @property
    def steps(self) -> int:
        """Return the number of steps; see `TorchTrainer.steps`."""
        return self._trainer.steps

    @property
    def committed(self) -> Mapping[GroupId, int]:
        """Return the trained trajectories; see `TorchTrainer.committed`."""
        return self._trainer.committed

    @property
    def needs_columns(self) -> tuple[str, ...]:
        """Return the columns that the loss needs; see `TorchTrainer.needs_columns`."""
        return self._trainer.needs_columns

    def facts(self) -> StageFacts:
        """Return the facts of the leader's trainer; see `TorchTrainer.facts`."""
        return self._trainer.facts()

    def step(self, batch: TrainBatch) -> dict[str, float]:
        """Train on `batch`, all ranks together; metrics are those of the whole batch, timings those of this rank.

        Raises:
            PeerLost: a rank died; the message names it.
            Exception: see `TorchTrainer.step`.
        """
        (mine, *theirs), owners = shares(batch, self._ranks.count)
        command = STEP_KEEPING_LOGPROBS if self.keeps_logprobs else STEP
        self.logprobs = None
        with self._ranks.command(command, [encode_share(share) for share in theirs]):
            metrics, of_ranks = self._step(command, mine)
        if of_ranks:
            self.logprobs = np.zeros(len(batch.tokens), np.float32)
            for rank, logprobs in enumerate(of_ranks):
                self.logprobs[owners == rank] = np.frombuffer(logprobs, np.float32)
        return metrics

    def _step(self, command: int, share: TrainBatch) -> tuple[dict[str, float], list[bytes]]:
        """Train on a share, on every rank; return metrics, and the log-probabilities of all if they are to be kept."""
        self._trainer.keeps_logprobs = command == STEP_KEEPING_LOGPROBS
        metrics = self._trainer.step(share)
        own = self._trainer.logprobs
        return metrics, [] if own is None else self._ranks.gathered(own.tobytes())

    def weights(self) -> Mapping[str, Any]:
        """Return the tensors; sharded ones are gathered one by one, as they are read. See `TorchTrainer.weights`."""
        return self._trainer.weights(self._gather)

    def save(self, folder: str | Path, committed: Mapping[GroupId, int]) -> Path:
        """Write a checkpoint; a single process can resume from it too. See `TorchTrainer.save`."""
        return self._trainer.write(folder, committed, self._gather)

    def _gather(self, address: Address) -> Tensor:
        with self._ranks.command(GATHER, [msgspec.msgpack.encode(address)] * (self._ranks.count - 1)):
            return self._trainer.gather(address)

    def keep(self, state: Mapping[str, Stateful]) -> None:
        """Include other state in checkpoints, on the leader only; see `TorchTrainer.keep`."""
        self._trainer.keep(state)

    def resume(self, checkpoint: str | Path) -> None:
        """Resume from a checkpoint: the leader verifies it, every rank reads it. See `TorchTrainer.resume`."""
        verify_checkpoint(checkpoint)
        self.resume_verified(checkpoint)

    def resume_verified(self, checkpoint: str | Path) -> None:
        """Resume on every rank from a checkpoint that `verify_checkpoint` has accepted; see `resume`."""
        path = str(Path(checkpoint).absolute()).encode()
        with self._ranks.command(RESUME, [path] * (self._ranks.count - 1)):
            self._trainer.resume_verified(checkpoint)

    async def watch(self) -> None:
        """Wait until another rank is lost while the leader waits for a batch. SinkTrainer does so.

        Raises:
            PeerLost: a rank died or hangs; the message names it.
        """
        await self._ranks.watch()

    # -- on other ranks ------------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Execute commands of the leader until it ends, ignoring the stop signals: the leader handles these. Blocks.

        Raises:
            PeerLost: the leader died, or ended with an error; or another rank died.
            UserCodeExited: the model, the loss or the optimizer raised an exception that is no error, as SystemExit.
            Exception: see `TorchTrainer.step`.
        """
        with _ignored(*STOP_SIGNALS):
            while (command := self._ranks.receive_command())[0] != END:
                with self._ranks.connected():
                    call_user(self._execute, *command)

    def _execute(self, command: int, payload: bytes) -> None:
        if command in {STEP, STEP_KEEPING_LOGPROBS}:
            self._step(command, decode_share(payload))
        elif command == GATHER:
            self._trainer.gather(_decode_address(payload))
        elif command == RESUME:
            self._trainer.resume_verified(payload.decode())
        else:
            raise PeerLost(payload.decode() or f"rank 0 of {self._ranks.count} ended with an error: see its output")


def _loss_of(error: BaseException) -> str:
    """Return the message of the PeerLost that caused `error`; empty if another exception did."""
    cause: BaseException | None = single_exception(error)
    while cause is not None and not isinstance(cause, PeerLost):
        cause = cause.__cause__
    return "" if cause is None else str(cause)


@contextmanager
def _ignored(*numbers: signal.Signals) -> Iterator[None]:
    """Ignore these signals within the body."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
