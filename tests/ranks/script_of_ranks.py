"""Ranks on gloo, of DistributedDataParallel and of FSDP2, beside a single process; and some of which one dies.

    python -m tests.ranks.script_of_ranks FOLDER

Torch takes seconds to import, so one process starts every rank as a child. What is found is written to
FOLDER/<kind>.json by rank 0; the error of a rank that was left alone to FOLDER/<kind>-left.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import torch
import torch.distributed as dist
from tests.processes.exiting_stages import EXITS
from tests.tiny_model import ReadModel
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from penstock import GroupId, ReceiveChannel, SendChannel, SinkTrainer, TrainBatch, TrajectoryGroup, source
from penstock.errors import RunStopped
from penstock.losses import KL, ClipCov, KLCov, PPOClip
from penstock.testing import batch, group
from penstock.torch import Critic, RankedTrainer, TorchTrainer

STEPS = 3
TRAINED = {GroupId("test", "0"): 0b111}

GROUPS = {"a": [3, 37, 5], "b": [2], "c": [20, 20], "d": [9, 1, 1, 1], "e": [4]}
"""Lengths of the completions of each group; every sequence has two more tokens, those of its prompt."""

RAISED = {**EXITS, "StopIteration": StopIteration}
"""Exceptions of a loss, by name: an ordinary one, and those that would end a task, a thread or a process."""

COLUMNS = ("advantages", "behavior_logprobs", "ref_logprobs")


def made(seed: int, *, judged: bool = False) -> TrainBatch:
    """Return six sequences of very different lengths; the third batch has a single one, so that a rank has none.

    It has rewards in place of advantages if it is `judged`: by a critic.
    """
    numbers = np.random.default_rng(seed)
    lengths = [5] if seed == 2 else [3, 37, 5]
    packed = batch(groups=1 if seed == 2 else 2, completion_lengths=lengths)
    tokens = len(packed.tokens)
    return msgspec.structs.replace(
        packed,
        tokens=numbers.integers(0, 11, tokens).astype(np.int32),
        advantages=None if judged else numbers.standard_normal(tokens).astype(np.float32),
        rewards=numbers.standard_normal(len(packed)).astype(np.float32) if judged else packed.rewards,
        behavior_logprobs=np.where(packed.loss_mask, numbers.normal(-2.4, 0.2, tokens), 0).astype(np.float32),
        ref_logprobs=np.where(packed.loss_mask, numbers.normal(-2.4, 0.2, tokens), 0).astype(np.float32),
    )


def fsdp(offload: OffloadPolicy, model: ReadModel) -> ReadModel:
    for block in model.mlp:
        fully_shard(block, offload_policy=offload)
    return fully_shard(model, offload_policy=offload)  # type: ignore[return-value]


def ddp() -> DistributedDataParallel:
    return DistributedDataParallel(ReadModel())


def value_model() -> ReadModel:
    model = ReadModel(seed=3)
    torch.manual_seed(3)
    model.head = nn.Linear(model.head.in_features, 1)
    return model


SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.9)
"""Adam makes as much of rounding as of a gradient."""


def trainer(model: Any, values: Any = None) -> TorchTrainer:
    """Return a trainer of `model`, with a critic if there is a model of `values`."""
    slow = partial(torch.optim.SGD, lr=0.03, momentum=0.9)
    critic = None if values is None else Critic(model=values, optimizer=slow, gamma=0.9, gae_lambda=0.8)
    loss = PPOClip() + 0.1 * KL() + ClipCov(share=0.1, least=0.0) + KLCov(share=0.2)
    return TorchTrainer(model, optimizer=SGD, loss=loss, max_grad_norm=0.5, micro_batch_tokens=48, critic=critic)


def plain(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith(("timing_s/", "weights/"))}


def listed(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in weights.items()}


# -- what ranks do -----------------------------------------------------------------------------------------------------


def train(share: Callable[[ReadModel], Any], folder: Path, kind: str, *, judged: bool = False) -> None:
    """Train as a user does: the leader feeds the trainer, the other follows; both count the passes of the model."""
    shared, runs = share(ReadModel()), [0]
    shared.register_forward_pre_hook(lambda *_: runs.__setitem__(0, runs[0] + 1))
    found: dict[str, Any] = {}
    values = share(value_model()) if judged else None
    with RankedTrainer(trainer(shared, values)) as ranked:
        if ranked.leads:
            found = lead(ranked, folder / kind, judged=judged)
        else:
            ranked.follow()
    counted = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(counted, torch.tensor(runs))
    if ranked.leads:
        found["runs"] = [int(each) for each in counted]
        (folder / f"{kind}.json").write_text(json.dumps(found))


def lead(ranked: RankedTrainer, folder: Path, *, judged: bool) -> dict[str, Any]:
    """Train three steps, a checkpoint, a step, and that step again from the checkpoint, beside a single process."""
    values, other_values = (value_model(), value_model()) if judged else (None, None)
    batch_of = partial(made, judged=judged)
    alone = trainer(ReadModel(), values)
    steps, logprobs = list[Any](), list[Any]()
    for seed in range(STEPS):
        alone.keeps_logprobs = ranked.keeps_logprobs = seed != 1  # with the batch of a single sequence too
        steps.append([plain(each.step(batch_of(seed))) for each in (alone, ranked)])
        logprobs.append([None if each.logprobs is None else each.logprobs.tolist() for each in (alone, ranked)])
    weights = listed(alone.weights()), listed(ranked.weights())
    checkpoint = ranked.save(folder, TRAINED)
    later = plain(ranked.step(batch_of(9)))
    single = trainer(ReadModel(seed=5), other_values)
    single.resume(checkpoint)
    from_checkpoint = listed(single.weights())
    critics = [{} if each is None else listed(each.state_dict()) for each in (values, other_values)]
    ranked.resume(checkpoint)
    again = [later, plain(ranked.step(batch_of(9))), plain(single.step(batch_of(9)))]
    steps_done = [ranked.steps, single.steps]
    ranked.step(batch_of(7))
    ranked.resume(single.save(folder / "of-one", TRAINED))
    return {
        "steps": steps,
        "logprobs": logprobs,
        "weights": weights,
        "from_checkpoint": from_checkpoint,
        "critics": critics,
        "later": again,
        "steps_done": steps_done,
        "from_one": (listed(single.weights()), listed(ranked.weights())),
        "of_one": [plain(trained.step(batch_of(8))) for trained in (single, ranked)],
        "committed": single.committed == ranked.committed == TRAINED,
    }


class Recording(TorchTrainer):
    """Records the groups of every step: ids, sequences and tokens."""

    def __init__(self) -> None:
        super().__init__(ddp(), optimizer=partial(torch.optim.SGD, lr=0.3), loss=PPOClip())
        self.trained: list[list[tuple[str, int, int]]] = []

    def step(self, batch: TrainBatch) -> dict[str, float]:
        tokens = np.bincount(batch.group_of_sequence(), batch.lengths(), len(batch.groups)).astype(int).tolist()
        taken = zip(batch.groups, tokens, strict=True)
        self.trained.append([(of.instance_id, of.sequences, count) for of, count in taken])
        return super().step(batch)


def divide(folder: Path, kind: str) -> None:
    """Train a batch of `GROUPS` and one of a single group; each rank writes the groups that it trained."""
    raw = Recording()
    with RankedTrainer(raw) as ranked:
        if ranked.leads:
            ranked.step(TrainBatch.pack(sampled(name, lengths) for name, lengths in GROUPS.items()))
            ranked.step(TrainBatch.pack([sampled("a", GROUPS["a"])]))
        else:
            ranked.follow()
    (folder / f"{kind}-{dist.get_rank()}.json").write_text(json.dumps(raw.trained))


def sampled(name: str, lengths: list[int]) -> TrajectoryGroup:
    """Return a group that trains."""
    zeros = np.zeros(sum(lengths) + 2 * len(lengths), np.float32)
    columns: dict[str, Any] = dict.fromkeys(COLUMNS, zeros)
    made_up = group(instance_id=name, completion_lengths=lengths, **columns)
    return msgspec.structs.replace(made_up, tokens=made_up.tokens % 11)


def die(rank: int, folder: Path, kind: str) -> None:
    """Kill `rank` in the second step; the other one writes its error to a file."""
    shared = ddp()

    def kill(*_: Any) -> None:
        if dist.get_rank() == rank and ranked.steps == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    shared.register_forward_pre_hook(kill)
    raw = trainer(shared)
    ranked = RankedTrainer(raw)
    try:
        with ranked:
            if not ranked.leads:
                ranked.follow()
            for seed in range(2):
                ranked.step(made(seed))
    except Exception as error:  # noqa: BLE001 (whatever it is told)
        (folder / f"{kind}-left").write_text(f"{type(error).__name__}: {error}")
        os._exit(0)  # a remaining rank cannot leave the process group


@dataclass(frozen=True)
class Exits(PPOClip):
    """A loss that raises on the second rank."""

    raises: str = ""

    def per_token(self, scored: Any) -> Any:
        if dist.get_rank() == 1:
            raise RAISED[self.raises]("in a loss")
        return super().per_token(scored)


def leave(raised: str, folder: Path, kind: str) -> None:
    """Train with a loss that raises on the second rank; both write their errors to files."""
    raw = TorchTrainer(ddp(), optimizer=partial(torch.optim.SGD, lr=0.3), loss=Exits(raises=raised))
    ended = "returned"
    try:
        with RankedTrainer(raw) as ranked:
            if ranked.leads:
                ranked.step(made(0))
            else:
                ranked.follow()
    except BaseException as error:  # noqa: BLE001 (whatever it is)
        ended = f"{type(error).__name__}: {error}"
    (folder / f"{kind}-{dist.get_rank()}").write_text(ended)
    os._exit(0)  # as above


class Silent:
    """Sends nothing."""

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:  # noqa: ARG002 (the form of a source)
        await anyio.sleep_forever()


def lose(folder: Path, kind: str) -> None:
    """Kill the last rank while the leader waits for a batch; the others write their errors to files."""
    ranked = RankedTrainer(trainer(ddp()))
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        with ranked:
            if ranked.leads:
                anyio.run(source(Silent()).then(Pack()).sink(SinkTrainer(ranked)).run)
            else:
                ranked.follow()
    except Exception as error:  # noqa: BLE001 (whatever it is told)
        (folder / f"{kind}-{dist.get_rank()}").write_text(f"{type(error).__name__}: {error}")
        os._exit(0)  # as above


class Stopping(RankedTrainer):
    """Has all ranks get SIGTERM when its third step begins."""

    def __init__(self, pids: list[int]) -> None:
        super().__init__(trainer(ddp()))
        self._pids = pids

    def step(self, batch: TrainBatch) -> dict[str, float]:
        if self.steps == 2:
            for pid in self._pids:
                os.kill(pid, signal.SIGTERM)
        return super().step(batch)


class Forever:
    """Sends groups that train."""

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        for number in itertools.count():
            await outbox.send(sampled(str(number), [3, 5]))


class Pack:
    """Makes a batch of every group."""

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrainBatch]) -> None:
        async for each in inbox:
            await outbox.send(TrainBatch.pack([each]))


def stop(folder: Path, kind: str) -> None:
    """Stop both ranks by a signal in a run; each writes its end to a file."""
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    ended = "returned"
    try:
        with Stopping([int(pid) for pid in pids]) as ranked:
            if ranked.leads:
                pipeline = source(Forever()).then(Pack()).sink(SinkTrainer(ranked))
                anyio.run(partial(pipeline.run, folder=folder / kind))
            else:
                ranked.follow()
    except RunStopped as stopped:
        ended = str(stopped)
    (folder / f"{kind}-{dist.get_rank()}").write_text(ended)


# -- processes ---------------------------------------------------------------------------------------------------------


def start(folder: Path, kind: str, rank: int, count: int, work: Callable[[Path, str], None]) -> int:
    """Fork a child that is `rank` of `count`; return its process id."""
    pid = os.fork()
    if not pid:
        try:
            dist.init_process_group("gloo", init_method=f"file://{folder}/{kind}-met", rank=rank, world_size=count)
            work(folder, kind)
            dist.destroy_process_group()
        except BaseException:  # noqa: BLE001 (the child must not go on as its parent)
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


def ended_ranks(pids: Mapping[tuple[str, int], int]) -> dict[tuple[str, int], int]:
    """Wait until all ranks have ended; return their exit codes."""
    return {who: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for who, pid in pids.items()}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*returned a view tensor")
    trainer(ReadModel())  # what torch imports late, for all children
    kinds: dict[str, Callable[[Path, str], None]] = {
        "ddp": partial(train, DistributedDataParallel),
        "critic-ddp": partial(train, DistributedDataParallel, judged=True),
        "critic-fsdp": partial(train, partial(fsdp, OffloadPolicy()), judged=True),
        "fsdp": partial(train, partial(fsdp, OffloadPolicy())),
        "offloaded": partial(train, partial(fsdp, CPUOffloadPolicy(pin_memory=False))),  # pinning needs a GPU
        "leader": partial(die, 0),
        "follower": partial(die, 1),
        "stopped": stop,
        "divided": divide,
    }
    kinds |= {raised: partial(leave, raised) for raised in RAISED}
    pids = {(kind, rank): start(folder, kind, rank, 2, work) for kind, work in kinds.items() for rank in range(2)}
    pids |= {("third", rank): start(folder, "third", rank, 3, lose) for rank in range(3)}
    codes = ended_ranks(pids)
    killed = {("leader", 0), ("follower", 1), ("third", 2)}
    assert codes == {who: -signal.SIGKILL if who in killed else 0 for who in codes}, codes


if __name__ == "__main__":
    main(Path(sys.argv[1]))
