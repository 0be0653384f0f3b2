"""The inference servers that a configured run starts on this host, one after the other, and ends with it."""

from __future__ import annotations

import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from ..._pipeline.errors import InvalidConfig
from ..._pipeline.servers.outside_server import OutsideServer, http_ready
from ..models.hf_model import HFModel
from .dtypes import sampled_dtype
from .run_config import RunConfig, ServersConfig
from .torch_devices import device_of, max_length_of, server_devices


@asynccontextmanager
async def started(config: RunConfig, servers: ServersConfig, folder: str) -> AsyncGenerator[list[str]]:
    """Start the servers with the model in `folder`, and yield their URLs; all end with the body, and it with them.

    Raises:
        ServerFailed: one could not be started, was not ready in time, or ended before the body did, with its cause.
    """
    urls: list[str] = []
    async with AsyncExitStack() as stack:
        for place in range(servers.vllm):
            port = _free_port()
            await stack.enter_async_context(_server(config, servers, folder, place, port).open())
            urls.append(f"http://127.0.0.1:{port}")
        yield urls


def check_servers(config: RunConfig, model: HFModel) -> None:
    """Check that the servers have GPUs, and that each can divide the model, perhaps without weights, among its own.

    Raises:
        InvalidConfig: there are fewer GPUs, or a number of them that does not divide the heads of attention.
    """
    servers = config.placement.servers
    if servers is None:
        return
    server_devices(config)
    module: Any = model.module
    heads, gpus = module.config.get_text_config().num_attention_heads, servers.tensor_parallel
    if heads % gpus:
        divide = ", ".join(str(number) for number in range(1, heads + 1) if not heads % number)
        raise InvalidConfig(
            f"config: placement.servers.tensor_parallel: expected a number that divides the {heads} heads of attention "
            f"of {config.model.path}, got {gpus}: give {divide}"
        )


def _server(config: RunConfig, servers: ServersConfig, folder: str, place: int, port: int) -> OutsideServer:
    devices = server_devices(config)
    environment = {"VLLM_SERVER_DEV_MODE": "1"}  # the routes that load weights
    environment |= {"CUDA_VISIBLE_DEVICES": devices[place]} if devices else {}
    if config.algorithm.router_replay == "R3":
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the only one with a record of experts
    environment |= {} if servers.python is None else {"PYTHONPATH": ""}  # its packages are its own
    options = {
        "model": folder,
        "served-model-name": config.model.path,
        "host": "127.0.0.1",
        "port": port,
        "dtype": sampled_dtype(config, device_of(config).type),
        "max-model-len": max_length_of(config),
        "tensor-parallel-size": servers.tensor_parallel,
        "logprobs-mode": "processed_logprobs",  # those of the distribution that is sampled from
    }
    return OutsideServer(
        command=[
            servers.python or sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            *(f"--{name}={value}" for name, value in options.items()),
            *(["--enable-return-routed-experts"] if config.algorithm.router_replay == "R3" else []),
            *([f"--max-logprobs={config.sampling.support}"] if config.sampling.support else []),
            *servers.arguments,
        ],
        ready=http_ready(f"http://127.0.0.1:{port}/health"),
        name="vllm" if servers.vllm == 1 else f"vllm-{place}",
        logs=config.run_folder / "servers",
        environment=environment,
    )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port
