"""Checks of the installed packages, for `penstock doctor`: versions, extras, CURVE, the GPU."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import zmq

from .. import __version__
from .._pipeline.util.installation import install_command
from .findings import Finding

BASE = ("anyio", "cloudpickle", "msgspec", "numpy", "pyzmq", "structlog", "xxhash")

EXTRAS = {
    "torch": ("torch", "safetensors"),
    "http": ("aiohttp",),
    "tokenizers": ("tokenizers",),
    "train": ("datasets", "jinja2", "peft", "transformers"),
    "math": ("math-verify",),
    "report": ("itables", "jinja2", "matplotlib", "plotly"),
    "tensorboard": ("tensorboardx",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "mlflow": ("alembic", "mlflow-skinny", "sqlalchemy"),
    "prometheus": ("prometheus_client",),
    "ray": ("ray",),
    "mcp": ("mcp",),
    "verifiers": ("verifiers",),
    "openenv": ("websockets",),
    "trl": ("requests", "trl"),
    "skyrl": ("skyrl",),
    "verl": ("TransferQueue", "cachetools", "fastapi", "uvicorn", "verl"),
    "gateway": ("httptools", "starlette", "uvicorn"),
}
"""The packages of each extra, as in pyproject.toml."""

NEEDED_FOR = {
    "torch": "training and sampling torch models",
    "http": "inference servers, judges, and Atropos",
    "tokenizers": "tokenizers in a folder",
    "train": "models of transformers, and data sets",
    "math": "the reward of math-verify",
    "report": "penstock report and penstock plot",
    "tensorboard": "the tracker TensorBoard",
    "wandb": "the tracker WandB",
    "trackio": "the tracker Trackio",
    "mlflow": "the tracker MLflow",
    "prometheus": "the tracker Prometheus",
    "ray": "stages on ray()",
    "mcp": "tools of MCP servers",
    "verifiers": "tasksets of verifiers",
    "openenv": "environments at servers of OpenEnv",
    "trl": "flows in the trainers of TRL",
    "skyrl": "flows in the trainers of SkyRL",
    "verl": "flows in the trainer of verl",
    "gateway": "penstock gateway, and the endpoint of agents",
}


def version_checks() -> list[Finding]:
    """Return the findings about the installed packages. Imports torch, if it is there."""
    return [base(), *(of_extra(name) for name in EXTRAS), curve(), *gpu()]


def base() -> Finding:
    """Report the versions of penstock and of its required packages."""
    versions = [f"Python {platform.python_version()}", f"ZeroMQ {zmq.zmq_version()}"]
    return Finding(f"penstock {__version__}", ", ".join([*versions, *(f"{name} {_version(name)}" for name in BASE)]))


def of_extra(name: str) -> Finding:
    """Report the packages of an extra, those that are absent included."""
    found = {package: _version(package) for package in EXTRAS[name]}
    text = ", ".join(f"{package} {installed}" for package, installed in found.items() if installed)
    if absent := [package for package, installed in found.items() if not installed]:
        text = ", ".join(filter(None, [text, f"{' and '.join(absent)} not installed"]))
        return Finding(f"extra {name}", text, "note", f"{NEEDED_FOR[name]} will not work", install_command(name))
    return Finding(f"extra {name}", text)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def curve() -> Finding:
    """Report whether ZeroMQ has CURVE: every tcp channel uses it."""
    if zmq.has("curve"):
        return Finding("encryption", "CURVE")
    remedy = "pip install --force-reinstall pyzmq, whose wheels have it"
    return Finding("encryption", "ZeroMQ was built without CURVE", "note", "tcp:// channels will not work", remedy)


def gpu() -> list[Finding]:
    """Report the CUDA devices, if torch is installed."""
    if not _version("torch"):
        return []
    try:
        import torch  # noqa: PLC0415 (a second or more)
    except (ImportError, OSError) as error:  # a library of the system is absent, or of another version
        found = f"torch cannot be imported: {error}"
        return [
            Finding("GPU", found, "note", "training and sampling torch models will not work", "install torch again")
        ]
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
        names = [f"{device.name}, {device.total_memory / 2**30:.0f} GiB" for device in devices]
        return [Finding("GPU", f"{'; '.join(names)}; CUDA {torch.version.cuda}")]
    affects = "torch trains and samples on the CPU"
    if torch.version.cuda is None:
        return [Finding("GPU", "torch was built without CUDA", "note", affects, "install a build of torch with CUDA")]
    return [Finding("GPU", "torch finds no device", "note", affects, "check nvidia-smi, the driver, the container")]
