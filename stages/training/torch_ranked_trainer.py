"""RankedTrainer: several ranks train on one stream of batches, with DistributedDataParallel or FSDP2.

Rank 0 runs the pipeline. Its SinkTrainer feeds this trainer as it would a TorchTrainer; the others `follow`: each gets
its share of every batch, balanced by tokens, and runs as many micro-batches as any other, empty ones if need be, so
that what all do together matches. The totals that a loss divides by are those of the whole batch, so the step is the
one that a single process makes, but for rounding.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self, TypeVar

from ..._pipeline.errors import PeerLost
from ..._pipeline.resumption import Stateful
from ..._schemas import GroupId, TokenizerIdentity, TrainBatch
from .torch_ranks import decode_share, encode_share, owners
from .torch_trainer import TorchTrainer

__all__ = ["RankedTrainer"]

R = TypeVar("R")

STEP, GATHER, SAVE, RESUME, END, FAILED = range(6)
"""What the leader orders."""


class RankedTrainer:
    """A TorchTrainer on every rank of a torchrun: rank 0 leads, the others follow.

    with RankedTrainer(TorchTrainer(DistributedDataParallel(model), optimizer=adam)) as trainer:
        if trainer.leads:
            anyio.run(run_pipeline, trainer)
        else:
            trainer.follow()

    Args:
        trainer: made alike on every rank, of a model that is wrapped in DistributedDataParallel or was given to
            `fully_shard`; all begin with the same weights.

    Raises:
        ValueError: its model is neither.
    """

    def __init__(self, trainer: TorchTrainer) -> None:
        if trainer.ranks is None:
            raise ValueError(
                "trainer: expected one of a model that its ranks share: wrap it in DistributedDataParallel, or call "
                "fully_shard(model), before the TorchTrainer is made"
            )
        self._trainer = trainer
        self._ranks = trainer.ranks

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Let the others end: as this process does."""
        if self.leads:
            failed = kind is not None and issubclass(kind, Exception)
            with suppress(RuntimeError, PeerLost):
                self._ranks.order(FAILED if failed else END)
        self._ranks.close()

    @property
    def leads(self) -> bool:
        """Whether this is the rank that runs the pipeline."""
        return self._ranks.index == 0

    # -- as the leader -------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> TokenizerIdentity | None:
        """See `TorchTrainer.tokenizer`."""
        return self._trainer.tokenizer

    @property
    def steps(self) -> int:
        """See `TorchTrainer.steps`."""
        return self._trainer.steps

    @property
    def committed(self) -> Mapping[GroupId, int]:
        """See `TorchTrainer.committed`."""
        return self._trainer.committed

    def step(self, batch: TrainBatch) -> dict[str, float]:
        """Train on `batch`, all ranks together; metrics are those of the whole batch, timings those of this rank.

        Raises:
            PeerLost: a rank died; the message names it.
            Exception: what `TorchTrainer.step` raises.
        """
        taken = owners(batch.lengths(), self._ranks.count)
        mine, *theirs = (batch.share(taken == rank) for rank in range(self._ranks.count))
        self._ranks.order(STEP, [encode_share(share) for share in theirs])
        return self._together(lambda: self._trainer.step(mine))

    def weights(self) -> Mapping[str, Any]:
        """See `TorchTrainer.weights`; what is sharded is gathered."""
        self._ranks.order(GATHER)
        return self._together(self._trainer.weights)

    def save(self, folder: str | Path, committed: Mapping[GroupId, int]) -> Path:
        """See `TorchTrainer.save`: the checkpoint is one of a single process, which can resume from it."""
        self._ranks.order(SAVE)
        return self._together(lambda: self._trainer.save(folder, committed))

    def keep(self, state: Mapping[str, Stateful]) -> None:
        """See `TorchTrainer.keep`; only the leader has stages."""
        self._trainer.keep(state)

    def resume(self, checkpoint: str | Path) -> None:
        """See `TorchTrainer.resume`; every rank reads the checkpoint."""
        told = str(Path(checkpoint).absolute()).encode()
        self._ranks.order(RESUME, [told] * (self._ranks.count - 1))
        self._together(lambda: self._trainer.resume(checkpoint))

    def _together(self, work: Callable[[], R]) -> R:
        with self._ranks.connected():
            return work()

    # -- as another ----------------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Do what the leader says until it ends. Ctrl-C and SIGTERM are left to it. Blocks.

        Raises:
            PeerLost: the leader died, or ended by an error; or another rank died.
        """
        with _ignored(signal.SIGINT, signal.SIGTERM):
            while (order := self._ranks.ordered())[0] != END:
                with self._ranks.connected():
                    self._obey(*order)

    def _obey(self, order: int, told: bytes) -> None:
        if order == STEP:
            self._trainer.step(decode_share(told))
        elif order == GATHER:
            self._trainer.weights()
        elif order == SAVE:
            self._trainer.tensors()
        elif order == RESUME:
            self._trainer.resume(told.decode())
        else:
            raise PeerLost(f"rank 0 of {self._ranks.count} ended by an error, which it tells itself")


@contextmanager
def _ignored(*numbers: signal.Signals) -> Iterator[None]:
    """Within the body these signals change nothing."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
