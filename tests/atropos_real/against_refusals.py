"""Print the lines of an environment of Atropos that the gateway refuses; docs/atropos-environments.md quotes them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.atropos_real.processes import ROOT, ended, run, started

pytestmark = pytest.mark.timeout(600)

PAGE = ROOT / "docs/atropos-environments.md"

REFUSED = """\
import asyncio
import sys

import requests
from regex_env import RegexEnv
from tenacity import RetryError

gateway, model_server, model = sys.argv[1:]
config, (server,) = RegexEnv.config_init()
config.rollout_server_url, config.tokenizer_name, config.use_wandb, config.group_size = gateway, model, False, 2
server.base_url, server.model_name, server.server_type = f"{model_server}/v1", model, "vllm"
GROUP = {"tokens": [[1, 2], [1, 3]], "masks": [[-100, 2], [-100, 3]], "scores": [1.0, 0.0]}
TRAINER = {"wandb_group": "", "wandb_project": "", "batch_size": 2, "max_token_len": 64, "checkpoint_dir": ""}


async def main():
    env = RegexEnv(config, [server], slurm=False)
    waiting = asyncio.create_task(env.register_env())
    await asyncio.sleep(2)  # it asks every second, and is answered that it must wait
    requests.post(f"{gateway}/register", json=TRAINER | {
        "save_checkpoint_interval": -1, "starting_step": 0, "num_steps": 9
    })
    requests.get(f"{gateway}/batch")
    await waiting
    await env.get_server_info()
    await env.handle_send_to_api(GROUP | {"scores": [float("nan"), 0.0]})
    for _ in range(2):  # there is room for one
        await env.handle_send_to_api(dict(GROUP))
    env.env_id = 77
    await refused(env.get_status())
    env.config.group_size = 3
    await refused(env.register_env())


async def refused(asking):
    try:
        await asking
    except RetryError as error:
        print(type(error).__name__)


asyncio.run(main())
"""


def quoted() -> list[str]:
    """Return the lines that the page quotes, up to what differs from one run to the next."""
    table = PAGE.read_text().partition("## Log messages of the environment")[2].partition("\n## ")[0]
    lines = re.findall(r"`((?:ERROR|WARNING|Failed|Error|Waiting)[^`]*)`", table)
    return [line.partition("…")[0] for line in lines]


def test_the_lines_that_the_page_quotes_are_those_that_an_environment_prints(
    checkout: Path, workspace: Path, model: str, tmp_path: Path
) -> None:
    serve = ["-c", "from penstock._cli import main; main()", "gateway", "--port", "0", "--capacity", "1"]
    gateway = started(*serve, cwd=tmp_path, log=tmp_path / "gateway.log")
    assert gateway.stdout is not None
    url = gateway.stdout.readline().split()[-1]
    script = tmp_path / "refused.py"
    script.write_text(REFUSED)

    environment = run(
        [str(script), url, model, str(workspace / "tokenizer")],
        cwd=workspace,
        folder=tmp_path,
        path=checkout / "environments/community/regex_generation",
    )
    environment.process.wait()
    ended(gateway)

    said = environment.log.read_text()
    assert len(quoted()) >= 4
    assert [line for line in quoted() if line not in said] == [], said
