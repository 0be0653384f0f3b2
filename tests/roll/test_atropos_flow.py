"""A tag of ROLL's configuration that names an environment of Atropos in place of a function."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import pytest
from tests.atropos import step_environments
from tests.atropos.step_environments import STAND_IN
from tests.fake_policy import FakePolicy
from tests.letter_model import write_letter_model

from penstock import SourceEnv
from penstock._stages.integrations.roll.atropos_flow import atropos_source, flow_function
from penstock.errors import InvalidConfig
from penstock.integrations.roll import RollJob, ShapedEnvManager
from penstock.policies import SamplingParams
from penstock.testing import drive_source

ROOT = "custom_envs.sums"


def test_a_tag_names_either_a_function_or_an_environment() -> None:
    with pytest.raises(InvalidConfig, match=r"custom_envs\.sums: expected one of flow, .* got none"):
        flow_function({}, ROOT)
    with pytest.raises(InvalidConfig, match=r"custom_envs\.sums: expected one of flow, .* got flow and atropos"):
        flow_function({"flow": "my_run:flow", "atropos": "sums:Sums"}, ROOT)
    with pytest.raises(InvalidConfig, match=r"custom_envs\.sums\.python: expected none without atropos"):
        flow_function({"flow": "tests.roll.environments:Sums", "python": "python3"}, ROOT)


def test_an_environment_that_scores_groups_is_refused_by_the_env_manager_of_single_rollouts() -> None:
    with pytest.raises(InvalidConfig, match=r"sums\.env_manager_cls: expected penstock.*FlowEnvManager with atropos"):
        ShapedEnvManager(env_config={"tag": "sums", "atropos": "sums:Sums"})


@pytest.fixture
def sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SourceEnv:
    """Return the source of a tag whose policy answers in turn."""
    monkeypatch.syspath_prepend(str(STAND_IN))
    answers = cycle(["2", "3", "4", "5"])
    job = RollJob(
        tag="sums",
        policy=FakePolicy(answer=lambda _: next(answers)),
        model=str(write_letter_model(tmp_path, "".join(map(chr, range(128))))),
        sampling=SamplingParams(max_completion_tokens=4),
        max_length=16,
        group_size=4,
        options={"first": 0},
    )

    return atropos_source(job, f"{step_environments.__file__}:Group", None)


async def test_roll_samples_the_groups_that_the_environment_scores(sampled: SourceEnv) -> None:
    (group,) = await drive_source(sampled, limit=1)

    # Groups that are sampled at once take answers in turn from one row of them, so that one may have an answer twice.
    # The first prompt, whose answer is 2, may then have no right one, and its group be dropped.
    right = f"{2 * int(group.instance_id) + 2}\0"
    said = [("".join(map(chr, row.tokens[row.loss_mask])), row.reward) for row in group]
    assert len(said) == 4
    assert {score for _, score in said} == {0.0, 1.0}
    assert all(answer in {"2\0", "3\0", "4\0", "5\0"} and score == (answer == right) for answer, score in said)
