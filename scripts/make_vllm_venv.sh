#!/usr/bin/env bash
# Makes the virtual environment $1 with a vLLM that runs on a CPU, for `make test-vllm`: 3.4 GB, on x86-64.
#
# Nothing is resolved, for vLLM asks for torchvision, torchaudio and torchcodec, of which a package index may have CUDA
# builds alone, and with those it cannot be imported. It runs without them.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
python=${PYTHON:-.venv/bin/python}

rm -rf "$venv"
"$python" -m venv "$venv" # with pip: vLLM lists the packages when it is asked for its settings
pip() { .venv/bin/python -m pip --disable-pip-version-check --python "$venv/bin/python" "$@"; }
pip install --quiet --no-deps --requirement scripts/vllm/requirements.txt
pip install --quiet --no-deps --require-hashes --requirement scripts/vllm/vllm.txt
