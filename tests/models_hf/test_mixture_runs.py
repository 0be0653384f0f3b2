"""A configured run of a mixture of experts, which trains with the experts that sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path

import pytest
from tests.models_hf.questions import Questions, write_questions
from tests.run_parts import run_parts

from penstock.errors import InvalidConfig
from penstock.policies import HttpPolicy, RoutedExperts
from penstock.runs import load_run_config

ModelFolder = Callable[[str], Path]


@pytest.fixture(scope="module", autouse=True)
def _questions_are_in_the_current_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with chdir(tmp_path_factory.mktemp("questions")):
        yield


@pytest.fixture(scope="module")
def questions(model_folder: ModelFolder) -> Questions:
    return write_questions(Path.cwd(), model_folder("qwen3 moe"))


def test_a_run_replays_the_experts_of_its_samplers_and_balances_them(questions: Questions) -> None:
    ran = questions.train("algorithm.router_replay=R3", "algorithm.router_aux_loss=0.01", "algorithm.max_lag=0")

    assert ran.summary.steps == 4
    for line in ran.steps():
        assert line["ratio/mean"] == pytest.approx(1.0, abs=1e-4)
        assert line["router_aux_loss"] > 0.9


def test_servers_are_asked_for_records_of_the_models_shape(questions: Questions) -> None:
    values = questions.values | {"server": {"url": "http://here:1"}, "engine": "sglang"}

    asked, plain = (
        run_parts(load_run_config(values, given)).policy(None)
        for given in (["algorithm.router_replay=R3"], ["algorithm.router_replay=R2"])
    )

    assert isinstance(asked, HttpPolicy)
    assert isinstance(plain, HttpPolicy)
    assert asked.routed_experts == RoutedExperts(layers=2, chosen=2, experts=4)
    assert plain.routed_experts is None


def test_a_model_without_experts_is_refused_before_anything_starts(
    questions: Questions, model_folder: ModelFolder
) -> None:
    values = questions.values | {"model": {"path": str(model_folder("qwen2"))}}

    for key in ("algorithm.router_replay=R2", "algorithm.router_aux_loss=0.1"):
        with pytest.raises(InvalidConfig, match="expected a mixture of experts, got a Qwen2ForCausalLM"):
            run_parts(load_run_config(values, [key]))


def test_experts_of_an_engine_are_refused_where_nothing_is_sampled(questions: Questions) -> None:
    given = ["algorithm.loss=sft", "algorithm.router_replay=R3"]

    with pytest.raises(InvalidConfig, match=r"algorithm.router_replay: expected R2 or null with algorithm.loss sft"):
        load_run_config({"model": questions.values["model"], "data": {"path": "train.jsonl"}, "reward": {}}, given)
