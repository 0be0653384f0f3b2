"""ROLL's own objects take what a flow sends, and its own pipeline trains it. `make test-roll` runs this file."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from tests.failsafe import FAILSAFE_S
from tests.roll.contract import CONTRACT
from tests.roll_real.configuration import BATCH, GROUPS, LENGTH, config_of
from tests.roll_real.given import given
from tests.roll_real.pipelines import FLOW, PIPELINE_S, errors_of, logged, pipeline_of, run_pipeline
from tests.trl_real.letters import GROUP

from penstock import TrajectoryGroup
from penstock._pipeline.accounting.committed_prompts import CommittedPrompts
from penstock.errors import InvalidPipeline, MissingInterface
from penstock.integrations.roll import FlowEnvManager

pytestmark = pytest.mark.timeout(3 * PIPELINE_S)

ROOT = Path(__file__).parent.parent.parent
GIVEN = {**FLOW, "flow": "tests.roll_real.given:flow"}
LATER = {**GIVEN, "env_config": {"version": 9}}
"""The same groups, sampled by the weights of a later step than any test reaches: of any age that ROLL takes."""

ray: Any = import_module("ray")


def data_proto(**meta_info: Any) -> Any:
    return import_module("roll.distributed.scheduler.protocol").DataProto(meta_info=meta_info)


class Roll:
    """ROLL's queue, a Ray actor, and its worker's part: the environments of one tag, each in a thread."""

    def __init__(self, config: Any, threads: ThreadPoolExecutor) -> None:
        tokenizer = import_module("transformers").AutoTokenizer.from_pretrained(config.pretrain)
        workers = config.train_env_manager
        scheduler = import_module("roll.distributed.scheduler.rollout_scheduler")
        self.queue = scheduler.GroupQueueManager.options(max_concurrency=64).remote(config, workers, "train")
        self.managers = [
            FlowEnvManager(
                worker_config=workers,
                pipeline_config=config,
                env_config=env_config,
                tokenizer=tokenizer,
                generate_scheduler=None,
                output_queue=self.queue,
                thread_lock=None,
                mode="train",
            )
            for env_config in workers.env_configs[0].values()
        ]
        self.flow = self.managers[0].flow
        self._threads = threads
        self.loops: list[Any] = []

    def begin_step(self, step: int) -> None:
        """Do what ROLL's RolloutScheduler does before it asks for a batch."""
        for manager in self.managers:
            manager.update_step(step)
        ray.get(self.queue.advance_step.remote(step))
        self.loops = self.loops or [
            self._threads.submit(each.run_rollout_loop, data_proto(seed=7)) for each in self.managers
        ]

    def batch(self, step: int, rollouts: int = BATCH) -> list[Any]:
        """Return ROLL's rollouts of a step."""
        asked = self.queue.get_batch.remote(rollouts, step)
        ready, _ = ray.wait([asked], timeout=FAILSAFE_S)
        for loop in self.loops:
            if loop.done():
                loop.result()
        assert ready, "ROLL's queue gave no batch"
        return list(ray.get(asked))

    def stop(self) -> None:
        """Do what ROLL's RolloutScheduler does in its shutdown."""
        for manager in self.managers:
            manager.stop()
        ray.get(self.queue.shutdown.remote())
        for loop in self.loops:
            loop.result(FAILSAFE_S)

    def ended(self) -> dict[str, dict[str, int]]:
        """Return the ends of all trajectories, by state and reason."""
        assert self.flow.report is not None
        balance = self.flow.report.balance
        assert balance.balanced
        assert balance.in_flight == 0
        return {state: dict(reasons) for state, reasons in balance.reasons.items() if reasons}


@contextmanager
def roll(config: Any) -> Iterator[Roll]:
    with ThreadPoolExecutor(GROUPS * GROUP) as threads:
        running = Roll(config, threads)
        try:
            yield running
        finally:
            running.stop()
            ray.kill(running.queue)


def formulated(group: TrajectoryGroup, row: int, rollout: Any) -> Any:
    """Return what ROLL's own TrajEnvManager makes of a row of a group, in the environment that `rollout` has."""
    managers = "roll.pipeline.agentic.env_manager"
    env_manager = import_module(f"{managers}.traj_env_manager").TrajEnvManager
    trajectory = list(group)[row]
    begins = np.flatnonzero(np.diff(trajectory.loss_mask.astype(int), prepend=0) == 1)
    ends = [*np.flatnonzero(np.diff(trajectory.loss_mask.astype(int), append=0) == -1) + 1]
    assert trajectory.behavior_logprobs is not None
    history = [
        {
            "messages": [],
            "prompt_ids": trajectory.tokens[before:begin].tolist(),
            "response_ids": trajectory.tokens[begin:end].tolist(),
            "infer_logprobs": trajectory.behavior_logprobs[begin:end].tolist(),
            "reward": trajectory.reward if end == ends[-1] else 0.0,
        }
        for before, begin, end in zip([0, *ends], begins, ends, strict=False)
    ]
    own = env_manager.__new__(env_manager)
    own.pipeline_config = SimpleNamespace(sequence_length=LENGTH)
    own.tokenizer = SimpleNamespace(pad_token_id=0)
    names = {name: rollout.non_tensor_batch[name][0] for name in ("env_ids", "group_ids", "tags")}
    own.rollout_cache = import_module(f"{managers}.base_env_manager").RolloutCache(
        env_id=names["env_ids"], group_id=names["group_ids"], tag=names["tags"], history=history, step=len(history)
    )
    return own.formulate_rollouts(own.rollout_cache)


def group_sent(rollout: Any) -> tuple[TrajectoryGroup, int]:
    """Return the given group, and its row, that a rollout is."""
    tokens = rollout.batch["input_ids"][0][rollout.batch["attention_mask"][0].bool()].tolist()
    for number in range(64):
        for row, trajectory in enumerate(given(number)):
            if trajectory.tokens.tolist() == tokens:
                return given(number), row
    raise AssertionError("expected a rollout of a given group")


def test_the_contract_is_that_of_rolls_own_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts/roll")
    recorded = {name: value for name, value in CONTRACT.items() if name != "commit"}

    assert json.loads(json.dumps(import_module("record_contract").contract())) == recorded


def test_a_batch_is_column_by_column_what_rolls_env_manager_makes(model: Path, tmp_path: Path) -> None:
    with roll(config_of(model, tmp_path, tag=GIVEN)) as running:
        running.begin_step(0)
        rollouts = running.batch(0)

        assert len(rollouts) == BATCH
        for rollout in rollouts:
            own = formulated(*group_sent(rollout), rollout)
            assert set(rollout.batch.keys()) == set(own.batch.keys())
            for name in own.batch.keys():  # noqa: SIM118 (ROLL's own mapping)
                assert rollout.batch[name].dtype == own.batch[name].dtype, name
                assert torch.equal(rollout.batch[name], own.batch[name]), name
            for name in ("env_ids", "group_ids", "tags", "episode_scores"):
                assert rollout.non_tensor_batch[name].tolist() == own.non_tensor_batch[name].tolist(), name
            assert rollout.meta_info["metrics"].items() >= own.meta_info["metrics"].items()

    assert running.ended()["trained"] == {"": BATCH}


def test_rollouts_of_a_prompt_are_a_group_of_rolls_and_in_its_order(model: Path, tmp_path: Path) -> None:
    with roll(config_of(model, tmp_path, tag=GIVEN)) as running:
        running.begin_step(0)
        batch = import_module("roll.distributed.scheduler.protocol").DataProto.concat(running.batch(0))

    groups = batch.group_by(keys="traj_group_id")
    assert len(groups) == BATCH // GROUP
    for group in groups.values():
        sent = [group_sent(group[row : row + 1]) for row in range(len(group))]
        assert len({each.instance_id for each, _ in sent}) == 1
        assert [row for _, row in sent] == list(range(GROUP))
        assert len(set(group.non_tensor_batch["traj_id"])) == GROUP


def test_rolls_advantages_and_loss_are_those_of_its_own_rollouts(model: Path, tmp_path: Path) -> None:
    config = config_of(model, tmp_path, tag=GIVEN)
    with roll(config) as running:
        running.begin_step(0)
        rollouts = running.batch(0)

    losses = []
    for kind in ("ours", "own"):
        rows = []
        for rollout in rollouts:
            row = rollout if kind == "ours" else formulated(*group_sent(rollout), rollout)
            for name in ("traj_group_id", "traj_id"):  # ROLL's loop adds these
                row.non_tensor_batch[name] = rollout.non_tensor_batch[name]
            rows.append(row)
        losses.append(loss_of(config, rows, model))

    assert losses[0][0] == losses[1][0]
    assert torch.equal(losses[0][1], losses[1][1])
    assert losses[0][1].abs().sum() > 0


def loss_of(config: Any, rollouts: list[Any], model: Path) -> tuple[float, Any]:
    """Return the loss and the advantages that ROLL's own functions compute, in the order of its pipeline."""
    utils = import_module("roll.pipeline.agentic.utils")
    functionals = import_module("roll.utils.functionals")
    worker_class = import_module("roll.pipeline.agentic.agentic_actor_worker").ActorWorker
    strategy_class = import_module("roll.distributed.strategy.strategy").TrainStrategy
    batch = import_module("roll.distributed.scheduler.protocol").DataProto.concat(rollouts)
    batch.meta_info = {}
    batch.batch["old_log_probs"] = batch.batch["infer_logprobs"].clone()
    batch.batch["ref_log_probs"] = batch.batch["infer_logprobs"].clone()
    batch, _ = utils.get_agentic_response_level_mask(batch, config)
    batch, _ = utils.compute_response_level_rewards(batch=batch, pipeline_config=config)
    batch, _ = functionals.compute_token_reward(batch, config, SimpleNamespace(value=0, update=lambda **_: None))
    batch = utils.agentic_compute_advantage(
        batch, gamma=1.0, lambd=1.0, adv_estimator=config.adv_estimator, pipeline_config=config
    )
    tokens = batch.batch["response_mask"][:, 1:].sum()
    batch.meta_info["batch_num_tokens"] = {"response_mask": tokens}
    batch.meta_info["global_valid_samples"] = {"response_mask": torch.tensor(len(batch))}
    torch.manual_seed(0)
    network = import_module("transformers").AutoModelForCausalLM.from_pretrained(model)
    logits = network(batch.batch["input_ids"], attention_mask=batch.batch["attention_mask"]).logits
    worker = worker_class.__new__(worker_class)
    worker.strategy = strategy_class.__new__(strategy_class)
    worker.pipeline_config = config
    worker._logprobs_cache = {}
    loss, _ = worker.loss_func(batch, logits)
    return float(loss), batch.batch["advantages"]


def test_groups_that_roll_leaves_in_its_queue_until_they_are_too_old_are_counted(model: Path, tmp_path: Path) -> None:
    with roll(config_of(model, tmp_path, tag=LATER)) as running:
        running.begin_step(0)
        running.batch(0, GROUP)  # of 8 places for groups, ROLL takes one
        for step in range(1, 4):
            running.begin_step(step)

    stale = running.ended()["stale"]
    assert stale["dropped by ROLL: older than async_generation_ratio=1"] > 0
    assert sum(running.ended()["trained"].values()) == GROUP


def test_groups_that_rolls_filter_drops_are_counted(model: Path, tmp_path: Path) -> None:
    config = config_of(model, tmp_path, tag=LATER)
    config.train_env_manager.group_filter_cls = "tests.roll_real.given.EqualRewards"
    with roll(config) as running:
        for step in range(3):
            running.begin_step(step)
            assert all(group_sent(rollout)[0].rewards.any() for rollout in running.batch(step))

    ended = running.ended()
    assert set(ended["filtered"]) == {"dropped by ROLL's group_filter_cls"}
    assert sum(ended["trained"].values()) == 3 * BATCH


def test_groups_sampled_by_weights_older_than_their_place_are_not_put(model: Path, tmp_path: Path) -> None:
    with roll(config_of(model, tmp_path, tag=GIVEN)) as running:
        running.begin_step(0)
        running.batch(0)
        running.begin_step(1)  # adds places that want the weights of step 1: the flow's are those of step 0
        running.batch(1)
        running.begin_step(2)

    reason = "sampled before ROLL created its group: older than async_generation_ratio"
    assert running.ended()["stale"][reason] > 0


def test_an_error_of_the_flow_ends_rolls_loop(model: Path, tmp_path: Path) -> None:
    tag = {**FLOW, "flow": "tests.roll_real.given:failing"}
    with roll(config_of(model, tmp_path, tag=tag)) as running:
        running.begin_step(0)
        failures = [loop.exception(FAILSAFE_S) for loop in running.loops[::GROUP]]
        running.loops = []

    assert all("the environment is gone" in str(failure) for failure in failures)


def test_a_queue_that_is_not_rolls_is_refused(model: Path, tmp_path: Path) -> None:
    class Other:
        def shutdown(self) -> None:
            pass

    with roll(config_of(model, tmp_path, tag=GIVEN)) as running:
        queue = ray.remote(Other).remote()
        group_queue = import_module("penstock._stages.integrations.roll.group_queue")

        with pytest.raises(MissingInterface, match="expected the GroupQueueManager of ROLL at 8eb27cc2"):
            group_queue.held_episodes(queue)
    assert running.flow.report is None  # ROLL had begun no step


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_size_redundancy": 1}, "group_size_redundancy: 0"),
        ({"max_env_num_per_worker": GROUP}, "one worker of environments"),
    ],
)
def test_a_configuration_that_a_flow_does_not_support_is_refused(
    change: dict[str, int], message: str, model: Path, tmp_path: Path
) -> None:
    config = config_of(model, tmp_path, tag=GIVEN, environments=change)

    with pytest.raises(InvalidPipeline, match=message), ThreadPoolExecutor() as threads:
        Roll(config, threads)


def test_rolls_pipeline_trains_a_flow_and_its_reward_rises(model: Path, tmp_path: Path) -> None:
    steps = 30
    tag = {**FLOW, "flow": "tests.roll_real.flows:letters"}

    lines = run_pipeline(model, tmp_path, tag=tag, max_steps=steps)

    rewards = [line["rollout/score/mean"] for line in lines]
    assert len(rewards) == steps
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.1
    balance = json.loads((tmp_path / "penstock/letters/balance.json").read_text())
    assert balance["ended"]["trained"] == steps * BATCH
    assert balance["admitted"] == sum(balance["ended"].values())
    assert balance["in_flight"] == 0
    assert not balance["ended"]["stale"]  # the source was paced as ROLL counts
    saved = json.loads((tmp_path / f"penstock/letters/{steps - 1}.json").read_text())
    assert len(CommittedPrompts.of_state(saved["committed"])) == steps * BATCH // GROUP


SHAPED = {
    "env_manager_cls": "penstock.integrations.roll.ShapedEnvManager",
    "env_config": {"env": "tests.roll_real.flows:Letters"},
    "agent_system_template": "",
    "agent_template": "{observation}",
}
"""ROLL's own env manager, with an environment of penstock."""


def test_rolls_own_env_manager_samples_an_environment_of_penstock_with_shaped_rewards(
    model: Path, tmp_path: Path
) -> None:
    tag = {**SHAPED, "reward": {"length_bounty": {"reward": -0.125, "cap": 1}}}

    lines = run_pipeline(model, tmp_path, tag=tag, max_steps=3)

    assert len(lines) == 3
    for line in lines:
        # ROLL's mean counts two rollouts once where an environment was faster than the others of its group
        parts = line["env/letters/rewards/score"] + line["env/letters/rewards/length_bounty"]
        assert line["rollout/score/min"] <= parts <= line["rollout/score/max"]
        assert line["rollout/score/mean"] < 0  # the environment's own scores never are
        assert line["env/letters/rewards/length_bounty"] == pytest.approx(
            -0.125 * line["env/response_length"], abs=1e-6
        )


def test_a_run_of_roll_that_resumes_trains_no_prompt_twice(model: Path, tmp_path: Path) -> None:
    tag = {**FLOW, "flow": "tests.roll_real.flows:letters"}
    run_pipeline(model, tmp_path, tag=tag, max_steps=4)
    (checkpoint,) = tmp_path.glob("checkpoints/*/checkpoint-2")

    resumed = run_pipeline(model, tmp_path, tag=tag, max_steps=6, resume_from_checkpoint=str(checkpoint))

    assert [line["step"] for line in resumed] == [3, 4, 5]
    trained = CommittedPrompts.of_state(json.loads((tmp_path / "penstock/letters/5.json").read_text())["committed"])
    assert len(trained) == 6 * BATCH // GROUP  # each step's prompts are others
    balance = json.loads((tmp_path / "penstock/letters/balance.json").read_text())
    assert balance["ended"]["trained"] == 3 * BATCH


def test_if_rolls_worker_is_killed_its_step_fails_and_nothing_of_the_flow_is_left(model: Path, tmp_path: Path) -> None:
    tag = {**FLOW, "flow": "tests.roll_real.flows:in_processes", "resources": {"num_cpus": 1}}
    pipeline = pipeline_of(model, tmp_path, tag=tag)
    while not logged(tmp_path):
        with suppress(subprocess.TimeoutExpired):
            assert pipeline.wait(0.1) is None, errors_of(tmp_path)
    processes = psutil.Process(pipeline.pid).children(recursive=True)
    (worker,) = [each for each in processes if "ray::EnvWorker" in " ".join(each.cmdline()) and each.children()]
    samplers = worker.children(recursive=True)

    worker.kill()

    assert pipeline.wait(PIPELINE_S) != 0
    assert "ActorDiedError" in (tmp_path / "errors.txt").read_text()
    assert psutil.wait_procs(samplers, FAILSAFE_S)[1] == []


def test_a_process_of_the_flow_that_is_killed_is_replaced(model: Path, tmp_path: Path) -> None:
    tag = {**FLOW, "flow": "tests.roll_real.flows:in_processes", "resources": {"CPU": 1}}
    before = {each.pid for each in psutil.Process().children()}
    with roll(config_of(model, tmp_path, tag=tag)) as running:
        running.begin_step(0)
        running.batch(0)
        started = [each for each in psutil.Process().children() if each.pid not in before]
        sampler = next(each for each in started if "resource_tracker" not in " ".join(each.cmdline()))

        sampler.kill()

        for step in (1, 2):
            running.begin_step(step)
            assert len(running.batch(step)) == BATCH

    assert sum(running.ended()["trained"].values()) == 3 * BATCH
