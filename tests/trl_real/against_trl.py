"""TRL's own trainers train what penstock sends. `make test-trl` runs this file."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import anyio
import numpy as np
import psutil
import pytest
import torch
from peft import LoraConfig
from structlog.testing import capture_logs
from tests.failsafe import FAILSAFE_S
from tests.pages import program
from tests.trl.contract import SAMPLE, TRANSFER, WORKER, fields_of, methods_of
from tests.trl_real.conftest import MakeTrainer
from tests.trl_real.letters import COMPLETION, flow_of, publisher_of
from tests.trl_real.training import synchronous_trainer_of
from transformers import TrainerCallback

from penstock import AdvantageNormalizer, TrajectoryGroup
from penstock._pipeline.accounting.committed_prompts import CommittedPrompts
from penstock._stages.integrations import interface
from penstock._stages.integrations.trl.samples import samples_of
from penstock._stages.integrations.trl.worker import rollout_sample
from penstock.errors import FlowEnded, FlowStalled, MissingInterface, WorkerFailed
from penstock.integrations.trl import TRLWorker, rollout_func
from penstock.testing import drive

ROOT = Path(__file__).parent.parent.parent
PACKAGE = "trl.experimental.async_grpo"


class At(TrainerCallback):
    """Calls a function once, at the end of a step."""

    def __init__(self, step: int, call: Callable[[], None]) -> None:
        self._step = step
        self._call = call

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if state.global_step == self._step:
            self._call()


def logged(trainer: Any, name: str) -> list[float]:
    return [line[name] for line in trainer.state.log_history if name in line]


def samplers() -> list[int]:
    """Return the processes of penstock's workers that this process has started."""
    return [child.pid for child in psutil.Process().children() if "resource_tracker" not in " ".join(child.cmdline())]


def balance_of(worker: TRLWorker) -> Any:
    assert worker.report is not None
    assert worker.report.balance.balanced
    assert worker.report.balance.in_flight == 0
    return worker.report.balance


def committed_in(checkpoint: Path) -> CommittedPrompts:
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    saved = state["stateful_callbacks"]["PenstockLedger"]["attributes"]["saved"]
    return CommittedPrompts.of_state(saved["committed"])


def test_the_interfaces_are_those_that_were_recorded() -> None:
    trainer = importlib.import_module(f"{PACKAGE}.async_grpo_trainer")

    assert fields_of(trainer.RolloutSample) == SAMPLE
    assert methods_of(trainer.RolloutWorkerProtocol) == WORKER
    assert methods_of(trainer.WeightTransferProtocol) == TRANSFER
    assert set(trainer.RolloutWorkerProtocol.__annotations__) == {"rollout_buffer", "metrics_queue"}


def test_the_reward_rises_and_the_ledger_counts_every_trajectory(model: Path, make_trainer: MakeTrainer) -> None:
    publisher = publisher_of(model)
    worker = TRLWorker(lambda: flow_of(model, publisher.url, workers=1))
    trainer = make_trainer(worker, publisher, max_steps=60)

    trainer.train()

    rewards = logged(trainer, "reward")
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.2
    balance = balance_of(worker)
    assert balance.ended["trained"] == 60 * 16
    assert balance.reasons["unfinished"].keys() <= {"in flight when the run ended"}
    assert samplers() == []
    assert not {"penstock-trl-flow", "penstock-trl-weights"} & {thread.name for thread in threading.enumerate()}
    assert logged(trainer, "rollout/trajectories")  # metrics of the flow are among TRL's


def test_what_is_sampled_before_the_first_step_is_bounded_by_the_batch_of_trl(
    model: Path, make_trainer: MakeTrainer
) -> None:
    publisher = publisher_of(model)
    worker = TRLWorker(lambda: flow_of(model, publisher.url, workers=1))
    trainer = make_trainer(worker, publisher, max_steps=40)

    trainer.train()

    balance = balance_of(worker)
    assert balance.ended["trained"] == 40 * 16
    assert balance.ended["stale"] < 0.05 * balance.admitted


def test_versions_agree_from_the_first_step(model: Path, make_trainer: MakeTrainer) -> None:
    publisher = publisher_of(model)
    worker = TRLWorker(lambda: flow_of(model, publisher.url))
    seen: list[tuple[int, int, int]] = []
    trainer = make_trainer(worker, publisher, max_steps=3)
    versions = At(1, lambda: seen.append((trainer.model_version, publisher.version, worker.report is None)))
    trainer.add_callback(versions)  # behind TRL's own, which has sent the weights by then

    trainer.train()

    assert seen == [(2, 2, True)]
    assert logged(trainer, "sample/staleness_max")[0] == 0
    assert max(logged(trainer, "sample/staleness_max")) <= 2
    assert min(logged(trainer, "sample/staleness_mean")) >= 0
    assert worker.report is not None
    assert worker.report.steps == trainer.model_version == 4


def test_weights_that_are_sent_every_other_step_have_a_version_each(model: Path, make_trainer: MakeTrainer) -> None:
    publisher = publisher_of(model)
    worker = TRLWorker(lambda: flow_of(model, publisher.url))
    trainer = make_trainer(worker, publisher, max_steps=5, weight_sync_steps=2)

    trainer.train()

    assert balance_of(worker).ended["trained"] == 5 * 16
    assert worker.report is not None
    assert worker.report.steps == trainer.model_version == 3


def test_adapters_are_sampled_merged(model: Path, make_trainer: MakeTrainer) -> None:
    publisher = publisher_of(model)
    worker = TRLWorker(lambda: flow_of(model, publisher.url))
    trainer = make_trainer(worker, publisher, max_steps=6, peft_config=LoraConfig(r=4, target_modules=["q_proj"]))

    trainer.train()

    assert balance_of(worker).ended["trained"] == 6 * 16
    assert max(abs(ratio - 1) for ratio in logged(trainer, "ratio")) < 0.05  # sampled by the weights that train


def test_a_version_that_was_not_tried_is_warned_of_once_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(interface.TRIED, "trl", "1.0")
    interface.installed_version.cache_clear()

    with capture_logs() as logs:
        assert rollout_sample() is rollout_sample()

    assert [(line["event"], line["tried"]) for line in logs] == [("framework_version_untried", "1.0")]


def test_a_sample_that_lacks_a_field_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(rollout_sample().__module__)
    kept = [(name, Any) for name in SAMPLE if name != "old_log_probs"]
    monkeypatch.setattr(module, "RolloutSample", dataclasses.make_dataclass("RolloutSample", kept))

    with pytest.raises(MissingInterface, match=r"RolloutSample to have \['old_log_probs'\]"):
        rollout_sample()

    monkeypatch.delattr(module, "RolloutSample")
    with pytest.raises(MissingInterface, match=r"RolloutSample, found none beside trl 1\."):
        rollout_sample()


def test_what_trl_drops_as_stale_is_counted_by_reason(model: Path, make_trainer: MakeTrainer) -> None:
    publisher = publisher_of(model)
    worker = TRLWorker(lambda: flow_of(model, publisher.url, max_lag=None))
    trainer = make_trainer(worker, publisher, max_steps=4, max_staleness=0)

    trainer.train()

    dropped = sum(logged(trainer, "sample/dropped_stale_total"))
    assert dropped > 0
    assert balance_of(worker).reasons["stale"] == {"dropped by TRL: older than max_staleness=0": dropped}
    assert balance_of(worker).ended["trained"] == 4 * 16


def test_what_trl_drops_as_too_long_is_counted_by_reason(model: Path, make_trainer: MakeTrainer) -> None:
    publisher = publisher_of(model)
    worker = TRLWorker(lambda: flow_of(model, publisher.url))
    trainer = make_trainer(worker, publisher, max_steps=1, token_budget=3 + COMPLETION - 1)

    trainer.train()

    dropped = sum(logged(trainer, "batch/dropped_oversize_total"))
    (reason,) = balance_of(worker).reasons["rejected"]
    assert reason == f"dropped by TRL: longer than token_budget={3 + COMPLETION - 1}"
    assert balance_of(worker).reasons["rejected"][reason] >= dropped > 0


def test_a_sampler_that_is_killed_is_replaced_and_what_it_held_is_sampled_again(
    model: Path, make_trainer: MakeTrainer
) -> None:
    publisher = publisher_of(model)
    worker = TRLWorker(lambda: flow_of(model, publisher.url, workers=1, max_lag=None))  # always at work
    kill = At(2, lambda: os.kill(samplers()[0], signal.SIGKILL))
    trainer = make_trainer(worker, publisher, max_steps=40, max_staleness=1000, callbacks=[kill])

    trainer.train()

    balance = balance_of(worker)
    assert balance.ended["trained"] == 40 * 16  # more than the first one could send ahead
    assert balance.ended["lost"] == 0
    assert samplers() == []


def test_a_sampler_that_dies_too_often_ends_the_training(model: Path, make_trainer: MakeTrainer) -> None:
    publisher = publisher_of(model)
    worker = TRLWorker(lambda: flow_of(model, publisher.url, workers=1, restarts=0))
    kill = At(2, lambda: os.kill(samplers()[0], signal.SIGKILL))
    trainer = make_trainer(worker, publisher, max_steps=1000, callbacks=[kill])

    with pytest.raises(WorkerFailed, match="was killed by SIGKILL"):
        trainer.train()

    assert balance_of(worker).ended["trained"] >= 2 * 16
    assert samplers() == []


def test_a_flow_that_ends_before_the_training_is_told(model: Path, make_trainer: MakeTrainer) -> None:
    publisher = publisher_of(model)
    worker = TRLWorker(lambda: flow_of(model, publisher.url, groups=9))
    trainer = make_trainer(worker, publisher, max_steps=1000)

    with pytest.raises(FlowEnded, match="than the 36 that the flow has sent"):
        trainer.train()

    balance = balance_of(worker)
    assert balance.ended["trained"] == 16  # accelerate collates one micro-batch ahead, and gets none
    assert balance.ended["unfinished"] == 20


def test_a_flow_that_waits_for_the_trainer_while_it_waits_is_told(model: Path, make_trainer: MakeTrainer) -> None:
    publisher = publisher_of(model)
    worker = TRLWorker(lambda: flow_of(model, publisher.url, max_lag=0))
    trainer = make_trainer(worker, publisher, heartbeat_stale_after_s=1.0)

    with pytest.raises(FlowStalled, match="expected a sample within 1 s, got none in"):
        trainer.train()


def test_a_resumed_training_trains_no_trajectory_twice(model: Path, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    checkpoint = tmp_path / "trained" / "checkpoint-4"
    trained = []
    for resume_from in (None, str(checkpoint)):
        publisher = publisher_of(model)
        worker = TRLWorker(partial(lambda publisher: flow_of(model, publisher.url), publisher))
        options = {"max_steps": 6 if resume_from is None else 9, "save_strategy": "steps", "save_steps": 4}
        make_trainer(worker, publisher, **options).train(resume_from_checkpoint=resume_from)
        trained.append(balance_of(worker).ended["trained"])

    assert trained == [6 * 16, 5 * 16]
    before, after = committed_in(checkpoint), committed_in(tmp_path / "trained" / "checkpoint-9")
    assert sum(mask.bit_count() for mask in before.values()) == 4 * 16
    assert sum(mask.bit_count() for mask in after.values()) == 9 * 16  # none of them twice


def test_the_synchronous_trainer_is_given_what_its_weights_have_sampled(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    publisher = publisher_of(model)
    with rollout_func(lambda: flow_of(model, publisher.url, workers=1, max_lag=0), publisher) as rollouts:
        trainer = synchronous_trainer_of(model, tmp_path / "trained", rollouts, max_steps=60)
        trainer.train()

    rewards = logged(trainer, "reward")
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.2
    report = rollouts.report
    assert report is not None
    assert report.balance.balanced
    assert report.balance.ended["trained"] == 60 * 16
    assert report.balance.reasons["unfinished"].keys() <= {"in flight when the run ended"}
    assert samplers() == []
    assert not {"penstock-trl-flow", "penstock-trl-weights"} & {thread.name for thread in threading.enumerate()}


def test_the_log_probabilities_that_the_synchronous_trainer_is_given_are_those_of_its_weights(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    publisher = publisher_of(model)
    differences: list[float] = []

    def compared(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        rows = rollouts(prompts, trainer)
        for prompt, completion, given in zip(rows["prompt_ids"], rows["completion_ids"], rows["logprobs"], strict=True):
            tokens = torch.tensor([prompt + completion])
            with torch.no_grad():
                logits = trainer.model(tokens).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1).gather(-1, tokens[0, len(prompt) :, None])[:, 0]
            differences.append(float((expected - torch.tensor(given)).abs().max()))
        return rows

    with rollout_func(lambda: flow_of(model, publisher.url, max_lag=0), publisher) as rollouts:
        trainer = synchronous_trainer_of(model, tmp_path / "trained", rollouts, max_steps=4)
        trainer.rollout_func = compared
        trainer.train()

    assert len(differences) == 4 * 16
    assert max(differences) < 1e-4


def test_the_synchronous_trainer_resumes_with_the_prompts_that_it_has_not_trained(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    folder = tmp_path / "trained"
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    for max_steps, resume_from in ((3, None), (5, str(folder / "checkpoint-2"))):
        publisher = publisher_of(model)
        flow = partial(lambda publisher: flow_of(model, publisher.url, max_lag=0), publisher)
        with rollout_func(flow, publisher) as rollouts:
            trainer = synchronous_trainer_of(model, folder, rollouts, max_steps=max_steps, **options)
            trainer.train(resume_from_checkpoint=resume_from)

    assert sum(mask.bit_count() for mask in committed_in(folder / "checkpoint-2").values()) == 2 * 16
    assert sum(mask.bit_count() for mask in committed_in(folder / "checkpoint-5").values()) == 5 * 16


def test_samples_are_those_that_trl_makes_of_the_same_rollouts() -> None:
    module = importlib.import_module(f"{PACKAGE}.async_rollout_worker")
    prompt, answers, rewards = [5, 6], [[7, 8, 0], [9, 0]], [1.0, 0.25]
    logprobs = [[-0.5, -1.0, -0.25], [-2.0, -0.125]]
    group = TrajectoryGroup.build(
        env="sums",
        instance_id="7",
        sequences=[[*prompt, *answer] for answer in answers],
        loss_mask=[[0] * len(prompt) + [1] * len(answer) for answer in answers],
        behavior_logprobs=[[0.0] * len(prompt) + given for given in logprobs],
        rewards=rewards,
        policy_versions=[3, 3],
        reward_parts={"exact": rewards},
    )
    accelerate.PartialState()  # its loggers need one
    theirs = _samples_of_trl(module, prompt, answers, logprobs, rewards)

    async def normalized() -> TrajectoryGroup:
        (out,) = await drive(AdvantageNormalizer("grpo"), [group])
        return out

    ours = [module.RolloutSample(**fields) for _, fields in samples_of(anyio.run(normalized), 5)]
    for sample, expected in zip(ours, theirs, strict=True):
        for name in ("input_ids", "completion_mask", "old_log_probs"):
            column, wanted = getattr(sample, name), getattr(expected, name)
            assert column.dtype == wanted.dtype
            assert column.tolist() == wanted.tolist()
        # AdvantageNormalizer has n − 1 in the denominator of σ, as TRL's GRPOTrainer; this one has n.
        assert sample.advantage * np.sqrt(2) == pytest.approx(expected.advantage, rel=1e-5)
        assert (sample.model_version, sample.group_id) == (expected.model_version, expected.group_id)
        assert sample.metrics == expected.metrics


def _samples_of_trl(
    module: Any, prompt: list[int], answers: list[list[int]], logprobs: list[list[float]], rewards: list[float]
) -> list[Any]:
    """Return what TRL's own producer makes of these rollouts: its rows, its scores, its advantages."""
    sequences = [
        module._chain_to_sequences([module.TurnRecord(prompt, answer, given)], "0", 1024)[0]
        for answer, given in zip(answers, logprobs, strict=True)
    ]
    loop = object.__new__(module._AsyncRolloutLoop)
    loop.reward_funcs, loop.reward_func_names = [lambda **_: rewards], ["exact"]
    loop._env_reward_types, loop._provides_rollout_reward = [], False
    group = module.RolloutGroup(
        prompts=[[], []],
        reward_kwargs={},
        completions=[[], []],
        completions_ids=answers,
        completions_sequences=sequences,
        tool_call_counts=[0, 0],
        tool_failure_counts=[0, 0],
        model_version=3,
        group_id=5,
        env_rewards=[None, None],
        rollout_rewards=[None, None],
    )
    samples: list[Any] = asyncio.run(loop._score_group(group))
    return samples


def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    page = ROOT / "docs" / "trl.md"
    (tmp_path / "trl_page.py").write_text(program(page))

    command = [sys.executable, str(Path(__file__).parent / "on_a_cpu.py"), "trl_page.py"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)

    assert ran.returncode == 0, ran.stderr


def test_samplers_end_when_the_trainer_is_killed(model: Path, tmp_path: Path) -> None:
    script = Path(__file__).parent / "killed.py"
    with subprocess.Popen(
        [sys.executable, script, model, tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
    ) as trainer:
        assert trainer.stdout is not None
        printed = next(line for line in trainer.stdout if line[0].isdigit())  # TRL prints there too
        children = [psutil.Process(int(pid)) for pid in printed.split()]
        assert children
        trainer.kill()

    _, alive = psutil.wait_procs(children, timeout=FAILSAFE_S)
    assert alive == []
