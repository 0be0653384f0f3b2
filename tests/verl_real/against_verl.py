"""verl's own objects take what penstock sends. `make test-verl` runs this file."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file
from tests.atropos.gateways import client as gateway_client
from tests.atropos.gateways import process as gateway
from tests.failsafe import FAILSAFE_S
from tests.pages import program
from tests.verl.contract import FIELDS, TAG
from tests.verl_real.asking import Asking, padded_by_verl, written_by_verl
from tests.verl_real.conftest import MakeConfig, MakeManager, with_paths
from tests.verl_real.flows import Given, group_of, groups
from tests.verl_real.framework import (
    PPOTrainer,
    checkpoint_engine,
    compute_advantage,
    import_utils,
    llm_server,
    losses,
    padding_utils,
    tu,
    utils,
)
from tests.verl_real.framework import (
    config as verl_config,
)
from tests.verl_real.training import Sender, train
from tests.worker_processes import worker_processes

import penstock._stages.integrations.atropos.http_api  # noqa: F401 (else two event loops import it at once)
from penstock import AdvantageNormalizer, TrajectoryGroup, source
from penstock._pipeline.accounting.committed_prompts import CommittedPrompts
from penstock.errors import FlowEnded, InvalidPipeline, StageFailed, WorkerFailed
from penstock.integrations.atropos import AtroposClient, submit
from penstock.integrations.verl import DataProtoBatches, PenstockLoopManager
from penstock.torch import WeightFolder

ROOT = Path(__file__).parent.parent.parent

FILTERED = "algorithm.filter_groups.enable=True"
SAMPLED = "algorithm.rollout_correction.bypass_mode=True"
"""verl then takes the log-probabilities of the sampling as those of the weights that it trains."""
ASYNC = ["trainer.v1.trainer_mode=colocate_async"]


def balance_of(manager: PenstockLoopManager) -> Any:
    manager.close()
    assert manager.report is not None
    assert manager.report.balance.balanced
    assert manager.report.balance.in_flight == 0
    return manager.report.balance


def rows(tq: Any, keys: list[str]) -> list[dict[str, Any]]:
    data = tq.kv_batch_get(keys=keys, partition_id="train")
    return [{name: data[name][place] for name in data.keys()} for place in range(len(keys))]  # noqa: SIM118 (no dict)


@pytest.mark.filterwarnings("ignore:Disabled critic:UserWarning")  # verl says so of every estimator but gae
def test_the_configuration_is_accepted_by_verl(make_config: MakeConfig) -> None:
    config = make_config()

    needs = {"use_reference_policy": utils.need_reference_policy(config), "use_critic": utils.need_critic(config)}
    verl_config.validate_config(config, **needs)


def test_a_ray_with_fewer_cpus_than_verl_reserves_is_refused_before_transfer_queue_waits_for_them(
    transfer_queue: Any, make_config: MakeConfig
) -> None:
    config = make_config("transfer_queue.backend.SimpleStorage.num_data_storage_units=64")

    with pytest.raises(InvalidPipeline, match=r"at least 68 CPUs \(1 for .*, 64 for .*, got 8, and verl would wait"):
        transfer_queue.init(config.transfer_queue)


def test_rows_are_those_that_verl_makes_of_the_same_rollouts(transfer_queue: Any, make_manager: MakeManager) -> None:
    group = group_of(3, [1.0, 0.25], policy_versions=[4, 4])
    manager = make_manager([group])
    asking = Asking(manager._config._config, manager)
    asking.global_steps = 5
    (uid,) = asking.ask(1)
    ours, _ = asking.sample(1)
    theirs = written_by_verl(group, "theirs", 5)
    tags = transfer_queue.kv_list("train")["train"]

    assert [tags[key] for key in ours.keys] == [tags[key] for key in theirs]
    assert ours.tags == [tags[key] for key in theirs]
    assert set(tags[theirs[0]]) == set(TAG)
    for found, wanted in zip(rows(transfer_queue, ours.keys), rows(transfer_queue, theirs), strict=True):
        assert set(found) == set(wanted) == set(FIELDS)
        for name, column in wanted.items():
            if isinstance(column, torch.Tensor):
                assert found[name].dtype == column.dtype, name
                assert found[name].tolist() == column.tolist(), name
            elif name == "extra_fields":
                assert found[name].items() >= column.items()
            elif name == "uid":
                assert (found[name], column) == (uid, "theirs")
            else:
                assert found[name] == column, name


def test_what_verl_samples_is_committed_when_its_step_is_done(make_manager: MakeManager) -> None:
    manager = make_manager(list(groups(8)))
    asking = Asking(manager._config._config, manager)
    for _ in range(2):
        asking.ask(2)
        batch, _ = asking.sample(2)
        assert len(batch.keys) == 4
        asking.step_done(batch)

    balance = balance_of(manager)
    assert balance.ended["trained"] == 2 * 4
    assert balance.reasons["unfinished"].keys() == {"in flight when the run ended"}
    assert manager.report is not None
    assert manager.report.steps == 2


def test_groups_without_a_difference_are_refilled_one_for_one(make_manager: MakeManager) -> None:
    flat = [group_of(number, [0.5, 0.5]) for number in (0, 2)]
    manager = make_manager([flat[0], group_of(1, [1.0, 0.0]), flat[1], group_of(3, [0.0, 1.0])], *ASYNC, FILTERED)
    asking = Asking(manager._config._config, manager)

    asking.ask(2)
    batch, metrics = asking.sample(2)
    asking.step_done(batch)

    assert sum(asking.refilled) == metrics["training/filter_groups/evicted_samples"] == 2
    balance = balance_of(manager)
    assert balance.reasons["filtered"] == {"dropped by verl: no difference in reward": 4}
    assert balance.ended["trained"] == 4


def test_stale_groups_are_refilled_one_for_one(make_manager: MakeManager) -> None:
    given = [group_of(number, [1.0, 0.0], policy_versions=[version] * 2) for number, version in enumerate([0, 3, 4])]
    manager = make_manager(given, *ASYNC, "trainer.v1.sampler.max_off_policy_threshold=3")
    asking = Asking(manager._config._config, manager)
    asking.global_steps = 5

    asking.ask(2)
    batch, metrics = asking.sample(2)
    asking.step_done(batch)

    assert asking.refilled == [1]
    assert metrics["training/off_policy/evicted_samples"] == 1
    assert metrics["training/off_policy/evicted_samples_staleness/max"] == 5  # weights of before step 1, at step 5
    balance = balance_of(manager)
    reason = "dropped by verl: older than trainer.v1.sampler.max_off_policy_threshold=3"
    assert balance.reasons["stale"] == {reason: 2}
    assert balance.ended["trained"] == 4


def test_a_group_in_which_nothing_trains_is_refilled_within_the_flow(make_manager: MakeManager) -> None:
    empty = group_of(0, [1.0, 0.0], loss_mask=[[0] * 8] * 2)
    manager = make_manager([empty, group_of(1, [1.0, 0.0])])
    asking = Asking(manager._config._config, manager)

    asking.ask(1)
    batch, _ = asking.sample(1)
    asking.step_done(batch)

    balance = balance_of(manager)
    assert balance.reasons["filtered"] == {"nothing to train": 2}
    assert balance.ended["trained"] == 2


def test_the_error_of_a_flow_ends_the_training(make_manager: MakeManager) -> None:
    manager = make_manager([], *ASYNC, flow="failing")
    asking = Asking(manager._config._config, manager)

    with pytest.raises(StageFailed, match="the server of the environments is gone"):
        asking.take(2)

    assert "penstock-verl-delivery" not in {thread.name for thread in threading.enumerate()}


def test_a_flow_that_ends_before_the_training_is_told(make_manager: MakeManager) -> None:
    manager = make_manager(list(groups(1)), *ASYNC, flow="ending")
    asking = Asking(manager._config._config, manager)
    asking.ask(2)

    with pytest.raises(FlowEnded, match="than the 1 that the flow has sent"):
        asking.sample(2)


def test_a_trainer_that_validates_is_refused(make_manager: MakeManager) -> None:
    with pytest.raises(InvalidPipeline, match=r"trainer\.val_before_train=False"):
        make_manager([], "trainer.val_before_train=True")


def test_the_manager_ends_when_verl_closes_its_queue(
    transfer_queue: Any, make_manager: MakeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bool] = []
    monkeypatch.setattr(transfer_queue, "close", lambda: closed.append(manager.report is not None))
    before = transfer_queue.kv_clear, transfer_queue.close
    manager: PenstockLoopManager = make_manager(list(groups(2)))

    transfer_queue.close()
    manager.close()

    assert closed == [True]
    assert (transfer_queue.kv_clear, transfer_queue.close) == before
    assert repr(manager).startswith("<PenstockLoopManager: ended")
    assert not {"penstock-verl-flow", "penstock-verl-delivery"} & {thread.name for thread in threading.enumerate()}


BY_TOKEN = [[0, 0, 1.0, 0.5, 0, 0, -0.25, 2.0], [0, 0, -1.0, -0.5, 0, 0, 0.25, -2.0]]


def test_advantages_of_tokens_are_those_that_verl_trains_with(transfer_queue: Any, make_manager: MakeManager) -> None:
    group = group_of(0, [1.0, 0.0], advantages=BY_TOKEN)
    given = [group, group_of(1, [0.5, 0.25], advantages=BY_TOKEN)]
    manager = make_manager(given, "algorithm.adv_estimator=penstock", SAMPLED)
    asking = Asking(manager._config._config, manager)
    asking.ask(2)
    batch, _ = asking.sample(2)
    batch.reorder([3, 0, 2, 1])  # verl balances ranks
    batch = padding_utils.upsample_batch_to_divisible_size(
        batch, 5, eos_token_id=0
    )  # and fills batches with rows of its own

    PPOTrainer._compute_advantage(asking, batch, {})

    found = transfer_queue.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["advantages", "returns"])
    wanted = [BY_TOKEN[int(key.split("_")[1])][2:] for key in batch.keys[:4]] + [[0.0]]
    assert [column.tolist() for column in found["advantages"]] == wanted
    assert [column.tolist() for column in found["returns"]] == wanted


def test_tokens_in_the_middle_that_do_not_train_have_no_part_in_verls_loss(
    transfer_queue: Any, make_manager: MakeManager
) -> None:
    manager = make_manager(list(groups(2)), SAMPLED)
    asking = Asking(manager._config._config, manager)
    asking.ask(2)
    batch, _ = asking.sample(2)
    PPOTrainer._compute_old_log_prob(asking, batch, {})
    PPOTrainer._compute_advantage(asking, batch, {})
    data = transfer_queue.kv_batch_get(keys=batch.keys, partition_id="train")
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=16, global_batch_size=4)
    sampled = [torch.tensor([0.0, *column.tolist(), 0.0], requires_grad=True) for column in data["rollout_log_probs"]]
    logprobs = torch.nested.as_nested_tensor(sampled, layout=torch.jagged)

    actor = verl_config.omega_conf_to_dataclass(asking.config.actor_rollout_ref.actor)
    loss, _ = losses.ppo_loss(actor, {"log_probs": logprobs}, data)
    loss.backward()

    # A token is predicted by the one before it. Prompt: 0, 1; sampled: 2, 3 and 6, 7; observed: 4, 5.
    gradients = [row.grad for row in sampled if row.grad is not None]
    assert [(gradient != 0).int().tolist() for gradient in gradients] == [[0, 1, 1, 0, 0, 1, 1, 0]] * 4


IN_A_PROCESS = "+actor_rollout_ref.rollout.custom.options.workers=1"
ON_POLICY = ["+actor_rollout_ref.rollout.custom.options={max_lag: 0}", "trainer.total_epochs=100"]


def test_verls_trainer_trains_and_the_reward_rises(make_training: MakeConfig) -> None:
    config = make_training(*ON_POLICY, "trainer.total_training_steps=40")

    trainer, manager, logged = train(config)

    rewards = [line["critic/score/mean"] for line in logged]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.2
    assert trainer.actor_rollout_wg.sent == list(range(41))
    assert {line["training/off_policy/trajectory_staleness_worst/max"] for line in logged} == {0}
    assert max(line["training/rollout_probs_diff_max"] for line in logged) < 1e-4  # sampled by the weights that train
    assert balance_of(manager).ended["trained"] == 40 * 16
    assert manager.report is not None
    assert manager.report.steps == 40


def test_an_asynchronous_trainer_trains_what_its_bound_of_age_permits(make_training: MakeConfig) -> None:
    lines = ["trainer.v1.sampler.max_off_policy_threshold=2", "trainer.total_epochs=100"]
    config = make_training(*ASYNC, *lines, "trainer.total_training_steps=20")

    _, manager, logged = train(config)

    balance = balance_of(manager)
    assert balance.ended["trained"] == 20 * 16
    evicted = sum(line.get("training/off_policy/evicted_samples", 0) for line in logged)
    assert balance.ended["stale"] == 4 * evicted
    assert max(line["training/off_policy/trajectory_staleness_worst/max"] for line in logged) <= 1


def test_a_resumed_training_trains_no_trajectory_twice(make_training: MakeConfig, tmp_path: Path) -> None:
    lines = [*ON_POLICY, "trainer.resume_mode=auto", "trainer.save_freq=4", CHECKPOINT]
    trained = []
    for steps in (6, 9):
        _, manager, _ = train(make_training(*lines, f"trainer.total_training_steps={steps}"))
        trained.append(balance_of(manager).ended["trained"])
        (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("4")

    assert trained == [6 * 16, 5 * 16]
    assert trained_by(tmp_path, 4) == 4 * 16
    assert trained_by(tmp_path, 9) == 9 * 16  # none of them twice


def test_a_sampler_that_is_killed_is_replaced_and_no_trajectory_is_trained_twice(
    make_training: MakeConfig, tmp_path: Path
) -> None:
    lines = [*ON_POLICY, IN_A_PROCESS, "trainer.total_training_steps=6", "trainer.save_freq=6", CHECKPOINT]

    _, manager, logged = train(make_training(*lines, flow="tests.verl_real.flows:deadly"))

    balance = balance_of(manager)
    assert balance.ended["lost"] == 0
    assert balance.ended["trained"] == 6 * 16  # each step has what it asked for
    assert trained_by(tmp_path, 6) == 6 * 16  # none of them twice
    assert {line["training/off_policy/trajectory_staleness_worst/max"] for line in logged} == {0}
    assert max(line["training/rollout_probs_diff_max"] for line in logged) < 1e-4
    assert worker_processes() == []


def test_a_sampler_that_dies_too_often_ends_the_training(make_training: MakeConfig) -> None:
    options = "+actor_rollout_ref.rollout.custom.options={max_lag: 2, workers: 1, restarts: 0}"
    lines = [*ASYNC, options, "trainer.total_epochs=100", "trainer.total_training_steps=1000"]

    with pytest.raises(WorkerFailed, match="was killed by SIGKILL"):
        train(make_training(*lines, flow="tests.verl_real.flows:deadly"))

    assert worker_processes() == []


def test_samplers_end_when_the_trainer_is_killed_and_its_successor_trains_no_trajectory_twice(
    make_training: MakeConfig, model: Path, tmp_path: Path
) -> None:
    lines = [*ON_POLICY, IN_A_PROCESS, CHECKPOINT, "trainer.resume_mode=auto", "trainer.save_freq=2"]
    config = make_training(*lines, "trainer.total_training_steps=7")
    command = [sys.executable, "-m", "tests.verl_real.killed", str(model), str(tmp_path), *lines]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stdin": subprocess.PIPE, "text": True}
    with (
        TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder,  # what Ray leaves there
        (tmp_path / "errors.txt").open("w") as errors,
        subprocess.Popen(command, stderr=errors, cwd=ROOT, env=with_paths() | {"TMPDIR": folder}, **pipes) as trainer,
    ):
        assert trainer.stdout is not None
        printed = next((line for line in trainer.stdout if line.startswith("samplers ")), "")  # verl prints there too
        assert printed, (tmp_path / "errors.txt").read_text()[-4000:]
        started = psutil.Process(trainer.pid).children(recursive=True)
        sampling = [process for process in started if str(process.pid) in printed.split()]
        assert sampling
        trainer.kill()
        _, alive = psutil.wait_procs(sampling, timeout=FAILSAFE_S)
        assert alive == []
        for process in started:  # agents of Ray, which notice after a minute
            with suppress(psutil.NoSuchProcess):
                process.kill()

    _, manager, logged = train(config)

    assert [line["step"] for line in logged] == [5, 6, 7]
    assert balance_of(manager).ended["trained"] == 3 * 16
    assert trained_by(tmp_path, 7) == 7 * 16  # none of them twice


def test_verls_checkpoint_engine_publishes_for_a_trainer_with_devices_of_its_own(
    transfer_queue: Any,  # noqa: ARG001 (starts Ray)
    make_config: MakeConfig,
    tmp_path: Path,
) -> None:
    kwargs = "+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.penstock"
    engine = "actor_rollout_ref.rollout.checkpoint_engine"
    config = make_config(
        "actor_rollout_ref.hybrid_engine=False",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        f"{engine}.backend=penstock",
        f"{engine}.custom_backend_module=penstock.integrations.verl_backend",
        f"{kwargs}.publisher=tests.verl_real.flows:folder",
        f"{kwargs}.folder={tmp_path}/weights",
    )
    import_utils.import_external_libs(config.actor_rollout_ref.model.external_lib)
    servers = llm_server.LLMServerManager.create(config=config)
    sender = Sender(config.actor_rollout_ref.rollout.checkpoint_engine, {"bias": torch.tensor([0.0, 1.0])})
    manager = checkpoint_engine.CheckpointEngineManager(
        config=verl_config.omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine),
        actor_wg=sender,
        replicas=servers.get_replicas(),
    )

    manager.update_weights(0)
    sender.tensors = {"bias": torch.tensor([2.0, 3.0])}
    manager.update_weights(4)

    sender.engine._publishing._transfer.close()
    written = {path.parent.name: load_file(path)["bias"].tolist() for path in tmp_path.rglob("*.safetensors")}
    assert written == {"step-00000000": [0.0, 1.0], "step-00000004": [2.0, 3.0]}


CHECKPOINT = "trainer.checkpoint_callback_class=penstock.integrations.verl.PenstockCheckpoint"


def trained_by(folder: Path, step: int) -> int:
    """Return how many trajectories the checkpoint of a step has as trained; one that was trained twice counts once."""
    saved = json.loads((folder / f"checkpoints/global_step_{step}/penstock.json").read_text())
    return sum(mask.bit_count() for mask in CommittedPrompts.of_state(saved["committed"]).values())


def test_the_code_of_the_page_trains(
    make_training: MakeConfig, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").symlink_to(model)
    Path("my_flow.py").write_text(program(ROOT / "docs" / "verl.md"))
    Path("sums.py").write_text(
        "def close(completions, **columns):\n    return [text.count('e') for text in completions]\n"
    )
    Path("train.jsonl").write_text("".join(json.dumps({"question": first + "bc"}) + "\n" for first in "abcdefgh"))
    config = make_training(
        CHECKPOINT,
        "actor_rollout_ref.model.path=model",
        "data.max_response_length=6",
        "trainer.total_training_steps=2",
        publisher=["+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.penstock.publisher=my_flow:publisher"],
        flow="my_flow:flow",
    )

    _, manager, _ = train(config)

    assert balance_of(manager).ended["trained"] == 2 * 16


SHAPE: dict[str, Any] = {"prompt_length": 4, "response_length": 8}


def test_batches_have_the_columns_that_verl_makes_of_the_same_rollouts() -> None:
    given = list(groups(2, advantages=[[0, 0, 1.0, 1.0, 0, 0, 1.0, 1.0], [0, 0, -1.0, -1.0, 0, 0, -1.0, -1.0]]))
    theirs = padded_by_verl(given, **SHAPE)

    with DataProtoBatches(source(Given(given)), sequences=4, **SHAPE) as polled:
        ours = polled.next()

    assert set(ours.batch.keys()) == {*theirs.batch.keys(), "advantages", "returns"}
    for name, column in theirs.batch.items():
        assert ours.batch[name].dtype == column.dtype, name
        assert ours.batch[name].tolist() == column.tolist(), name
    for name in ("__num_turns__", "turn_scores", "tool_rewards", "min_global_steps", "max_global_steps"):
        column = theirs.non_tensor_batch[name]
        assert (ours.non_tensor_batch[name].dtype, ours.non_tensor_batch[name].tolist()) == (
            column.dtype,
            column.tolist(),
        )
    assert ours.non_tensor_batch["uid"].tolist() == ["sums/0", "sums/0", "sums/1", "sums/1"]
    assert ours.meta_info["global_token_num"] == [8] * 4
    assert ours.batch["advantages"][:, 2:4].unique().tolist() == [0.0]  # masked in the middle
    assert ours.batch["advantages"][0].tolist() == [1.0, 1.0, 0, 0, 1.0, 1.0, 0, 0]
    scored = ours.select(batch_keys=["rm_scores", "response_mask"], non_tensor_batch_keys=["uid"])
    scored.batch["token_level_rewards"] = scored.batch["rm_scores"]
    advantages = compute_advantage(scored, adv_estimator="grpo").batch["advantages"]
    assert advantages.sign().tolist() == ours.batch["advantages"].sign().tolist()


@pytest.mark.parametrize(
    ("normalizer", "expected"),
    [
        (AdvantageNormalizer("none", clip=0.5), [0.5, 0.0, 0.5, 0.0]),
        (AdvantageNormalizer("batch", batch_groups=2, clip=(-0.5, 3.0)), [0.866, -0.5, 0.866, -0.5]),
        (AdvantageNormalizer("global", clip=(-0.5, 3.0)), [0.707, -0.5, 0.866, -0.5]),
    ],
    ids=["none", "batch", "global"],
)
def test_advantages_of_each_mode_are_in_the_tensors_and_clipped(
    normalizer: AdvantageNormalizer, expected: list[float]
) -> None:
    with DataProtoBatches(source(Given(list(groups(2)))).then(normalizer), sequences=4, **SHAPE) as polled:
        columns = polled.next().batch

    mask = columns["response_mask"]
    assert columns["advantages"].numpy() == pytest.approx((torch.tensor(expected)[:, None] * mask).numpy(), abs=1e-3)
    assert columns["returns"].equal(columns["advantages"])
    assert mask[0].tolist() == [1, 1, 0, 0, 1, 1, 0, 0]


def test_batches_of_a_gateway_are_committed_when_the_weights_are_updated(tmp_path: Path) -> None:
    scored = {"tokens": [[5, 6, 7], [5, 6, 8]], "masks": [[-100, 6, 7], [-100, 6, 8]], "scores": [1.0, 0.0]}
    weights = WeightFolder(tmp_path / "weights", {"bias": torch.zeros(2)})
    with gateway() as (_, url), gateway_client(url) as status:
        client = AtroposClient(api_url=url, batch_size=4, max_token_len=64, num_steps=3, lease_s=300)
        flow = source(client).then(AdvantageNormalizer("grpo"))
        with DataProtoBatches(flow, sequences=4, **SHAPE, publisher=weights) as polled:
            anyio.run(submit, url, [scored] * 6)
            for step in (1, 2):
                data = polled.next()
                assert len(data) == 4
                with polled.updating_weights() as publish:
                    publish([("bias", torch.full((2,), float(step)))])
                assert weights.version == step
            polled.next()
            with pytest.raises(OSError, match="no device"), polled.updating_weights():
                raise OSError("no device")
        assert status.progress()[0] >= 2

    assert polled.report is not None
    assert polled.report.balance.balanced
    assert polled.report.balance.ended["trained"] == 8
    assert polled.report.balance.ended["unfinished"] == 4  # not updated, and so not acknowledged: the gateway has them
    assert load_file(tmp_path / "weights" / "step-00000002" / "weights.safetensors")["bias"].tolist() == [2.0, 2.0]


def test_sequences_that_are_too_long_are_counted_and_not_cut() -> None:
    columns: dict[str, Any] = {"loss_mask": [[0, 0, 1, 1, 1], [0, 0, 1]], "rewards": [1.0, 0.0]}
    given = TrajectoryGroup.build(env="sums", instance_id="0", sequences=[[5, 6, 7, 8, 9], [5, 6, 7]], **columns)

    with DataProtoBatches(source(Given([given])), sequences=1, prompt_length=2, response_length=2) as polled:
        data = polled.next()
        with polled.updating_weights():
            pass

    assert data.batch["responses"].tolist() == [[7, 0]]
    assert polled.report is not None
    assert polled.report.balance.ended["trained"] == 1
    assert polled.report.balance.reasons["rejected"] == {"longer than prompt_length=2, response_length=2": 1}


def test_a_batch_is_of_whole_groups_and_resumes_without_those_that_were_trained() -> None:
    with DataProtoBatches(source(Given(list(groups(4)))), sequences=3, **SHAPE) as polled:
        assert len(polled.next()) == 4
        with polled.updating_weights():
            pass
        saved = json.loads(json.dumps(polled.state_dict()))

    committed = CommittedPrompts.of_state(saved["committed"])
    assert {group.instance_id for group in committed} == {"0", "1"}
    with pytest.raises(RuntimeError, match="within the body"):
        polled.next()
