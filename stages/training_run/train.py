"""`train`: the run that a configuration describes, in a folder.

    <folder>/checkpoints/   written by the trainer; the last one loads with transformers and vLLM
    <folder>/config.json    the configuration, with every default; see `run_changes` for those of continued parts
    <folder>/metrics.jsonl  a line for each step
    <folder>/samples.jsonl  the best and the worst of some steps and of each evaluation, as text
    <folder>/summary.json   accuracy before and after, seconds, the ledger; written once the model before training is
                            evaluated, and at the end

A run whose folder holds a checkpoint goes on from it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import msgspec
from msgspec import structs

from ..._pipeline.accounting.evaluations import STEP, Evaluations
from ..._pipeline.accounting.telemetry import Metrics, get_logger
from ..._pipeline.channels.keys import SECRET_BYTES, ChannelKey
from ..._pipeline.channels.tcp_address import bracketed
from ..._pipeline.durability.resumption import CHECKPOINTS
from ..._pipeline.errors import PeerLost, PenstockError, ServerFailed
from ..._pipeline.graph.context import Worker
from ..._pipeline.graph.report import Report
from ..._pipeline.runtime.stop_signals import stoppable
from ..._pipeline.util.blocking import enter_in_thread
from ..._pipeline.util.checkpoint import checkpoint_of
from ..._pipeline.util.extras import extra
from ..._pipeline.util.host_lock import host_lock
from ..._pipeline.util.json_file import read_json_or_set_aside, write_json
from ..._pipeline.util.named_objects import call_object, import_object
from ..._pipeline.util.os_errors import explaining_os_errors
from ..._pipeline.view.watching import View, say
from ..._pipeline.weights.weight_address import WeightAddress
from ..._pipeline.workers.join import Program, key_of
from ..._pipeline.workers.ray_worker import node_address
from ..._pipeline.workers.restart_budget import RestartBudget
from ..._schemas.choices import check_choice
from ..contracts.engine_publisher import EnginePublisher
from ..contracts.policies import Policy
from ..sink.best_checkpoint import best_checkpoint
from ..sink.sink_trainer import WeightSink
from ..tokenizers.end_tokens import named
from .config_changes import refuse_changes, values_of
from .own_rank import follows, is_rank
from .replay import refuse_other_start
from .run_config import PlacementConfig, RunConfig

if TYPE_CHECKING:
    from ..._pipeline.weights.weight_publisher import WeightPublisher
    from ..models.hf_model import HFModel
    from ..training.torch_ranked_trainer import RankedTrainer
    from ..training.torch_trainer import TorchTrainer
    from .torch_parts import RunParts

log = get_logger("penstock.run")

SUMMARY = "summary.json"


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run, as in summary.json."""

    accuracy_before: float | None = None
    """Share of right completions of the prompts kept apart, in all sets of them, before training: mean@n. None if none
    are kept apart, or their evaluation failed."""
    accuracy_after: float | None = None
    """The same after the last step; None also if the run ended before it."""
    reward_before: float | None = None
    """Mean reward of these completions before training."""
    reward_after: float | None = None
    seconds: float = 0.0
    """Duration, evaluations and all earlier parts of a continued run included."""
    seed: int = 0
    steps: int = 0
    """Optimizer steps, those of earlier parts included."""
    stop_reason: str = ""
    nothing_learned: str = ""
    """The constant quantity, if no step of the last part with steps had a gradient from rewards; else empty."""
    checkpoint: str = ""
    """The last checkpoint."""
    best: str = ""
    """The checkpoint with the best evaluation; empty if none was evaluated during training."""
    ledger: dict[str, Any] = {}
    """{admitted, in_flight, ended: {state: count}} of the last part of the run."""

    def __str__(self) -> str:
        """Return the summary in a few lines."""
        lines = [f"{self.steps} steps in {self.seconds:.0f} s: {self.stop_reason}"]
        if self.accuracy_before is not None and self.accuracy_after is not None:
            lines.append(
                f"accuracy of prompts kept apart: {self.accuracy_before:.1%} before, {self.accuracy_after:.1%} after"
            )
        if self.nothing_learned:
            lines.append(f"learned nothing: {self.nothing_learned}")
        if self.checkpoint:
            lines.append(f"model: {self.checkpoint}")
        if self.best:
            lines.append(f"best of evaluation: {self.best}")
        return "\n".join(lines)


async def train(config: RunConfig, *, view: View | None = "auto") -> Summary:
    """Train as configured, or continue the run in `config.folder`; return its summary.

    SIGTERM, Ctrl-C and SIGHUP stop it at any moment, as they do `Pipeline.run`; before the first step and after the
    last one, they cancel the preparation or the evaluation.

    With `placement.trainers` it is called on every rank; those but rank 0 follow that one, and return an empty summary.

    After a server of `placement.servers` died, the run goes on from its last checkpoint with others,
    `placement.restarts` times within an hour; on ranks, whoever started them starts them again.

    Args:
        config: see `load_run_config`.
        view: see `Pipeline.run`; it also shows the work before the first step. None is silent.

    Raises:
        InvalidConfig: a value does not fit the model, the data or the machine, or `view` is unknown.
        RunDiffers: the run in the folder has other values of keys that are refused, and `allow_changes` is false.
        MissingExtra: the extra `train` is not installed.
        PeerLost: another rank died.
        ServerFailed: a server did not start, or servers died too often.
        PenstockError: see `Pipeline.run`.
    """
    if view is not None:
        check_choice("view", view, View)
    if follows(config):
        return _followed(config)
    async with stoppable():
        budget = RestartBudget(0 if is_rank() else config.placement.restarts)
        while True:
            try:
                return await _train(config, view)
            except ServerFailed as error:
                if not error.was_ready or not budget.take(now := time.monotonic()):
                    raise
                log.warning("server_died", server=error.server, how=str(error), restarts_left=budget.left(now))


async def _train(config: RunConfig, view: View | None) -> Summary:
    began = time.monotonic()
    await anyio.to_thread.run_sync(refuse_changes, config)
    if config.prepare is not None:
        await say(view, f"calling {config.prepare}, which prepares the run")
    await anyio.to_thread.run_sync(_prepare, config)
    await say(view, f"importing torch and transformers, and reading the tokenizer of {config.model.path}")
    parts = await anyio.to_thread.run_sync(parts_of, config)
    await anyio.to_thread.run_sync(parts.sketch)
    await say(
        view, "looking at the data" if config.samples_nothing else "calling each reward function with a first row"
    )
    await parts.try_data()
    folder = config.run_folder
    earlier = await anyio.to_thread.run_sync(_begun, config)
    metrics = Metrics()
    evaluated = _EvaluatedSummary(metrics.evaluations, parts, earlier)
    metrics.sinks.append(evaluated)
    summary = earlier
    async with AsyncExitStack() as stack:
        sharded: bool | None = None
        if config.placement.trainers > 1:
            from .torch_launch import joined  # noqa: PLC0415 (needs torch)

            await say(view, f"waiting for {config.placement.trainers} ranks")
            sharded = await enter_in_thread(stack, joined(parts))
        await say(view, f"loading the model {config.model.path}")
        model = await anyio.to_thread.run_sync(parts.model)
        policy, publisher = await stack.enter_async_context(_published(parts, model, view))  # before it is sharded
        trainer = await _trainer(parts, model, stack, sharded=sharded)
        pipeline = parts.pipeline(policy, trainer, publisher)
        await anyio.to_thread.run_sync(refuse_other_start, config, trainer.facts)
        try:
            values = await anyio.to_thread.run_sync(values_of, config)
            await pipeline.run(
                folder=folder,
                metrics=metrics,
                view=view,
                trackers=parts.trackers,
                config=values,
                allow_changes=config.allow_changes,
                skip_damaged=config.skip_damaged,
            )
        finally:
            if pipeline.report is not None:
                seconds = earlier.seconds + time.monotonic() - began
                summary = _after(evaluated.summary, config, pipeline.report, trainer.steps, seconds)
                with anyio.CancelScope(shield=True):
                    await evaluated.written()
                    summary = await anyio.to_thread.run_sync(_with_best, folder, summary)
    return summary


async def _trainer(
    parts: RunParts, model: HFModel, stack: AsyncExitStack, *, sharded: bool | None
) -> TorchTrainer | RankedTrainer:
    """Return the trainer of the model: in this process alone, or on all ranks, which this one leads."""
    from .torch_critic_parts import value_model  # noqa: PLC0415 (needs torch)

    reference = await anyio.to_thread.run_sync(parts.reference, model)
    values = await anyio.to_thread.run_sync(value_model, parts.config)
    if sharded is None:
        return parts.trainer(model, reference, values)
    make = partial(parts.ranked_trainer, model, reference, values, sharded=sharded)
    return stack.enter_context(await anyio.to_thread.run_sync(make))


def run_ranks(config: RunConfig, command: Sequence[str]) -> int:
    """Check the parts of a run, start its ranks on this host, and return their status. Blocks.

    All are started again, and go on from the last checkpoint, after a rank was killed or a server died,
    `placement.restarts` times within an hour.

    Args:
        config: see `load_run_config`.
        command: arguments of this interpreter, by which each rank calls `train`.

    Raises: see `train`, and `start_ranks`.
    """
    _prepare(config)
    parts_of(config).sketch()
    from .torch_launch import start_ranks  # noqa: PLC0415 (needs torch)

    budget = RestartBudget(config.placement.restarts)
    while True:
        try:
            return start_ranks(config, command)
        except (PeerLost, ServerFailed) as error:
            if not budget.take(now := time.monotonic()):
                raise
            log.warning("rank_died", how=str(error), restarts_left=budget.left(now))


def _followed(config: RunConfig) -> Summary:
    """Take part in the steps of rank 0 until it ends. Blocks."""
    _prepare(config)
    parts = parts_of(config)
    from .torch_critic_parts import value_model  # noqa: PLC0415 (needs torch)
    from .torch_launch import joined  # noqa: PLC0415 (needs torch)

    with joined(parts) as sharded:
        model = parts.model()
        values = value_model(config)
        with parts.ranked_trainer(model, parts.reference(model), values, sharded=sharded) as trainer:
            trainer.follow()
    return Summary(stop_reason="rank 0 has ended")


def sampler_program(config: RunConfig) -> Program:
    """Return the pipeline of a worker that joins the run of the same configuration. Blocks.

    Raises: see `train`.
    """
    _prepare(config)
    parts = parts_of(config)
    from .torch_parts import digest_of  # noqa: PLC0415 (needs torch)

    return Program(make_stage=lambda weights: parts.source(parts.policy(weights)), digest=digest_of(config))


def describe_run(config: RunConfig) -> str:
    """Build all parts of a run but the weights; return its pipeline, its model and its first prompt as text. Blocks.

    Every reward function is called once, with the first row and two made-up completions. Of each environment a rollout
    with a made-up model is done, and returned too.

    Raises: see `train`.
    """
    if config.prepare is not None:
        prepare = import_object(config.prepare, "config: prepare")
        if not Path(config.model.path).exists():
            return f"{config.model.path} does not exist yet: {prepare.__module__}:{prepare.__name__} makes it in a run"
    parts = parts_of(config)
    from .torch_critic_parts import empty_value_model  # noqa: PLC0415 (needs torch)
    from .torch_memory import needs_of_run  # noqa: PLC0415 (needs torch)

    pipeline, model = parts.sketch()
    with ThreadPoolExecutor(1) as thread:  # the caller's thread may have an event loop
        thread.submit(anyio.run, parts.try_data).result()
        shown = [] if config.environment is not None or config.replay is not None else [_first_prompt(parts)]
        shown += thread.submit(anyio.run, parts.tried).result()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    train = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    memory = "\n".join(map(str, needs_of_run(config, model, empty_value_model(config))))
    described = (
        f"model: {config.model.path}, {parameters:,} parameters, of which {train:,} train\n"
        f"a completion ends after {named(parts.tokenizer)}\n"
        f"memory of {memory}"
    )
    return "\n\n".join([pipeline.describe(), described, *shown])


def _first_prompt(parts: RunParts) -> str:
    tokens = parts.first_tokens()
    kind = "conversation" if parts.config.algorithm.is_supervised else "prompt"
    return f"first {kind}, {len(tokens)} tokens:\n{parts.tokenizer.decode(tokens)}"


def _prepare(config: RunConfig) -> None:
    if config.prepare is not None:
        with host_lock(f"{config.prepare} in {Path.cwd()}"):  # the samplers of a host may begin together
            call_object(config.prepare, "config: prepare", config)


def parts_of(config: RunConfig) -> RunParts:
    """Seed the generators, and return the parts of a run.

    Raises:
        MissingExtra: the extra `train` is not installed.
    """
    with extra("train", "a training run"):
        import torch  # noqa: PLC0415 (describing a run does not need it)

        from .torch_parts import RunParts  # noqa: PLC0415
    torch.manual_seed(config.seed)
    return RunParts(config)


@asynccontextmanager
async def _published(
    parts: RunParts, model: HFModel, view: View | None
) -> AsyncGenerator[tuple[Policy, WeightSink] | tuple[None, None]]:
    """Yield the policy, and the publisher of its weights; neither in a run that samples nothing."""
    config = parts.config
    if config.samples_nothing:
        yield None, None
        return
    async with AsyncExitStack() as stack:
        if config.engine == "torch":
            from ..._pipeline.weights.weight_publisher import WeightPublisher  # noqa: PLC0415 (needs torch)

            publisher = await stack.enter_async_context(WeightPublisher(model, cast=parts.published_as))
            yield parts.policy(await _served(publisher, config.placement, stack)), publisher
            return
        from ..._pipeline.weights.memory_folder import MemoryFolder  # noqa: PLC0415 (needs torch)
        from ..._pipeline.weights.weight_folder import WeightFolder  # noqa: PLC0415 (needs torch)
        from ..models.hf_model import MergedWeights  # noqa: PLC0415 (needs torch)

        urls: Sequence[str] = () if config.server is None else [config.server.url]
        if (servers := config.placement.servers) is not None:
            from .torch_servers import started  # noqa: PLC0415 (needs torch)

            await say(view, f"starting {servers.vllm} of vLLM, whose output is in {config.run_folder / 'servers'}")
            urls = await stack.enter_async_context(started(config, servers, parts.folder))
        policy = parts.policy(None, urls)
        own = await anyio.to_thread.run_sync(config.run_folder.absolute) / "weights"
        folder: MemoryFolder | WeightFolder
        if config.server is None:  # those that were started are of this host
            folder = await stack.enter_async_context(MemoryFolder(own, model.merged(), cast=parts.published_as))
        else:
            folder = await stack.enter_async_context(WeightFolder(config.server.weights or own, model.merged()))
        engines = [await stack.enter_async_context(policy.open(Worker(place, len(urls)))) for place in range(len(urls))]
        published = folder if config.model.lora is None else MergedWeights(folder, model)
        yield policy, EnginePublisher(published, engines)


async def _served(publisher: WeightPublisher, placement: PlacementConfig, stack: AsyncExitStack) -> str | WeightAddress:
    """Return where the samplers get the weights: over tcp if they may be on other hosts."""
    if placement.ray is not None:
        url = f"tcp://{bracketed(await anyio.to_thread.run_sync(node_address))}:0"
        key = ChannelKey(secrets.token_bytes(SECRET_BYTES))
    elif placement.joining is not None:
        url, key = placement.joining.weights, await anyio.to_thread.run_sync(key_of, placement.joining.key)
    else:
        return publisher.url
    return await stack.enter_async_context(publisher.serve(url, key=key))


class _EvaluatedSummary:
    """The summary of a run with its evaluations before training and after the last step: a sink of metrics.

    The first one is written at once: a run that is killed later, and continued, does not repeat it.
    """

    def __init__(self, evaluations: Evaluations, parts: RunParts, earlier: Summary) -> None:
        of_these_steps = earlier.steps == parts.config.algorithm.steps
        self.summary = earlier if of_these_steps else structs.replace(earlier, accuracy_after=None, reward_after=None)
        self._evaluations = evaluations
        self._config = parts.config
        samples = 1 if parts.evaluation is None else parts.evaluation.samples
        sets = list(parts.kept_apart)
        self._scores = [[f"eval/{name}/{score}" for name in sets] for score in (f"mean@{samples}", "reward")]
        """The names of the metrics of accuracy, and of those of reward."""
        self._written: asyncio.Future[None] | None = None
        """Done when the summary with the first evaluation is written."""

    def __call__(self, metrics: dict[str, float], step: int) -> None:  # noqa: ARG002 (the protocol's)
        """Take an evaluation, if there is one in the metrics of a step."""
        evaluated = metrics.get(STEP)
        if evaluated == 0:
            accuracy, reward = self._found()
            self.summary = structs.replace(self.summary, accuracy_before=accuracy, reward_before=reward)
            write = partial(_write, self._config.run_folder, self.summary)
            self._written = asyncio.get_running_loop().run_in_executor(None, write)  # no step waits for the disk
        elif evaluated == self._config.algorithm.steps:
            accuracy, reward = self._found()
            self.summary = structs.replace(self.summary, accuracy_after=accuracy, reward_after=reward)

    async def written(self) -> None:
        """Wait until the summary with the first evaluation is written; the one at the end fails where it does."""
        if self._written is not None:
            with suppress(PenstockError, OSError):
                await self._written

    def _found(self) -> list[float | None]:
        """Return accuracy and reward of the last evaluation; None each if a set could not be finished."""
        parts = self._evaluations.last
        if any(name.startswith(part.failed) for part in parts for names in self._scores for name in names):
            return [None, None]
        return [
            _mean([part.means[name] for part in parts for name in names if name in part.means])
            for names in self._scores
        ]


def _mean(sums: Sequence[tuple[float, float]]) -> float | None:
    """Return Σ value / Σ count; None without any."""
    count = sum(count for _, count in sums)
    return sum(value for value, _ in sums) / count if count else None


def _after(summary: Summary, config: RunConfig, report: Report, steps: int, seconds: float) -> Summary:
    balance, whole = report.balance, steps == config.algorithm.steps
    return structs.replace(
        summary,
        accuracy_after=summary.accuracy_after if whole else None,
        reward_after=summary.reward_after if whole else None,
        seconds=round(seconds, 2),
        seed=config.seed,
        steps=steps,
        stop_reason=report.stop_reason,
        nothing_learned=summary.nothing_learned if steps == summary.steps else report.nothing_learned,
        checkpoint=report.checkpoint or summary.checkpoint,
        ledger={"admitted": balance.admitted, "in_flight": balance.in_flight, "ended": balance.ended},
    )


def _with_best(folder: Path, summary: Summary) -> Summary:
    """Write the summary with the best checkpoint, if there is one, and return it."""
    checkpoints = folder / CHECKPOINTS
    if (best := best_checkpoint(checkpoints)) is not None:
        summary = structs.replace(summary, best=str(checkpoint_of(checkpoints, best.step) or ""))
    _write(folder, summary)
    return summary


def _begun(config: RunConfig) -> Summary:
    """Make the folder of the run; return the summary of its part before this one, if any."""
    folder = config.run_folder
    with explaining_os_errors("the files of a run", folder):
        folder.mkdir(parents=True, exist_ok=True)
        consequence = "the accuracy before training and the seconds of earlier parts are not known"
        return read_json_or_set_aside(folder / SUMMARY, Summary, consequence=consequence) or Summary()


def _write(folder: Path, summary: Summary) -> None:
    with explaining_os_errors("the summary of a run", folder):
        write_json(folder / SUMMARY, summary)
