"""SkyRL's own trainers train what penstock sends. `make test-skyrl` runs this file."""

from __future__ import annotations

import asyncio
import copy
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from structlog.testing import capture_logs
from tests.failsafe import FAILSAFE_S
from tests.pages import program
from tests.skyrl.contract import ASYNC_HOOKS, ENGINE, HOOKS, INPUT, OUTPUT, VLLM_PARAMETERS, arguments_of
from tests.skyrl_real.conftest import MakeTrainer
from tests.skyrl_real.gym_env import Repeated
from tests.skyrl_real.killed import LAST
from tests.skyrl_real.training import FULLY_ASYNC, OPTIONS, config_of, trainer_of
from tests.worker_processes import worker_processes

from penstock._pipeline.accounting.committed_prompts import CommittedPrompts
from penstock._stages.integrations.interface import object_in
from penstock._stages.integrations.skyrl.engines import no_engines
from penstock._stages.integrations.skyrl.trainer import check_trainer
from penstock.errors import FlowEnded, InvalidConfig, MissingInterface, RolloutsFailed, StageFailed, WorkerFailed
from penstock.policies import GenerationIsOutside

pytestmark = pytest.mark.filterwarnings("default:`device` is deprecated:FutureWarning")
"""transformers 5.16 warns of an argument that 5.23, with which the suite runs, takes without a word."""

ROOT = Path(__file__).parent.parent.parent
SEQUENCES = 16
"""Of a step."""

BOTH = pytest.mark.parametrize("options", [{}, FULLY_ASYNC], ids=["synchronous", "fully_async"])


def skyrl(module: str) -> Any:
    return importlib.import_module(f"skyrl.{module}")


def train(trainer: Any) -> list[dict[str, float]]:
    """Train, and return what SkyRL has logged, by step."""
    logged: dict[int, dict[str, float]] = {}
    trainer.tracker.log = lambda found, step, **_: logged.setdefault(step, {}).update(found)
    asyncio.run(trainer.train())
    return [logged[step] for step in sorted(logged)]


def balance_of(trainer: Any) -> Any:
    report = trainer.generator.report
    assert report is not None
    assert report.balance.balanced
    assert report.balance.in_flight == 0
    return report.balance


def committed_in(checkpoints: Path) -> CommittedPrompts:
    """Return what the last checkpoint has as trained."""
    step = (checkpoints / "latest_ckpt_global_step.txt").read_text()
    state = json.loads((checkpoints / f"global_step_{step}" / "penstock.json").read_text())
    return CommittedPrompts.of_state(state["committed"])


def with_path(*folders: Path) -> dict[str, str]:
    """Return the environment of a process that finds modules in these folders."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if "penstock" in thread.name}


# -- the contracts ---------------------------------------------------------------------------------------------------


def test_the_recorded_contracts_are_those_of_the_installed_version() -> None:
    base = skyrl("train.generators.base")
    engines = skyrl("backends.skyrl_train.inference_servers.base").InferenceEngineInterface
    parameters = skyrl("backends.skyrl_train.inference_servers.engine_utils").get_sampling_params_for_backend
    trainer, asynchronous = skyrl("train.trainer").RayPPOTrainer, skyrl("train.fully_async_trainer")

    assert set(base.GeneratorOutput.__annotations__) == OUTPUT
    assert set(base.GeneratorInput.__annotations__) == INPUT
    assert set(engines.__abstractmethods__) == ENGINE
    assert parameters("vllm", skyrl("train.config.config").SamplingParams()) == VLLM_PARAMETERS
    assert arguments_of(trainer, HOOKS) == HOOKS
    assert arguments_of(asynchronous.FullyAsyncRayPPOTrainer, ASYNC_HOOKS) == ASYNC_HOOKS


def test_a_trainer_without_a_method_that_is_extended_is_refused() -> None:
    with pytest.raises(MissingInterface, match=r"expected object\.train, found none"):
        check_trainer(object)
    with pytest.raises(MissingInterface, match=r"expected skyrl\.train\.trainer\.OtherTrainer, found none"):
        object_in("skyrl", "skyrl.train.trainer", "OtherTrainer")


def test_the_client_of_no_engines_is_one_of_skyrl_and_only_generation_is_an_error() -> None:
    client = no_engines("model")

    assert isinstance(client, skyrl("backends.skyrl_train.inference_servers.base").InferenceEngineInterface)
    assert client.model_name == "model"
    client.increment_weight_version()
    for call in (client.sleep, client.wake_up, client.pause_generation, client.resume_generation, client.teardown):
        assert asyncio.run(call()) is None
    assert asyncio.run(client.get_world_size()) == (0, 0)
    with pytest.raises(GenerationIsOutside):
        asyncio.run(client.generate({}))
    with pytest.raises(GenerationIsOutside):
        client.get_endpoint_url()


# -- training --------------------------------------------------------------------------------------------------------


def test_the_synchronous_trainer_trains_on_policy_until_the_reward_has_risen(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**{"trainer.max_training_steps": 40, "trainer.epochs": 3})

    logged = train(trainer)

    rewards = [step["reward/avg_raw_reward"] for step in logged]
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 1
    assert {step["generate/lag_max"] for step in logged} == {0}
    assert max(step["policy/rollout_train_logprobs_abs_diff_max"] for step in logged) < 1e-4
    assert balance_of(trainer).ended["trained"] == balance_of(trainer).admitted == 40 * SEQUENCES
    assert isinstance(trainer.generator, skyrl("train.generators.base").GeneratorInterface)
    assert threads() == set()


def test_the_fully_asynchronous_trainer_trains_within_its_staleness_until_the_reward_has_risen(
    make_trainer: MakeTrainer,
) -> None:
    trainer = make_trainer("in_two_processes", **FULLY_ASYNC, **{"trainer.max_training_steps": 40, "trainer.epochs": 3})

    logged = train(trainer)

    rewards = [step["reward/avg_raw_reward"] for step in logged if "reward/avg_raw_reward" in step]
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 1
    assert max(step["generate/lag_max"] for step in logged) <= max(step["async/staleness_max"] for step in logged)
    assert balance_of(trainer).ended["trained"] == 40 * SEQUENCES
    assert threads() == set()


def test_zero_variance_groups_that_the_asynchronous_trainer_drops_are_counted(make_trainer: MakeTrainer) -> None:
    options = {"trainer.fully_async.sample_full_batch": True, "trainer.algorithm.zero_variance_filter": True}
    trainer = make_trainer(**FULLY_ASYNC, **options, **{"trainer.max_training_steps": 3})

    logged = train(trainer)

    dropped = sum(step["async/num_groups_dropped"] for step in logged)
    assert dropped > 0
    assert balance_of(trainer).ended["trained"] == 3 * SEQUENCES
    assert balance_of(trainer).reasons["filtered"] == {"dropped by SkyRL": 4 * dropped}


def test_what_the_dynamic_sampling_of_the_synchronous_trainer_drops_is_counted(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(
        **{"trainer.algorithm.dynamic_sampling.type": "filter", "generator.n_samples_per_prompt": 8},
        **{"trainer.max_training_steps": 3, "trainer.epochs": 4},
    )

    train(trainer)

    balance = balance_of(trainer)
    assert balance.ended["trained"] == 3 * 4 * 8
    assert balance.reasons["filtered"].keys() == {"dropped by SkyRL"}
    assert balance.admitted == sum(balance.ended.values())


def test_an_evaluation_is_sampled_by_its_own_parameters_and_not_trained(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(
        **{"trainer.eval_interval": 1, "trainer.eval_batch_size": 32, "trainer.max_training_steps": 1},
        **{"trainer.dump_eval_results": False},
        **{"generator.eval_sampling_params.temperature": 0.0, "generator.eval_n_samples_per_prompt": 2},
        **{"generator.eval_sampling_params.max_generate_length": 3},
    )

    (logged,) = train(trainer)

    assert any(name.startswith("eval/") and "avg_score" in name for name in logged)
    assert balance_of(trainer).ended["trained"] == SEQUENCES
    assert balance_of(trainer).reasons["filtered"] == {"evaluation by SkyRL": 64 * 2}


# -- beside SkyRL's own generator ------------------------------------------------------------------------------------


async def _both(trainer: Any, count: int) -> tuple[Any, Any, list[str]]:
    """Return the outputs of penstock's generator and of SkyRL's own for the same rollouts, and their uids."""
    generator, cfg = trainer.generator, trainer.cfg
    utils, gym = skyrl("train.generators.utils"), skyrl("train.generators.skyrl_gym_generator")
    parameters = skyrl("backends.skyrl_train.inference_servers.engine_utils").get_sampling_params_for_backend
    prompts = trainer.train_dataset.collate_fn([trainer.train_dataset[row] for row in (5, 60, 7, 33)[:count]])
    asked, uids = utils.prepare_generator_input(
        prompts, 4, parameters("vllm", cfg.generator.sampling_params), "letters", "train", 1
    )
    await asyncio.to_thread(generator.training.begin, fully_async=False)
    trainer.init_weight_sync_state()
    await trainer.dispatch.save_weights_for_sampler()
    try:
        ours = await trainer.generate(asked)
    finally:
        await asyncio.to_thread(generator.training.end)
    own = gym.SkyRLGymGenerator(
        cfg.generator, cfg.environment.skyrl_gym, Repeated(ours, trainer.tokenizer), trainer.tokenizer
    )
    trainer.generator = own
    return ours, await trainer.generate(copy.deepcopy(asked)), uids


def test_every_column_is_what_skyrls_own_generator_makes_of_the_same_rollouts(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    generator = trainer.generator

    ours, theirs, uids = asyncio.run(_both(trainer, count=4))

    for name in ("prompt_token_ids", "response_ids", "loss_masks", "stop_reasons", "rollout_logprobs"):
        assert ours[name] == theirs[name], name
    assert {name for name in OUTPUT if ours.get(name) is None} - {
        name for name in OUTPUT if theirs.get(name) is None
    } == {"trajectory_generation_times", "trajectory_time_splits"}
    batches = []
    for output in (copy.deepcopy(ours), theirs):
        processed, kept = trainer.postprocess_generator_output(output, list(uids))
        processed.setdefault("trajectory_ids", None)
        processed["trajectory_ids"] = ours["trajectory_ids"]
        batches.append((processed["rewards"], trainer.convert_to_training_input(processed, kept)))
    (our_rewards, our_batch), (their_rewards, their_batch) = batches
    assert [pytest.approx(row) for row in our_rewards] == their_rewards
    assert any(map(any, our_rewards))
    assert our_batch.keys() == their_batch.keys()
    for name, column in our_batch.items():
        assert column is their_batch[name] is None or torch.allclose(column.float(), their_batch[name].float()), name
    assert generator.report is not None


def test_outputs_of_single_groups_are_merged_and_validated_by_skyrl(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    ours, _, _ = asyncio.run(_both(trainer, count=3))
    utils = skyrl("train.generators.utils")
    groups = [utils.slice_generator_output(ours, list(range(4 * place, 4 * place + 4))) for place in range(3)]

    merged = utils.concatenate_generator_outputs(groups)

    assert all(merged[name] == ours[name] for name in ("response_ids", "rewards", "trajectory_ids", "env_metrics"))


# -- deaths ------------------------------------------------------------------------------------------------------------


@BOTH
def test_a_sampler_that_is_killed_costs_no_step_and_no_row(make_trainer: MakeTrainer, options: dict[str, Any]) -> None:
    trainer = make_trainer("in_two_processes", **options, **{"trainer.max_training_steps": 8})

    reached = threading.Event()
    trainer.dispatch.at_step = lambda step: reached.set() if step == 2 else None

    def kill() -> None:
        if reached.wait(FAILSAFE_S):
            os.kill(worker_processes()[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    logged = train(trainer)
    killer.join()

    assert len(logged) == 8
    assert sum(step["generate/given_up"] for step in logged) == 0
    assert balance_of(trainer).ended["trained"] == 8 * SEQUENCES


def exits(number: int) -> None:
    raise AssertionError(f"expected the process to go on, got os._exit({number})")


@BOTH
def test_samplers_that_die_too_often_end_the_training_with_an_error_that_names_them(
    make_trainer: MakeTrainer, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer("in_one_process_that_dies", **options)
    monkeypatch.setattr(os, "_exit", exits)

    with pytest.raises(WorkerFailed, match="may be restarted 0 times within an hour"):
        train(trainer)

    assert not balance_of(trainer).ended["trained"]
    assert threads() == set()


@BOTH
def test_an_environment_that_always_fails_ends_the_training_with_its_reason(
    make_trainer: MakeTrainer, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer("that_always_fails", **options, **{"trainer.epochs": 9})
    monkeypatch.setattr(os, "_exit", exits)

    with pytest.raises((StageFailed, RolloutsFailed), match="no such letter"):
        train(trainer)

    assert balance_of(trainer).ended["failed"] >= 64


@BOTH
def test_a_flow_that_ends_early_ends_the_training(
    make_trainer: MakeTrainer, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer("that_ends", **options)
    monkeypatch.setattr(os, "_exit", exits)

    with pytest.raises(FlowEnded):
        train(trainer)


# -- resuming ----------------------------------------------------------------------------------------------------------


@BOTH
def test_a_resumed_training_goes_on_with_the_ledger_of_its_checkpoint(
    make_trainer: MakeTrainer, options: dict[str, Any], tmp_path: Path
) -> None:
    checkpoints = {"trainer.ckpt_interval": 1, "trainer.resume_mode": "latest", "trainer.epochs": 2}
    train(make_trainer(**options, **checkpoints, **{"trainer.max_training_steps": 3}))
    before = committed_in(tmp_path / "checkpoints")
    second = make_trainer(**options, **checkpoints, **{"trainer.max_training_steps": 5})
    logged = train(second)
    after = committed_in(tmp_path / "checkpoints")

    assert [step["trainer/global_step"] for step in logged] in ([4, 5], [5])  # the asynchronous one counts one too many
    assert balance_of(second).ended["trained"] == len(logged) * SEQUENCES
    assert sum(mask.bit_count() for mask in before.values()) == 3 * SEQUENCES
    assert sum(mask.bit_count() for mask in after.values()) == (3 + len(logged)) * SEQUENCES
    assert before.keys() < after.keys()


@BOTH
def test_a_trainer_that_is_killed_leaves_no_sampler_and_resumes_without_training_a_prompt_twice(
    make_trainer: MakeTrainer, model: Path, data: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    options = options | {"trainer.ckpt_interval": 1, "trainer.resume_mode": "latest"}
    arguments = [*map(str, (model, data, tmp_path)), json.dumps(options)]
    command = [sys.executable, "-m", "tests.skyrl_real.killed", *arguments]
    log = tmp_path / "killed.log"
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=with_path(ROOT / "src", ROOT),
        ) as killed,
    ):
        try:
            assert killed.stdout is not None
            steps = [json.loads(line) for line in islice(filter(is_step, killed.stdout), LAST)]
            children = psutil.Process(killed.pid).children(recursive=True)
        finally:
            killed.kill()
    assert len(steps) == LAST, log.read_text()
    _, alive = psutil.wait_procs(children, timeout=FAILSAFE_S)
    before = committed_in(tmp_path / "checkpoints")

    resumed = make_trainer("in_two_processes", **options, **{"trainer.max_training_steps": 6})
    train(resumed)

    assert len(children) >= 2
    assert alive == []
    assert sum(mask.bit_count() for mask in before.values()) == (LAST - 1) * SEQUENCES
    after = committed_in(tmp_path / "checkpoints")
    assert sum(mask.bit_count() for mask in after.values()) == 6 * SEQUENCES
    assert balance_of(resumed).ended["trained"] == (6 - LAST + 1) * SEQUENCES
    rows = Counter(map(tuple, steps[LAST - 2]["prompts"] + resumed.dispatch.prompts))
    assert set(rows.values()) == {4}
    assert len(rows) == 6 * 4


def is_step(line: str) -> bool:
    return line.startswith('{"step"')  # SkyRL prints there too


def test_a_checkpoint_without_a_ledger_is_resumed_with_a_warning(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    checkpoints = {"trainer.ckpt_interval": 1, "trainer.resume_mode": "latest"}
    train(make_trainer(**checkpoints, **{"trainer.max_training_steps": 1}))
    (tmp_path / "checkpoints" / "global_step_1" / "penstock.json").unlink()

    with capture_logs() as logs:
        train(make_trainer(**checkpoints, **{"trainer.max_training_steps": 2}))

    assert "resumed_without_ledger" in [each["event"] for each in logs]


# -- the entry point -----------------------------------------------------------------------------------------------


def test_the_function_of_the_page_makes_a_generator_that_trains(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_run.py").write_text(program(ROOT / "docs" / "skyrl.md"))
    monkeypatch.chdir(tmp_path)
    trainer = trainer_of(config_of(model, data, tmp_path, **{"trainer.max_training_steps": 2}), "my_run:generator")

    train(trainer)

    assert balance_of(trainer).ended["trained"] == 2 * SEQUENCES


def test_the_command_of_skyrl_trains_through_ray(model: Path, data: Path, tmp_path: Path) -> None:
    """SkyRL simulates its optimizer steps here, for its workers need GPUs; everything else is its own.

    The simulated trainer of 0.4.0 fails behind its last step, for its dispatch has no `finalize_pending_saves`.
    """
    (tmp_path / "flash_attn").mkdir()  # imported with its workers, which this run does not make; it is for GPUs
    (tmp_path / "flash_attn" / "__init__.py").touch()
    (tmp_path / "flash_attn" / "bert_padding.py").write_text("pad_input = unpad_input = None\n")
    simulated = FULLY_ASYNC | {
        "trainer.fully_async.simulate_training": True,
        "trainer.fully_async.simulate_training_step_seconds": 0.01,
    }
    paths = {"trainer.policy.model.path": model, "data.train_data": [str(data)], "trainer.log_path": tmp_path / "logs"}
    paths |= {"trainer.export_path": tmp_path / "exports", "trainer.ckpt_path": tmp_path / "checkpoints"}
    options = OPTIONS | simulated | paths | {"trainer.max_training_steps": 3}
    arguments = [f"{name}={'null' if value is None else value}" for name, value in options.items()]
    named = [
        "trainer.override_entrypoint=penstock.integrations.skyrl",
        "penstock.generator=tests.skyrl_real.letters:without_weights",
    ]

    ran = subprocess.run(
        [sys.executable, "-m", "skyrl.train.entrypoints.main_base", *named, *arguments],
        cwd=tmp_path,
        env=with_path(tmp_path, ROOT / "src", ROOT) | {"SKYRL_DUMP_INFRA_LOG_TO_STDOUT": "1"},
        capture_output=True,
        text=True,
        timeout=3 * FAILSAFE_S,
        check=False,
    )

    output = ran.stdout + ran.stderr
    assert re.search(r"run_ended .*'trained': 48,", output), output
    assert "'_SimDispatch' object has no attribute 'finalize_pending_saves'" in output


def test_a_function_that_returns_something_else_is_refused(make_trainer: MakeTrainer) -> None:
    with pytest.raises(InvalidConfig, match="letters:nothing: expected it to return a PenstockGenerator"):
        make_trainer("nothing")
