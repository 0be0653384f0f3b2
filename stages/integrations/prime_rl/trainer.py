"""PrimeRLTrainer: prime-rl's trainer as a `Trainer`. A step is done when its weights are written.

prime-rl writes the weights that its step n made into <output>/broadcasts/step_n, and then an empty file STABLE there;
it begins with those of step n − 1 (src/prime_rl/transports/weights/filesystem.py). This file alone reports that it has
trained, so the ledger commits by it. Its own checkpoints keep the model and the optimizer; those of penstock, the
ledger and the pipeline's state.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import finalize

import msgspec
from torch import Tensor

from ...._pipeline.accounting.committed_prompts import CommittedPrompts, CommittedState
from ...._pipeline.durability.resumption import Stateful
from ...._pipeline.errors import InvalidConfig, PeerLost, StepsOfAnotherRun, TrainerSilent
from ...._pipeline.util.checkpoint import verify_checkpoint, write_checkpoint
from ...._schemas import GroupId, TrainBatch
from ...._schemas.conversion import decode_json
from ...._schemas.numbers import finite_number, whole_number
from ...models.torch_weights_file import read_folder
from .micro_batches import pack_for_ranks
from .transports import ROLLOUTS, FileTransport, Transport, ZmqTransport, stop_if_cancelled

STATE = "state.json"

BROADCASTS = "broadcasts"
"""The folder of weights in the output_dir of prime-rl."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Names of transformers for the two tensors that may be one."""

STABLE = "STABLE"
"""The file that prime-rl writes when the weights of a step are whole."""

POLL_S = 0.02

STEP_TIMEOUT_S = 3600.0


class _State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a checkpoint."""

    step: int
    committed: CommittedState
    state: dict[str, dict[str, Any]]


class PrimeRLTrainer:
    """Trains by a trainer of prime-rl that runs beside it. One thread at a time.

    Args:
        to: prime-rl's `output_dir`, for `rollout_transport.type = "filesystem"`; or `tcp://host:port`, for "zmq".
        ranks: data-parallel ranks of its trainer.
        seq_len: its `model.seq_len`: tokens of a micro-batch.
        output: its `output_dir`, with a URL.
        temperature: temperature of the sampling; its trainer divides the logits by it.
        step_timeout_s: bound on one of its steps, and on the start of its trainer.

    Raises:
        InvalidConfig: a URL without `output`, or a number out of range.
    """

    def __init__(
        self,
        to: str | Path,
        ranks: int,
        *,
        seq_len: int,
        output: str | Path | None = None,
        temperature: float = 1.0,
        step_timeout_s: float = STEP_TIMEOUT_S,
    ) -> None:
        is_url = isinstance(to, str) and to.startswith("tcp://")
        if is_url and output is None:
            raise InvalidConfig(
                f"output: expected the output_dir of prime-rl beside {to}, where it writes weights, got None"
            )
        self.ranks: int = whole_number("ranks", ranks)
        self.seq_len: int = whole_number("seq_len", seq_len)
        self.temperature: float = finite_number("temperature", temperature)
        self.step_timeout_s: float = finite_number("step_timeout_s", step_timeout_s)
        self.output: Path = Path(to if output is None else output)
        self._transport: Transport = FileTransport(self.output)
        if is_url:
            self._transport = ZmqTransport(str(to), self.ranks)
            finalize(self, self._transport.close)
        self._steps = 0
        self._is_new = True
        self._committed = CommittedPrompts()
        self._state: dict[str, Stateful] = {}

    def __repr__(self) -> str:
        return f"<PrimeRLTrainer: {self._steps} steps, {self._transport!r}>"

    # -- steps ---------------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Return the optimizer steps done, those before a resumption included."""
        return self._steps

    def step(self, batch: TrainBatch) -> dict[str, float]:
        """Have prime-rl train on `batch` once; return when its new weights are written. Blocks.

        Its metrics are in its own monitors.

        Raises:
            InvalidRecord: the batch lacks a column, none of its tokens trains, or a sequence is longer than `seq_len`.
            TrainerSilent: prime-rl has not finished the step within `step_timeout_s`.
            PeerLost: a rank has gone meanwhile; with files, it is silent.
        """
        step = self._steps + 1
        micro_batches = pack_for_ranks(batch, self.ranks, self.seq_len, self.temperature)
        self._check_is_next(step)
        self._transport.send(step, micro_batches, self.step_timeout_s)
        self._wait_for_weights(step)
        self._steps = step
        return {"prime_rl/micro_batches": float(sum(map(len, micro_batches)))}

    def _check_is_next(self, step: int) -> None:
        """Check that there are no weights of `step` or a later one: they would count as those of this run."""
        if self._is_new and (later := [path for path in self._folders(BROADCASTS) if _step_of(path) >= step]):
            raise StepsOfAnotherRun(
                f"expected no weights of step {step} in {self.output} before it is trained, got "
                f"{', '.join(sorted(path.name for path in later))}: resume that run, or give another output_dir"
            )
        self._is_new = False

    def _wait_for_weights(self, step: int) -> Path:
        """Return the folder of the weights that `step` made, when they are whole."""
        folder = self.output / BROADCASTS / f"step_{step}"
        stable, until = folder / STABLE, time.monotonic() + self.step_timeout_s
        while not stable.exists():
            # A rank leaves when it has written its last weights.
            if step > 0 and (lost := self._transport.lost_ranks()) and not stable.exists():
                raise PeerLost(
                    f"step {step}: ranks {lost} of prime-rl have gone before {stable} was there: see its log"
                )
            if time.monotonic() > until:
                written = sorted(map(_step_of, self._folders(BROADCASTS)))
                raise TrainerSilent(
                    f"step {step}: expected prime-rl to write {stable} within {self.step_timeout_s} s, got weights of "
                    f"steps {written}: see the log of its trainer, which must have max_steps of {step} or more, "
                    f"weight_broadcast.type filesystem, and output_dir {self.output}"
                )
            stop_if_cancelled()
            time.sleep(POLL_S)
        return folder

    def _folders(self, name: str) -> list[Path]:
        """Return the folders of steps in a folder of prime-rl."""
        found = (self.output / name).glob("step_*")
        return [path for path in found if path.name.removeprefix("step_").isdigit()]

    def weights(self) -> dict[str, Tensor]:
        """Return the weights that the last step made, or that prime-rl began with, by their names in transformers.

        Blocks until they are whole.

        Raises:
            TrainerSilent: they are not, within `step_timeout_s`.
            WeightsDamaged: a file cannot be read.
        """
        folder = self._wait_for_weights(self._steps)
        tensors = read_folder(folder)
        if EMBEDDING in tensors:
            tensors.setdefault(HEAD, tensors[EMBEDDING])  # tied: transformers writes them once
        return tensors

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @property
    def committed(self) -> CommittedPrompts:
        """Return the trajectories that were trained before it resumed."""
        return self._committed

    def keep(self, state: Mapping[str, Stateful]) -> None:
        """Include the state of these objects in checkpoints, by name."""
        self._state |= state

    def save(self, folder: Path, committed: Mapping[GroupId, int]) -> Path:
        """Write a checkpoint without weights into `folder`, and return its path. Blocks.

        Raises:
            DiskFull, NotWritable, OutOfFileDescriptors: it cannot be written; earlier checkpoints are intact.
        """
        state = _State(
            step=self._steps,
            committed=CommittedPrompts(committed).state,
            state={name: dict(kept.state_dict()) for name, kept in self._state.items()},
        )
        encoded = msgspec.json.encode(state)
        return write_checkpoint(folder, self._steps, lambda into: _write(into / STATE, encoded))

    def resume(self, checkpoint: Path) -> None:
        """Resume from a checkpoint, and remove prime-rl's files of later steps: these are trained again.

        Its trainer must resume from its own checkpoint of the same step.

        Raises:
            CheckpointDamaged: a file is not as it was written.
            ValueError: the checkpoint contains the state of other objects.
            OSError: it cannot be read, or a later step not be removed.
        """
        verify_checkpoint(checkpoint)
        kept = decode_json((checkpoint / STATE).read_bytes(), _State)
        if kept.state.keys() != self._state.keys():
            raise ValueError(f"expected a checkpoint with state {sorted(self._state)}, got {sorted(kept.state)}")
        for path in [*self._folders(ROLLOUTS), *self._folders(BROADCASTS)]:
            if _step_of(path) > kept.step:
                shutil.rmtree(path)
        for name, stateful in self._state.items():
            stateful.load_state_dict(kept.state[name])
        self._steps, self._committed = kept.step, CommittedPrompts.of_state(kept.committed)


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))
