from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from penstock._stages.models.torch_sharding import device_of


def test_an_offloaded_parameter_is_computed_with_on_the_device_of_its_mesh(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        whole = torch.zeros(2)
        gpus = DeviceMesh("cuda", [0], _init_backend=False)  # made by fully_shard where there is a GPU
        spec = DTensorSpec(gpus, (Shard(0),), TensorMeta(whole.shape, whole.stride(), whole.dtype))
        offloaded = DTensor(whole, spec, requires_grad=False)  # type: ignore[no-untyped-call]

        assert device_of(offloaded) == torch.device("cuda")
        assert device_of(whole) == torch.device("cpu")
    finally:
        dist.destroy_process_group()
