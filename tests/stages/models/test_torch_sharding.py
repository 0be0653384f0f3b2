from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from penstock._stages.models.torch_sharding import device_of, shard


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_an_offloaded_parameter_is_computed_with_on_the_device_of_its_mesh() -> None:
    whole = torch.zeros(2)
    gpus = DeviceMesh("cuda", [0], _init_backend=False)  # made by fully_shard where there is a GPU
    spec = DTensorSpec(gpus, (Shard(0),), TensorMeta(whole.shape, whole.stride(), whole.dtype))
    offloaded = DTensor(whole, spec, requires_grad=False)  # type: ignore[no-untyped-call]

    assert device_of(offloaded) == torch.device("cuda")
    assert device_of(whole) == torch.device("cpu")


@pytest.mark.usefixtures("one_rank")
def test_layers_gathered_in_bfloat16_have_the_gradients_of_autocast_over_the_whole_model_in_float32() -> None:
    torch.manual_seed(0)
    alone = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    shared = deepcopy(alone)
    gathered: list[torch.dtype] = []
    for layer in shared:
        layer.register_forward_pre_hook(lambda layer, _: gathered.append(next(layer.parameters()).dtype))
    shard(shared, list(shared.children())[:2], "cpu", torch.bfloat16)

    for model in (alone, shared):
        with torch.autocast("cpu", torch.bfloat16):
            found = model(torch.linspace(-1, 1, 16).view(2, 8))
        torch.autograd.backward(found.float().square().sum())

    assert gathered[-3:] == [torch.bfloat16, torch.bfloat16, torch.float32]
    for whole, part in zip(alone.parameters(), shared.parameters(), strict=True):
        assert isinstance(part.grad, DTensor)
        assert part.grad.dtype == torch.float32
        assert whole.grad is not None
        assert torch.equal(part.grad.full_tensor(), whole.grad)
