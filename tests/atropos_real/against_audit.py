"""The nine findings of an audit of Atropos, by their numbers in its tracker, each against penstock.

Atropos itself is on the other side where the finding has one: its environments, its client, its server and the code of
its trainer, with the transformers that it needs. docs/reliability.md has the table. That the divergence from a teacher
falls is in against_distillation.py.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
import torch
from tests.atropos.gateways import TRAINER, client, process
from tests.atropos_real.against_distillation import Bigrams, Student, taught
from tests.atropos_real.processes import ended, offline, run, started
from tests.failsafe import FAILSAFE_S
from tests.pipeline.weights.test_transformers_models import TOKENS, attached, built, config_of, logits
from tests.ports import free_port
from torch import nn

from penstock import AdvantageNormalizer
from penstock.errors import InvalidRecord, PeerLost, ServerFailed, StageFailed, WeightsMismatch
from penstock.integrations.atropos import AtroposClient
from penstock.losses import Distillation, PPOClip
from penstock.servers import OutsideServer, http_ready
from penstock.testing import drive, drive_source
from penstock.torch import TorchTrainer
from penstock.weights import WeightPublisher, WeightSubscriber

pytestmark = pytest.mark.timeout(600)


# -- the copy of the weights -------------------------------------------------------------------------------------------


def narrowed(model: nn.Module) -> nn.Module:
    return model.to(torch.bfloat16)


def other_shape(model: nn.Module) -> nn.Module:
    model.get_submodule("model.layers.0.mlp").down_proj = nn.Linear(40, 32, bias=False, device="meta")
    return model


def one_more(model: nn.Module) -> nn.Module:
    model.get_submodule("model.layers.0").gate = nn.Linear(2, 2, bias=False, device="meta")
    return model


@pytest.mark.parametrize("change", [narrowed, other_shape, one_more])
async def test_454_a_tensor_that_differs_is_refused_and_none_is_filled_in(change: Any) -> None:
    config = config_of("qwen 2.5", "rope_theta")
    original, model = built(config, "cpu"), change(built(config, "meta"))

    with pytest.raises(WeightsMismatch, match=r"model\.layers\.0"):
        async with attached(original, model):
            pytest.fail("a tensor would be wrong, or zeros")

    assert all(parameter.is_meta for parameter in model.parameters())


async def test_455_parameters_in_lists_of_modules_are_those_that_were_published() -> None:
    config = config_of("llama 3", "rope_theta")
    original, model = built(config, "cpu"), built(config, "meta")

    async with attached(original, model):
        for (name, expected), (other, found) in zip(original.named_parameters(), model.named_parameters(), strict=True):
            assert name == other
            assert torch.equal(expected, found), name
        assert not any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["llama 3", "qwen 2.5", "yarn"])
async def test_455_rotary_tables_are_those_of_the_configuration(kind: str) -> None:
    original, model = built(config_of(kind, "rope_theta"), "cpu"), built(config_of(kind, "rope_theta"), "meta")

    async with attached(original, model):
        rotary = model.get_buffer("model.rotary_emb.inv_freq")
        assert torch.equal(rotary, original.get_buffer("model.rotary_emb.inv_freq"))
        assert not torch.allclose(rotary, 10_000.0 ** -(torch.arange(0, 8, 2) / 8)), "else a default would do"
        assert torch.equal(logits(model, TOKENS), logits(original, TOKENS))


PUBLISHER = """
import anyio, torch
from penstock.weights import WeightPublisher

async def main():
    async with WeightPublisher({"bias": torch.zeros(2)}) as publisher:
        await publisher.publish({"bias": torch.ones(2)}, 1)
        print(publisher.url, flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""


async def test_458_weights_of_a_publisher_that_was_killed_are_not_taken_for_those_of_another(tmp_path: Path) -> None:
    killed = started("-c", PUBLISHER, cwd=tmp_path, log=tmp_path / "log")
    assert killed.stdout is not None
    url = killed.stdout.readline().strip()
    ended(killed, signal.SIGKILL)

    async with WeightPublisher({"bias": torch.zeros(2)}) as other:
        await other.publish({"bias": torch.full((2,), 2.0)}, 1)
        with anyio.fail_after(FAILSAFE_S), pytest.raises((PeerLost, OSError)):
            async with WeightSubscriber(url):
                pytest.fail("they are stale")


# -- the loss ----------------------------------------------------------------------------------------------------------


async def test_456_candidates_of_a_teacher_that_no_loss_uses_are_reported(
    checkout: Path, workspace: Path, model: str, tmp_path: Path
) -> None:
    student = Student(loss=PPOClip())

    await taught(student, checkout, workspace, model, tmp_path, top_k=4)

    assert student.taught
    assert {metrics["distill/tokens_used"] for metrics in student.metrics} == {0}


NOISE = [1 / 3, 1 / 3 + 6e-8, 1 / 3 - 6e-8, 1 / 3]


def advantages_in_atropos(group: dict[str, Any], checkout: Path) -> list[float]:
    """Return what the example trainer of Atropos makes of the scores of a group."""
    script = (
        "import json, sys; from example_trainer.data import pad_data_to_good_offset as padded\n"
        "print(json.dumps(padded({'batch': [json.loads(sys.argv[1])]}, 8, False)[2][0].flatten().tolist()))"
    )
    command = [sys.executable, "-c", script, json.dumps(group | {"overrides": None})]
    said = subprocess.run(command, cwd=checkout, env=offline(checkout), capture_output=True, text=True, check=True)
    found: list[float] = json.loads(said.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(("scores", "there"), [(NOISE, pytest.approx(1.4, abs=0.1)), ([0.7], pytest.approx(0.7))])
async def test_457_noise_is_no_advantage_and_neither_is_the_score_of_a_group_of_one(
    scores: list[float], there: Any, checkout: Path
) -> None:
    group = {"tokens": [[5, 6]] * len(scores), "masks": [[-100, 6]] * len(scores), "scores": scores}
    with process() as (_, url), client(url) as trainer:
        trainer.post("/register", TRAINER | {"batch_size": len(scores), "starting_step": 0, "num_steps": 1})
        trainer.post("/scored_data", group)
        atropos = AtroposClient(api_url=url, batch_size=len(scores), max_token_len=2048, num_steps=1)
        (received,) = await drive_source(atropos)
    (normalized,) = await drive(AdvantageNormalizer("grpo"), [received])

    assert max(map(abs, advantages_in_atropos(group, checkout))) == there
    assert normalized.advantages is not None
    assert not normalized.advantages.any()


async def test_461_a_teacher_of_another_vocabulary_is_refused(
    checkout: Path, workspace: Path, model: str, tmp_path: Path
) -> None:
    """The environment takes both models from its options, and the loss compares what they know."""
    trainer = TorchTrainer(cast("Any", Bigrams(260)), optimizer=torch.optim.SGD, loss=Distillation())

    with pytest.raises(BaseExceptionGroup) as raised:
        await taught(trainer, checkout, workspace, model, tmp_path, top_k=32)

    failed, _ = raised.value.split((StageFailed, InvalidRecord))
    assert failed is not None
    assert re.search("expected ids below 260.*teacher and policy must share a vocabulary", str(failed.exceptions))


# -- the server --------------------------------------------------------------------------------------------------------

SENDING = """\
import asyncio
import sys

from regex_env import RegexEnv

gateway, model = sys.argv[1:]
config, (server,) = RegexEnv.config_init()
config.rollout_server_url, config.tokenizer_name, config.use_wandb, config.group_size = gateway, model, False, 2
server.base_url, server.model_name = "http://127.0.0.1:1/v1", model
GROUP = {"tokens": [[1, 2], [1, 3]], "masks": [[-100, 2], [-100, 3]], "scores": [1.0, 0.0]}


async def main():
    env = RegexEnv(config, [server], slurm=False)
    await env.register_env()
    for groups in (1, 2, 1):
        try:
            await env._send_scored_data_to_api([dict(GROUP) for _ in range(groups)])
        except Exception as error:
            print(f"{groups} groups: {error}")


asyncio.run(main())
"""


def test_459_a_list_for_which_there_is_no_room_is_refused_whole(
    checkout: Path, workspace: Path, tmp_path: Path
) -> None:
    """The client of Atropos sends a list that failed again, whole: a part that was accepted would be there twice."""
    (tmp_path / "sending.py").write_text(SENDING)
    with process("--capacity", "2") as (_, url), client(url) as trainer:
        trainer.started(batch_size=8)
        environment = run(
            [str(tmp_path / "sending.py"), url, str(workspace / "tokenizer")],
            cwd=workspace,
            folder=tmp_path,
            path=checkout / "environments/community/regex_generation",
        )
        environment.process.wait()
        status = trainer.get("/status")

    said = environment.log.read_text()
    assert "2 groups: " in said, said
    assert "1 groups: " not in said
    assert (status["environments"][0]["submitted"], status["queue_size"]) == (4, 2)


async def test_460_another_program_at_the_port_is_left_running(checkout: Path, tmp_path: Path) -> None:
    port = str(free_port())
    server = partial(OutsideServer, ready=http_ready(f"http://127.0.0.1:{port}/"), logs=tmp_path)
    original = [sys.executable, "-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", port]
    gateway = [sys.executable, "-m", "penstock", "gateway", "--port", port]

    async with server(command=original, name="run-api", environment=offline(checkout)).open() as running:
        with pytest.raises(ServerFailed, match="another server answers in its place"):
            async with server(command=gateway, stop_timeout_s=0.1).open():
                pytest.fail("there are two")

        assert not running.ended.is_set()
