#!/usr/bin/env bash
# Makes the virtual environment $1 with SkyRL, for `make test-skyrl`: 6 GB where the package index has CUDA builds of torch.
#
# SkyRL needs Python 3.12 or later. Its own extras are left out: they are vLLM, FlashAttention and others for GPUs.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
python=${SKYRL_PYTHON:-python3.12}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null || {
  echo "SkyRL needs Python >= 3.12, and $python is not there or older; try make test-skyrl SKYRL_PYTHON=/path/of/python3.12" >&2
  exit 1
}
rm -rf "$venv"
"$python" -m venv --without-pip "$venv"
.venv/bin/python -m pip --disable-pip-version-check --python "$venv/bin/python" install --quiet \
  --requirement scripts/skyrl/requirements.txt
