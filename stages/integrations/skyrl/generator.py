"""`PenstockGenerator`: a flow as the generator of SkyRL's trainers; their `GeneratorInterface`.

    SkyRL's event loop                                       the flow's thread
    generate(prompts) ──▶ Requests ──▶ SampleRequests, in processes ──▶ your stages ──▶ sink
            ▲                 ▲  the ledger: those that ended are sampled again             │
            └── 16 columns ───┴────────────── rows, matched by prompt and repetition ◀──────┘
    optimizer step done, weights wanted ──▶ publisher; Ledger.commit

A flow with a source of its own has `Arrivals` in the place of `Requests`: the next group answers the next prompt.

The trainer that `bound` makes of SkyRL's tells what a step trained, and starts and ends the flow. The ledger counts
steps as SkyRL's weights do: version n is that of n optimizer steps.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ...._pipeline.accounting.telemetry import get_logger
from ...._pipeline.errors import FlowEnded, InvalidPipeline
from ...._pipeline.graph.report import Report
from ...._pipeline.graph.statistics import PipelineStatistics
from ...._pipeline.runtime.flow import Flow
from ...._schemas import TrajectoryGroup, TrajectoryId
from ...batching.batcher import NOTHING_TO_TRAIN
from ...data.plain_values import plain_row
from ...sink.sink_trainer import WeightSink
from ..flow_thread.deliveries import Deliveries
from ..flow_thread.flow_run import Decode, Drop, FlowRun, Groups, stalled
from ..flow_thread.flow_thread import FlowThread
from ..flow_thread.sample_queue import Trajectories
from ..flow_thread.weight_transfer import WeightTransfer
from ..interface import object_in
from .arrivals import Arrivals
from .configuration import refuse_evaluation, refuse_unsupported
from .requests import PromptRequest, Requests
from .samples import Asked, Rules, columns_of, lags_of
from .sampling_params import sampling_of
from .trainer import bound
from .weights import written

log = get_logger("penstock.skyrl")

STALE_AFTER_S = 900.0
"""Seconds without a trajectory after which SkyRL no longer waits: three times the bound on a rollout."""

POLL_S = 5.0
"""Seconds between looks at the clock while SkyRL waits."""

NOT_AWAITED = Drop("rejected", "SkyRL does not wait for it")

EVALUATED = Drop("filtered", "evaluation by SkyRL", evaluated=True)

DROPPED = Drop("filtered", "dropped by SkyRL")

UNTRAINED = Drop("filtered", NOTHING_TO_TRAIN)

Key: TypeAlias = tuple[str, int]
"""SkyRL's `instance_id` and `repetition_id`. It asks for the same ones again in a later epoch."""


class PenstockGenerator:
    """Answers SkyRL's trainers with the trajectories of a flow.

        def generator(cfg, tokenizer):
            env = SourceEnv(SkyRLPrompts, policy, PretrainedTokenizer(cfg.trainer.policy.model.path))
            rewards = RewardBridge.from_yaml("reward.yaml")
            flow = lambda requests: source(requests).then(SampleRequests(env), on=processes(4)).then(rewards)
            return PenstockGenerator(flow, cfg, tokenizer)

    Name such a function in `penstock.generator=module:generator`, with
    `trainer.override_entrypoint=penstock.integrations.skyrl`.
    """

    def __init__(
        self,
        flow: Callable[[Requests], Groups] | Groups,
        cfg: Any,
        tokenizer: Any,
        *,
        publisher: AbstractAsyncContextManager[WeightSink] | None = None,
    ) -> None:
        """Prepare; nothing is started before SkyRL trains.

        Args:
            flow: up to groups with rewards. A function of SkyRL's requests returns a flow that begins with this source,
                and samples what SkyRL asks for; it is called when training begins and `publisher` is open, whose URL a
                policy can then be given. A flow with a source of its own sends groups of prompts that it chooses, an
                `AtroposGateway` for one: each prompt of SkyRL is answered by the next group.
            cfg: SkyRL's configuration.
            tokenizer: SkyRL's.
            publisher: of the policy's weights, not open yet: a WeightPublisher, a WeightFolder, or any other async
                context manager that yields one. Without it the samplers get weights in a way of their own.

        Raises:
            InvalidConfig: the configuration asks for something that penstock does not have.
        """
        refuse_unsupported(cfg.generator)
        self._flow = flow
        self._cfg = cfg
        self._tokenizer = tokenizer
        self._weights = None if publisher is None else WeightTransfer(publisher, "penstock-skyrl-weights")
        self._deliveries: Deliveries[Key, None] = Deliveries()
        self._rules = Rules(
            logprobs=cfg.generator.sampling_params.logprobs is not None,
            zero_reward_on_non_stop=bool(cfg.generator.zero_reward_on_non_stop),
            apply_overlong_filtering=bool(cfg.generator.apply_overlong_filtering),
        )
        self._requests = self._arrivals() if isinstance(flow, Flow) else Requests()
        self._thread = FlowThread("penstock-skyrl-flow")
        self._saved: Mapping[str, Any] | None = None
        self._version = 0
        """Optimizer steps done; also the version of the weights."""
        self._bound = False
        self._fully_async = False
        self._failure: asyncio.Future[None] | None = None
        """Fails when the flow does; None while no fully asynchronous trainer waits."""
        self._error: Exception | None = None
        self._arrived = time.monotonic()
        """When a trajectory came last."""
        self.report: Report | None = None
        """The report of the flow, once training has ended: the balance of the ledger, and why it ended."""

    def __repr__(self) -> str:
        flow = f"{self._thread.state}, version {self._version}"
        return f"<PenstockGenerator: {flow}, {self._requests!r}, {self._deliveries!r}>"

    def _arrivals(self) -> Arrivals:
        refuse_evaluation(self._cfg.trainer)
        generator = self._cfg.generator
        return Arrivals(generator.n_samples_per_prompt, generator.sampling_params.temperature, self._rules)

    def statistics(self) -> PipelineStatistics:
        """Return what every stage of the flow waits for now; that of the end once training has ended.

        Raises:
            RuntimeError: training has not begun.
        """
        return self._thread.statistics()

    # -- SkyRL's GeneratorInterface ------------------------------------------------------------------------------------

    async def generate(self, input_batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return trajectories for the input batch, a row for each of its rows, in their order. Called by SkyRL.

        In a fully asynchronous trainer, which would end its process at an exception, errors are raised by the trainer's
        own loop instead, and this waits until it is cancelled.

        Raises:
            InvalidPipeline: the trainer is not one that `penstock.integrations.skyrl` has made.
            PenstockError: the error that ended the flow.
            FlowEnded: the flow has sent its last group.
            FlowStalled: it has sent nothing for 15 minutes.
        """
        try:
            return await self._generate(input_batch)
        except Exception as error:
            if not self._fully_async or _is_evaluation(input_batch):
                raise
            self._fail(error)
        await asyncio.get_running_loop().create_future()  # until the trainer's loop has raised, and cancels this
        raise AssertionError("unreachable")

    async def _generate(self, input_batch: Mapping[str, Any]) -> dict[str, Any]:
        if not self._bound or not self._thread.started:
            raise InvalidPipeline(
                "SkyRL: expected a trainer that commits what it trains, got another: use "
                "trainer.override_entrypoint=penstock.integrations.skyrl, or generator.trainer(RayPPOTrainer)(…)"
            )
        asked, requests = self._asked(input_batch)
        self._thread.run.post(partial(self._requests.ask, requests))
        self._thread.run.wake()  # a group that has arrived before its request waits for one
        try:
            await self._answered(requests)
        except BaseException:
            self._withdraw(requests)
            raise
        return self._output(input_batch, asked, requests)

    def _asked(self, input_batch: Mapping[str, Any]) -> tuple[list[Asked], list[PromptRequest]]:
        """Return the rows of SkyRL's input, and a request for each prompt in it."""
        prompts, ids = input_batch["prompts"], input_batch.get("trajectory_ids")
        names = [(str(place), 0) for place in range(len(prompts))] if ids is None else keys_of(ids)
        if len(set(names)) < len(names):
            raise InvalidPipeline(f"SkyRL: expected every trajectory_id once in a batch, got {len(names)} with copies")
        repetitions: dict[str, list[int]] = {}
        first: dict[str, int] = {}
        for place, (instance_id, repetition) in enumerate(names):
            repetitions.setdefault(instance_id, []).append(repetition)
            first.setdefault(instance_id, place)
        sampling = sampling_of(input_batch.get("sampling_params") or {})
        requests = {
            each: PromptRequest(
                each, self._tokens(prompts[at]), tuple(repetitions[each]), sampling, _meta(input_batch, at)
            )
            for each, at in first.items()
        }
        return [Asked(requests[instance_id], repetition) for instance_id, repetition in names], [*requests.values()]

    def _tokens(self, messages: Any) -> Any:
        """Return the tokens of a prompt, as SkyRL's own generator makes them (skyrl_gym_generator.py:387).

        Groups that arrive have prompts of their own.
        """
        if isinstance(self._requests, Arrivals):
            return np.empty(0, np.int32)
        kwargs = dict(self._cfg.generator.chat_template_kwargs or {})
        ids = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False, **kwargs
        )
        return np.array(ids, np.int32)

    async def _answered(self, requests: Sequence[PromptRequest]) -> None:
        waiting = {asyncio.wrap_future(request.answered) for request in requests}
        began = time.monotonic()
        while waiting:
            done, waiting = await asyncio.wait(waiting, timeout=POLL_S, return_when=asyncio.FIRST_EXCEPTION)
            for future in done:
                future.result()
            waited_s = time.monotonic() - max(began, self._arrived)
            if waiting and waited_s > STALE_AFTER_S:
                statistics = await asyncio.to_thread(self.statistics)
                raise stalled(STALE_AFTER_S, waited_s, statistics)

    def _withdraw(self, requests: Sequence[PromptRequest]) -> None:
        run = self._thread.run
        run.post(lambda: run.end(tuple(self._requests.withdraw(requests)), NOT_AWAITED))

    def _output(
        self, input_batch: Mapping[str, Any], asked: Sequence[Asked], requests: Sequence[PromptRequest]
    ) -> dict[str, Any]:
        self._arrived = time.monotonic()
        output = columns_of(asked, self._rules, self._filler)
        output["trajectory_ids"] = input_batch.get("trajectory_ids")
        metrics = object_in("skyrl", "skyrl.train.generators.utils", "get_rollout_metrics")
        output["rollout_metrics"] = {
            **metrics(output["response_ids"], output["rewards"], loss_masks=output["loss_masks"]),
            **self._metrics(asked, requests),
        }
        if _is_evaluation(input_batch):
            self._end([each for request in requests for each in request.ids], EVALUATED)
        else:
            self._give(asked)
        return output

    @property
    def _filler(self) -> int:
        """The token of a response that does not train."""
        return int(
            self._tokenizer.eos_token_id if self._tokenizer.pad_token_id is None else self._tokenizer.pad_token_id
        )

    def _metrics(self, asked: Sequence[Asked], requests: Sequence[PromptRequest]) -> dict[str, float]:
        """Return metrics by names from which SkyRL knows how to merge those of several groups (generators/utils.py)."""
        lags = lags_of(asked, self._version)
        found = {"generate/lag_mean": float(np.mean(lags)), "generate/lag_max": float(max(lags))} if lags else {}
        return found | {
            "generate/resampled": float(sum(request.resampled for request in requests)),
            "generate/given_up": float(len(asked) - len(lags)),
        }

    def _give(self, asked: Sequence[Asked]) -> None:
        earlier: list[TrajectoryId] = []
        for each in asked:
            if (row := each.request.rows[each.repetition]) is not None:
                key = each.request.instance_id, each.repetition
                earlier += self._deliveries.give(key, (row.trajectory.id,), None)
        self._end(earlier, DROPPED)

    def _end(self, trajectories: Sequence[TrajectoryId], drop: Drop) -> None:
        if trajectories:
            self._thread.run.post(partial(self._thread.run.end, tuple(trajectories), drop))

    # -- a fully asynchronous trainer's errors -------------------------------------------------------------------------

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(self._error)

    async def unless_failed(self, collecting: Any) -> Any:
        """Return what `collecting` returns, or raise the error of `generate` if that comes first.

        Called by the trainer's loop, which waits for groups here.
        """
        failure = self._failure = asyncio.get_running_loop().create_future()
        if self._error is not None:
            failure.set_exception(self._error)
        task = asyncio.ensure_future(collecting)
        try:
            await asyncio.sleep(0)  # groups that arrived before the error are trained: a flow may end with its last one
            await asyncio.wait({task, failure}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            failure.result()
        finally:
            self._failure = None
            for each in (task, failure):
                each.cancel()
            with suppress(Exception, asyncio.CancelledError):
                await asyncio.gather(task, failure, return_exceptions=True)

    # -- the trainer's side --------------------------------------------------------------------------------------------

    def trainer(self, base: type) -> type:
        """Return `base`, a trainer of SkyRL, with methods that commit what it trains.

        Raises:
            MissingExtra: SkyRL is not installed.
            MissingInterface: it lacks a method.
        """
        object_in("skyrl", "skyrl.train.generators.base", "GeneratorInterface").register(type(self))
        self._bound = True
        return bound(base, self)

    def begin(self, *, fully_async: bool) -> None:
        """Open the publisher. Called by the trainer before it loads a checkpoint. Blocks."""
        self._fully_async = fully_async
        if self._weights is not None:
            self._weights.open()

    def resume(self, saved: Mapping[str, Any] | None) -> None:
        """Note the state of the checkpoint that the trainer resumes."""
        if saved is None:
            log.warning("resumed_without_ledger", consequence="the balance begins with this run")
        self._saved = saved

    def weights_wanted(self, dispatch: Any, version: int) -> None:
        """Publish the weights of the trainer's workers, and commit what they have trained; start the flow. Blocks.

        Called by the trainer before the first step, and after every one.
        """
        if self._weights is not None:
            folder = Path(self._cfg.trainer.export_path) / f"penstock_weights_{version}"
            with written(dispatch, self._tokenizer, folder.absolute()) as tensors:
                self._weights.send(tensors, version)
        self.commit(version)
        if not self._thread.started:
            self._start()

    def _start(self) -> None:
        run = FlowRun(
            self._flow if isinstance(self._flow, Flow) else self._asking(self._flow),
            self._awaited,
            self._requests,
            trainer="SkyRL",
            rest=NOT_AWAITED,
            saved=self._saved,
            version=self._version,
        )
        self._requests.why_closed = lambda: (
            run.failure or FlowEnded("SkyRL waits for trajectories of a flow that has ended")
        )
        self._thread.start(run)

    def _asking(self, flow_of: Callable[[Requests], Groups]) -> Groups:
        assert isinstance(self._requests, Requests)  # noqa: S101 (as the flow, see `__init__`)
        flow = flow_of(self._requests)
        if not isinstance(flow, Flow) or flow.nodes[0].stage is not self._requests:
            raise InvalidPipeline(
                f"SkyRL: expected a flow that begins with source(requests), the source that its function is given, got "
                f"{flow!r}: give the flow itself where it has a source of its own"
            )
        return flow

    def _awaited(self, group: TrajectoryGroup, decode: Decode | None) -> Iterator[tuple[Trajectories, TrajectoryGroup]]:
        """Return what SkyRL waits for; on the event loop of the flow."""
        self._arrived = time.monotonic()
        return self._requests.awaited(group, decode)

    def batch(self, generator_output: Mapping[str, Any]) -> None:
        """Note the rows that SkyRL trains next. Called by the trainer."""
        ids = generator_output.get("trajectory_ids")
        if ids is None:
            raise InvalidPipeline(
                "SkyRL: expected trajectory_ids with what it trains, got none: nothing can be committed"
            )
        masked = [key for key, mask in zip(keys_of(ids), generator_output["loss_masks"], strict=True) if not any(mask)]
        self._end(self._deliveries.drop(masked), UNTRAINED)
        self._deliveries.batch(keys_of(ids))

    def dropped(self, generator_outputs: Sequence[Mapping[str, Any]]) -> None:
        """Note groups that SkyRL has dropped. Called by the trainer."""
        keys = [key for each in generator_outputs for key in keys_of(each.get("trajectory_ids") or ())]
        self._end(self._deliveries.drop(keys), DROPPED)

    def commit(self, version: int) -> None:
        """Commit what the optimizer step trained that made the weights of `version`. Called by the trainer. Blocks."""
        self._version = version
        self._deliveries.step_all()
        if trained := self._deliveries.stepped():
            if not self._fully_async:
                self._end(self._deliveries.drop(list(self._deliveries.given)), DROPPED)
            self._thread.commit(trained, version)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: the trajectories that were trained, and the state of the flow's stages."""
        return self._thread.state_dict()

    def end(self) -> None:
        """Stop the flow and everything that it started, and close the publisher; set `report`. Blocks."""
        try:
            if self._thread.running:
                self.report = self._thread.stop()
        finally:
            if self._weights is not None:
                self._weights.close()


def keys_of(trajectory_ids: Sequence[Any]) -> list[Key]:
    """Return the names of SkyRL's `TrajectoryID`s."""
    return [(str(each.instance_id), int(each.repetition_id)) for each in trajectory_ids]


def _meta(input_batch: Mapping[str, Any], place: int) -> dict[str, Any]:
    """Return the `meta` of a request: what rewards read, under the names that a `PromptDataset` gives it."""
    extras = input_batch.get("env_extras")
    row = plain_row(extras[place] if extras is not None else {}, lambda: f"env_extras[{place}]")
    env_class = input_batch["env_classes"][place]
    messages = json.loads(json.dumps(input_batch["prompts"][place]))
    return {"row": row, "messages": messages, "data_source": row.get("data_source") or env_class}


def _is_evaluation(input_batch: Mapping[str, Any]) -> bool:
    metadata = input_batch.get("batch_metadata")
    return metadata is not None and metadata.training_phase == "eval"
