"""`PenstockGenerator`: a flow as the generator of SkyRL's trainers; their `GeneratorInterface`.

    SkyRL's event loop                                       the flow's thread
    generate(prompts) ──▶ Requests ──▶ SampleRequests, in processes ──▶ your stages ──▶ sink
            ▲                 ▲  the ledger: those that ended are sampled again             │
            └── 16 columns ───┴────────────── rows, matched by prompt and repetition ◀──────┘
    optimizer step done, weights wanted ──▶ SkyRLTraining: publisher; Ledger.commit

A flow with a source of its own has `Arrivals` in the place of `Requests`: the next group answers the next prompt.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...._pipeline.errors import InvalidPipeline
from ...._pipeline.graph.report import Report
from ...._pipeline.graph.statistics import PipelineStatistics
from ...._pipeline.runtime.flow import Flow
from ...sink.sink_trainer import WeightSink
from ..flow_thread.flow_run import Groups
from ..interface import object_in
from .arrivals import Arrivals
from .configuration import refuse_evaluation, refuse_unsupported
from .input_rows import asked_of, is_evaluation
from .requests import PromptRequest, Requests, withdraw
from .samples import Asked, Rules, columns_of, metrics_of
from .trainer import bound
from .training import NOT_AWAITED, SkyRLTraining

STALE_AFTER_S = 900.0
"""Seconds that SkyRL waits for the next trajectory: three times the bound on a rollout."""

POLL_S = 5.0
"""Seconds between looks at the flow while SkyRL waits."""


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
        """Prepare; the flow starts when SkyRL trains.

        Args:
            flow: up to groups with rewards. A function of SkyRL's requests returns a flow that begins with this source,
                and samples SkyRL's prompts. It is called when training begins and `publisher` is open: a policy can
                then be given its URL. A flow with a source of its own sends groups of prompts that it chooses, an
                `AtroposGateway` for one: each prompt of SkyRL is answered by the next group.
            cfg: SkyRL's configuration.
            tokenizer: SkyRL's.
            publisher: of the policy's weights, not open yet: a WeightPublisher, a WeightFolder, or any other async
                context manager that yields one. Without it the samplers get weights in a way of their own.

        Raises:
            InvalidConfig: the configuration asks for a feature that penstock lacks.
        """
        refuse_unsupported(cfg.generator)
        self._cfg = cfg
        self._tokenizer = tokenizer
        self._rules = Rules(
            logprobs=cfg.generator.sampling_params.logprobs is not None,
            zero_reward_on_non_stop=bool(cfg.generator.zero_reward_on_non_stop),
            apply_overlong_filtering=bool(cfg.generator.apply_overlong_filtering),
        )
        self._requests: Requests | Arrivals
        if isinstance(flow, Flow):
            refuse_evaluation(cfg.trainer)
            temperature = cfg.generator.sampling_params.temperature
            self._requests = Arrivals(cfg.generator.n_samples_per_prompt, temperature, self._rules)
            make_flow: Groups | Callable[[], Groups] = flow
        else:
            self._requests = requests = Requests()
            make_flow = partial(_asking, flow, requests)
        self.training: SkyRLTraining = SkyRLTraining(make_flow, self._requests, cfg, tokenizer, publisher)
        """The training that the generator answers; the trainer that `trainer` returns reports to it."""

    def __repr__(self) -> str:
        return f"<PenstockGenerator: {self.training!r}, {self._requests!r}, {self.training.rows!r}>"

    @property
    def report(self) -> Report | None:
        """The report of the flow, once training has ended: the balance of the ledger, and why it ended."""
        return self.training.report

    def statistics(self) -> PipelineStatistics:
        """Return the waits of every stage of the flow now; those of its end once training has ended.

        Raises:
            RuntimeError: training has not begun.
        """
        return self.training.thread.statistics()

    def trainer(self, base: type) -> type:
        """Return `base`, a trainer of SkyRL, with methods that commit trained batches.

        Raises:
            MissingExtra: SkyRL is not installed.
            MissingInterface: it lacks a method.
        """
        object_in("skyrl", "skyrl.train.generators.base", "GeneratorInterface").register(type(self))
        return bound(base, self.training)

    async def generate(self, input_batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return trajectories for the input batch, a row for each of its rows, in their order. Called by SkyRL.

        In a fully asynchronous trainer an exception here would end the process: errors are raised by the trainer's own
        loop instead, and this waits until it is cancelled.

        Raises:
            InvalidPipeline: the trainer is not one that `penstock.integrations.skyrl` has made.
            PenstockError: the error that ended the flow.
            FlowEnded: the flow has sent its last group.
            FlowStalled: it has sent no group for 15 minutes.
        """
        try:
            return await self._generate(input_batch)
        except Exception as error:
            if not self.training.fully_async or is_evaluation(input_batch):
                raise
            await self.training.failure.hand_over(error)

    async def _generate(self, input_batch: Mapping[str, Any]) -> dict[str, Any]:
        if not self.training.thread.started:
            raise InvalidPipeline(
                "SkyRL: expected a trainer that commits what it trains, got another: use "
                "trainer.override_entrypoint=penstock.integrations.skyrl, or generator.trainer(RayPPOTrainer)(…)"
            )
        self.training.thread.check(STALE_AFTER_S, time.monotonic())
        asked = asked_of(input_batch, self._tokens)
        requests = [*dict.fromkeys(each.request for each in asked)]
        run = self.training.thread.run
        run.post(partial(self._requests.ask, requests))
        run.wake()  # a group that has arrived before its request waits for one
        try:
            await self._answered(requests)
        except BaseException:
            run.post(lambda: run.end(withdraw(requests), NOT_AWAITED))
            raise
        return self._output(input_batch, asked)

    def _tokens(self, messages: Any) -> NDArray[np.int32]:
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
            if not all(request.answered.done() for request in requests):  # a flow may end with its last answer
                self.training.thread.check(STALE_AFTER_S, began)

    def _output(self, input_batch: Mapping[str, Any], asked: Sequence[Asked]) -> dict[str, Any]:
        pad = self._tokenizer.pad_token_id
        output = columns_of(asked, self._rules, int(self._tokenizer.eos_token_id if pad is None else pad))
        output["trajectory_ids"] = input_batch.get("trajectory_ids")
        metrics = object_in("skyrl", "skyrl.train.generators.utils", "get_rollout_metrics")
        output["rollout_metrics"] = {
            **metrics(output["response_ids"], output["rewards"], loss_masks=output["loss_masks"]),
            **metrics_of(asked, self.training.version),
        }
        (self.training.rows.evaluate if is_evaluation(input_batch) else self.training.rows.give)(asked)
        return output


def _asking(flow_of: Callable[[Requests], Groups], requests: Requests) -> Groups:
    """Return the flow that begins with `requests`."""
    flow = flow_of(requests)
    if not isinstance(flow, Flow) or flow.nodes[0].stage is not requests:
        raise InvalidPipeline(
            f"SkyRL: expected a flow that begins with source(requests), the source that its function is given, got "
            f"{flow!r}: give the flow itself where it has a source of its own"
        )
    return flow
