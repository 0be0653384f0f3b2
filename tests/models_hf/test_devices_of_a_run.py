"""What a configured run places on the devices of a host: GPUs of its processes, and memory, before a weight is read."""

from __future__ import annotations

import json
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.configured_run import write_run
from tests.models_hf.questions import Questions, write_questions

from penstock._stages.training_run import torch_memory
from penstock._stages.training_run.torch_devices import device_of, sampler_devices, server_devices
from penstock._stages.training_run.torch_memory import DeviceNeeds, needs_of_run
from penstock._stages.training_run.torch_parts import RunParts
from penstock.errors import InvalidConfig
from penstock.runs import RunConfig, describe_run, load_run_config

# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory, model_folder: Any) -> Questions:
    return write_questions(tmp_path_factory.mktemp("memory"), model_folder("qwen2"))


def parts_with(questions: Questions, *overrides: str) -> RunParts:
    with chdir(questions.folder):
        return RunParts(load_run_config(questions.values, [f"data.path={questions.folder}/train.jsonl", *overrides]))


def needs_of(parts: RunParts) -> DeviceNeeds:
    (needs,) = needs_of_run(parts.config, parts.empty_model())
    return needs


def nbytes(model: torch.nn.Module, *, trained: bool | None = None) -> int:
    """Return the bytes of all parameters, or of those that train or do not."""
    return sum(each.nbytes for each in model.parameters() if trained is None or each.requires_grad is trained)


@pytest.mark.parametrize(
    ("overrides", "copies"),
    [([], 0), (["algorithm.kl=0.1"], 0), (["model.lora={rank: 2}", "model.base_dtype=bfloat16"], 1)],
    ids=["all parameters", "a reference", "adapters"],
)
def test_what_is_exact_are_the_bytes_of_the_tensors_that_are_made(
    overrides: list[str], copies: int, questions: Questions
) -> None:
    """The torch engine maps the published weights; with adapters each sampler has a copy of the base."""
    parts = parts_with(questions, *overrides)
    model = parts.model()
    trained = nbytes(model, trained=True)
    reference = parts.reference(model)
    frozen_copy = nbytes(reference) if isinstance(reference, torch.nn.Module) else 0

    exact = needs_of(parts).exact

    assert exact["weights"] == nbytes(model)
    assert (exact["gradients"], exact["moments"]) == (trained, 2 * trained)
    assert exact.get("reference", 0) == frozen_copy
    assert exact["published versions"] == 2 * trained
    sampled = sum(each.numel() for each in model.parameters()) * 2
    assert exact.get("weights of samplers", 0) == copies * sampled


def test_checkpointed_activations_and_smaller_micro_batches_need_less(questions: Questions) -> None:
    def bound(*overrides: str) -> int:
        return needs_of(parts_with(questions, *overrides)).bounds["activations"]

    tokens = "algorithm.optimizer.micro_batch_tokens"
    assert bound("model.gradient_checkpointing=true") < bound()
    assert bound(f"{tokens}=1024") * 3 == bound()
    assert bound(f"{tokens}=null") == bound(f"{tokens}={2 * 4 * (512 + 6)}")


def test_a_model_that_does_not_fit_is_refused_with_what_is_needed_and_what_fits(
    questions: Questions, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = needs_of(parts_with(questions)).least
    monkeypatch.setattr(torch_memory, "total_bytes", lambda: needed - 1)

    with pytest.raises(
        InvalidConfig, match=r"fits into cpu, which has .* needs .*: weights .*, gradients .*; what fits: "
    ) as refused:
        parts_with(questions).sketch()

    assert "model.lora={rank: 16} with model.base_dtype=bfloat16" in str(refused.value)


def test_seven_billion_parameters_are_counted_without_a_weight(tmp_path: Path) -> None:
    """The shape of Qwen2.5-7B: 16 bytes a parameter to train, and two published versions of 4."""
    config = write_run(tmp_path, {})
    shape = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    written = json.loads((tmp_path / "model/config.json").read_text())
    del written["layer_types"]
    written |= shape | {"num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False, "head_dim": 128}
    (tmp_path / "model/config.json").write_text(json.dumps(written))

    with pytest.raises(
        InvalidConfig, match=r"fits into cpu, which has \S+ GiB, got one that needs (\d+\.\d) GiB"
    ) as refused:
        describe_run(load_run_config(config))

    needed = float(str(refused.value).partition("needs ")[2].partition(" ")[0])
    assert needed == pytest.approx(7_615_616_512 * 24 / 2**30, rel=0.01)


# -- GPUs --------------------------------------------------------------------------------------------------------------


def placed(**placement: Any) -> RunConfig:
    return load_run_config({"model": {"path": "m"}, "data": {"path": "d"}, "reward": {}, "placement": placement})


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)


@pytest.mark.parametrize(
    ("placement", "devices"),
    [
        ({"trainers": 4, "samplers": 4}, ["cuda:4", "cuda:5", "cuda:6", "cuda:7"]),
        ({"trainers": 7, "samplers": 2}, ["cuda:7", "cuda:7"]),
        ({"trainers": 8, "samplers": 2}, ["cuda:0", "cuda:1"]),
        ({"samplers": 1, "sampler_device": "cuda:5"}, ["cuda:5"]),
        ({"samplers": 2, "device": "cpu"}, ["cpu", "cpu"]),
        ({"samplers": 2, "device": "cuda:1"}, ["cuda:0", "cuda:2"]),
        ({"servers": {"vllm": 1}}, []),
    ],
)
def test_samplers_share_the_gpus_that_do_not_train(
    placement: dict[str, Any], devices: list[str], eight_gpus: None
) -> None:
    del eight_gpus
    assert sampler_devices(placed(**placement)) == devices


def test_a_rank_trains_on_the_gpu_of_its_place(eight_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    del eight_gpus
    monkeypatch.setenv("LOCAL_RANK", "3")

    assert device_of(placed(trainers=4)) == torch.device("cuda:3")
    assert device_of(placed()) == torch.device("cuda:0")  # the variable is of another launcher's


def test_servers_get_the_gpus_behind_those_that_train(eight_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    del eight_gpus
    servers = {"vllm": 2, "tensor_parallel": 2}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert server_devices(placed(trainers=4, samplers=2, servers=servers)) == ["4,5", "6,7"]

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3,2,1,0")
    assert server_devices(placed(trainers=4, samplers=2, servers=servers)) == ["3,2", "1,0"]
    assert server_devices(placed(device="cpu", samplers=2, servers=servers)) == ["7,6", "5,4"]


def test_servers_for_which_there_are_too_few_gpus_are_refused(eight_gpus: None) -> None:
    del eight_gpus
    server_devices(placed(trainers=4, samplers=2, servers={"vllm": 2, "tensor_parallel": 2}))

    with pytest.raises(InvalidConfig, match=r"servers: expected at most 3 GPUs, .* got 2 servers of 2, 4"):
        server_devices(placed(trainers=5, samplers=2, servers={"vllm": 2, "tensor_parallel": 2}))


def test_a_model_whose_heads_the_gpus_of_a_server_do_not_divide_is_refused(questions: Questions) -> None:
    parts_with(questions, "placement.servers={vllm: 1, tensor_parallel: 2}").sketch()

    with pytest.raises(
        InvalidConfig, match=r"tensor_parallel: expected a number that divides the 4 heads .*, got 3: give 1, 2, 4$"
    ):
        parts_with(questions, "placement.servers={vllm: 1, tensor_parallel: 3}").sketch()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"engine": "sglang"}, "placement.servers: expected neither server nor another engine"),
        ({"engine": "vllm", "server": {"url": "http://a:1"}}, "placement.servers: expected neither server nor another"),
        ({"placement": {"samplers": 1, "servers": {"vllm": 2}}}, "samplers: expected at least 2, one for each server"),
        ({"placement": {"servers": {"vllm": 1}, "ray": {}}}, "placement.servers: expected samplers of this host"),
    ],
)
def test_servers_beside_another_engine_are_refused(values: dict[str, Any], message: str) -> None:
    base = {"model": {"path": "m"}, "data": {"path": "d"}, "reward": {}, "placement": {"servers": {"vllm": 1}}}

    with pytest.raises(InvalidConfig, match=message):
        load_run_config(base | values)
