"""What the tests use of verl and the packages beside it: imported by name, for type checkers run without them."""

from __future__ import annotations

import importlib
from typing import Any


def of(module: str) -> Any:
    return importlib.import_module(module)


ray, tq, hydra, omegaconf, pandas = (of(name) for name in ("ray", "transfer_queue", "hydra", "omegaconf", "pandas"))

agent_loop = of("verl.experimental.agent_loop.agent_loop")
agent_loop_tq = of("verl.trainer.ppo.v1.agent_loop_tq")
base = of("verl.trainer.ppo.v1.trainer_base")
checkpoint_engine = of("verl.checkpoint_engine")
config = of("verl.utils.config")
import_utils = of("verl.utils.import_utils")
llm_server = of("verl.workers.rollout.llm_server")
losses = of("verl.workers.utils.losses")
padding_utils = of("verl.trainer.ppo.padding_utils")
replicas = of("verl.workers.rollout.replica")
reward_loop = of("verl.experimental.reward_loop.reward_loop")
rollouts = of("verl.workers.rollout.base")
tu = of("verl.utils.tensordict_utils")
utils = of("verl.trainer.ppo.utils")

compute_advantage: Any = of("verl.trainer.ppo.ray_trainer").compute_advantage
SingleTurnAgentLoop: Any = of("verl.experimental.agent_loop.single_turn_agent_loop").SingleTurnAgentLoop
PPOTrainer: Any = base.PPOTrainer
PPOTrainerSync: Any = of("verl.trainer.ppo.v1.trainer_sync").PPOTrainerSync
PPOTrainerColocateAsync: Any = of("verl.trainer.ppo.v1.trainer_colocate_async").PPOTrainerColocateAsync
