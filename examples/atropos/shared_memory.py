r"""Send the groups of an unchanged environment of Atropos to a gateway of penstock through shared memory.

    PYTHONPATH=atropos/environments/community/regex_generation python examples/atropos/shared_memory.py serve \
        --env.rollout_server_url http://127.0.0.1:8000

Only the line below the imports is added; command line, configuration files and logs are those of Atropos.
"""

from regex_env import RegexEnv  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]

from penstock.integrations.atropos import ShmTransport


class SharedMemoryRegexEnv(ShmTransport, RegexEnv):  # type: ignore[misc]
    """RegexEnv with shared memory as the transport of its groups."""


if __name__ == "__main__":
    SharedMemoryRegexEnv.cli()
