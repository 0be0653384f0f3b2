#!/usr/bin/env bash
# Makes the virtual environment $1 with Atropos, for `make test-atropos`: 600 MB beside .venv, of which it sees the packages.
#
# Nothing is resolved: .venv, at the versions of constraints.txt, and scripts/atropos/requirements.txt make up a set that
# was resolved together once. torch, transformers and penstock itself are therefore there once.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
python=${PYTHON:-.venv/bin/python}

rm -rf "$venv"
"$python" -m venv --without-pip "$venv"
.venv/bin/python -m pip --disable-pip-version-check --python "$venv/bin/python" install --quiet --no-deps \
  --requirement scripts/atropos/requirements.txt
packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
echo "import site; site.addsitedir('$(packages .venv/bin/python)')" >"$(packages "$venv/bin/python")/penstock.pth"
