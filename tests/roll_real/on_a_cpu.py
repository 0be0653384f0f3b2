"""ROLL's pipeline on a CPU: its classes, with what needs a GPU or vLLM replaced by torch.

Four things are replaced: the engine of `actor_infer`, the strategy of `actor_train` (forward, backward, step), the
transfer of the weights between the two, and the sampling parameters that ROLL's router client makes with vLLM's
classes. Everything else is ROLL's: `AgenticPipeline.run`, its schedulers, queues and routers, `EnvironmentWorker`,
`ActorWorker.train_step` and its loss, rewards, advantages and metrics.
"""

# mypy: allow-subclassing-any, allow-untyped-decorators
# ROLL is no package of the ordinary tests.

from __future__ import annotations

import asyncio
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

ray: Any = import_module("ray")
Worker: Any = import_module("roll.distributed.executor.worker").Worker
Dispatch: Any = import_module("roll.distributed.scheduler.decorator").Dispatch
register: Any = import_module("roll.distributed.scheduler.decorator").register
RouterClient: Any = import_module("roll.distributed.scheduler.router").RouterClient
TrainStrategy: Any = import_module("roll.distributed.strategy.strategy").TrainStrategy
ActorWorker: Any = import_module("roll.pipeline.agentic.agentic_actor_worker").ActorWorker
AgenticPipeline: Any = import_module("roll.pipeline.agentic.agentic_pipeline").AgenticPipeline
register_llm_proxy: Any = import_module("roll.pipeline.agentic.llm_proxy.base_llm_proxy").register_llm_proxy
EnvironmentWorker: Any = import_module("roll.pipeline.agentic.environment_worker").EnvironmentWorker
PolicyProxy: Any = import_module("roll.pipeline.agentic.llm_proxy.policy_proxy").PolicyProxy
current_platform: Any = import_module("roll.platforms").current_platform

MEMORY = (
    *("device_count", "memory_allocated", "memory_reserved", "max_memory_reserved", "device_memory_used"),
    *("empty_cache", "init"),
)
"""Functions of a device's memory, which ROLL calls on every platform and does not have for a CPU."""


class InferWorker(Worker):
    """Samples by transformers, token by token, as one worker of `actor_infer`."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def initialize(self, pipeline_config: Any) -> None:
        super().initialize(pipeline_config)
        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(self.worker_config.model_args.model_name_or_path)
        self._running: set[str] = set()
        self._aborted: set[str] = set()

    async def generate_request(self, payload: dict[str, Any]) -> dict[str, Any]:
        request = payload["rid"]
        self._running.add(request)
        tokens: list[int] = []
        logprobs: list[float] = []
        while request not in self._aborted and len(tokens) < payload["sampling_params"]["max_tokens"]:
            logits = self._logits([*payload["input_ids"], *tokens])
            tokens.append(int(torch.multinomial(logits.exp(), 1)))
            logprobs.append(float(logits[tokens[-1]]))
            if tokens[-1] in payload["sampling_params"]["stop_token_ids"]:
                break
            await asyncio.sleep(0)
        aborted = request in self._aborted
        self._running.discard(request)
        self._aborted.discard(request)
        reason = "abort" if aborted else "stop" if len(tokens) < payload["sampling_params"]["max_tokens"] else "length"
        return {"finish_reasons": [reason], "output_token_ids": [tokens], "output_logprobs": [logprobs]}

    async def abort_requests(self, request_ids: list[str]) -> None:
        self._aborted.update(self._running.intersection(request_ids))

    async def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        self._model.load_state_dict(weights)

    @torch.no_grad()
    def _logits(self, tokens: list[int]) -> torch.Tensor:
        found: torch.Tensor = self._model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        return found


class CpuStrategy(TrainStrategy):
    """Trains by plain torch in one process."""

    strategy_name = "cpu_train"

    def initialize(self, *_: Any, **__: Any) -> None:
        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(self.worker_config.model_args.model_name_or_path)
        rate = self.worker_config.training_args.learning_rate
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, weight_decay=0.0)
        self.scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, factor=1.0)
        self._infer: list[Any] = []

    def train_step(self, batch: Any, loss_func: Any) -> dict[str, Any]:
        tokens = batch.batch["response_mask"][:, 1:].sum()
        batch.meta_info["batch_num_tokens"] = {"response_mask": tokens}
        batch.meta_info["global_valid_samples"] = {"response_mask": torch.tensor(len(batch)), "default": len(batch)}
        logits = self.model(batch.batch["input_ids"], attention_mask=batch.batch["attention_mask"]).logits
        loss, metrics = loss_func(batch, logits)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return dict(metrics)

    def forward_step(self, batch: Any, forward_func: Any) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            logits = self.model(batch.batch["input_ids"], attention_mask=batch.batch["attention_mask"]).logits
            _, results = forward_func(batch, logits)
        return dict(results)

    def setup_model_update(self, infer_cluster: Any, model_update_name: str) -> None:
        del model_update_name
        self._infer = infer_cluster.workers

    def model_update(self, model_update_name: str) -> dict[str, float]:
        del model_update_name
        weights = ray.put(self.model.state_dict())
        ray.get([worker.load_weights.remote(weights) for worker in self._infer])
        return {}

    def save_checkpoint(self, save_dir: str, global_step: int, ckpt_id: str, **_: Any) -> dict[str, float]:
        del global_step, ckpt_id
        self.model.save_pretrained(save_dir)
        return {}

    def load_states(self, *_: Any, **__: Any) -> None:
        pass

    def offload_states(self, *_: Any, **__: Any) -> None:
        pass


class TrainWorker(ActorWorker):
    """ROLL's worker of `actor_train`, with `CpuStrategy`."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config: Any) -> None:
        Worker.initialize(self, pipeline_config)
        for name in MEMORY:
            setattr(current_platform, name, lambda: 0)
        self.strategy = CpuStrategy(self)
        self.strategy.initialize()


class Client(RouterClient):
    """ROLL's client of its router, without the classes of vLLM."""

    def _preprocess_generate(self, req: Any, request_id: str | None) -> tuple[dict[str, Any], str]:
        config = req.meta_info["generation_config"]
        ends = [self.eos_token_id, self.pad_token_id]
        sampling = {"max_tokens": config["max_new_tokens"], "stop_token_ids": ends}
        request = request_id or f"{id(req)}-{torch.randint(2**62, ()).item()}"
        return {"rid": request, "input_ids": req.batch["input_ids"][0].tolist(), "sampling_params": sampling}, request


@register_llm_proxy("router_on_a_cpu")
class CpuProxy(PolicyProxy):
    """ROLL's proxy of its policy, with that client."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        client: Any = vars(self)["router_client"]
        meta = {name: getattr(client, name) for name in ("strategy_name", "eos_token_id", "pad_token_id")}
        self.router_client: Any = Client(client.proxy, meta)


class EnvWorker(EnvironmentWorker):
    """ROLL's worker of environments, in a process that knows that proxy."""


class Updates:
    """ROLL's `ModelUpdateGroup` for clusters without GPUs, which it refuses."""

    def __init__(self, source: Any, target: Any) -> None:
        self.tgt_cluster = target
        self._source = source
        ray.get(
            [
                worker.setup_model_update.remote(infer_cluster=target, model_update_name="cpu")
                for worker in source.workers
            ]
        )

    def model_update(self, step: int) -> dict[str, float]:
        del step
        ray.get([worker.start_model_update.remote(model_update_name="cpu") for worker in self._source.workers])
        return {}


class CpuPipeline(AgenticPipeline):
    """ROLL's pipeline; keeps what it logs."""

    def __init__(self, config: Any) -> None:
        self.logged: list[dict[str, Any]] = []
        current_platform.random = SimpleNamespace(get_rng_state_all=list, set_rng_state_all=id)  # of a GPU's generators
        super().__init__(config)
        self.tracker.log = lambda values, step: self.logged.append({"step": step, **values})

    def set_model_update_pair(self, src_cluster: Any, tgt_cluster: Any, frequency: int = 1) -> None:
        del frequency
        self.model_update_groups = [Updates(src_cluster, tgt_cluster)]
