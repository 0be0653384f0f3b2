r"""Do the same as shared_memory.py in a program that creates its environment itself, without a command line.

PYTHONPATH=atropos/environments/community/regex_generation python examples/atropos/shared_memory_attached.py \
        http://127.0.0.1:8000 http://127.0.0.1:9001/v1 my-model groups.jsonl
"""

import asyncio
import sys

from regex_env import RegexEnv  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]

from penstock.integrations.atropos import ShmTransport


def main(gateway: str, model_server: str, model: str, groups: str) -> None:
    """Run the environment until the gateway closes."""
    config, (server,) = RegexEnv.config_init()
    config.rollout_server_url, config.tokenizer_name, config.data_path_to_save_groups = gateway, model, groups
    config.group_size, config.max_token_length, config.use_wandb = 4, 8192, False
    server.base_url, server.model_name, server.server_type = model_server, model, "vllm"

    env = ShmTransport.attach(RegexEnv(config, [server], slurm=False))  # before: env = RegexEnv(config, …)

    asyncio.run(env.env_manager())


if __name__ == "__main__":
    main(*sys.argv[1:])
