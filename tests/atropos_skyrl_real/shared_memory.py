"""GSM8kEnv of Atropos, unchanged, with shared memory as the transport of its groups."""

from gsm8k_server import GSM8kEnv  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]

from penstock.integrations.atropos import ShmTransport


class SharedMemoryGSM8kEnv(ShmTransport, GSM8kEnv):  # type: ignore[misc]
    """GSM8kEnv with one base class more."""


if __name__ == "__main__":
    SharedMemoryGSM8kEnv.cli()
