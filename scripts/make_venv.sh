#!/usr/bin/env bash
# Makes or updates the virtual environment $1 with penstock, its extras and its tools, at the versions of constraints.txt.
#
# Needs Python >= 3.11 and a package index; pip's own configuration and environment variables are respected.
# Two things that a bare Debian machine lacks are worked around, each where it turns out to be lacking:
#   ensurepip (package python3-venv)  -> scripts/fetch_pip.py gets pip from the package index
#   a C compiler                      -> scripts/uncompiled/pycosat stands in for the one dependency that has to be compiled
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "penstock needs Python >= 3.11, $python is $("$python" --version 2>&1); try make PYTHON=python3.12" >&2
  exit 1
}

if [ ! -x "$venv/bin/pip" ]; then
  echo "Making $venv; the first time this downloads torch, which takes minutes."
  rm -rf "$venv"
  if "$python" -c 'import ensurepip' 2>/dev/null; then
    "$python" -m venv "$venv"
  else
    "$python" -m venv --without-pip "$venv"
    "$venv/bin/python" scripts/fetch_pip.py
  fi
fi

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# reasoning-gym imports pycosat, which has no wheels: it has to be compiled. Nothing here calls it.
if ! "$venv/bin/python" -c 'import pycosat' 2>/dev/null; then
  pip install --quiet --constraint constraints.txt pycosat 2>/dev/null || pip install --quiet ./scripts/uncompiled/pycosat
fi
pip install --constraint constraints.txt --editable '.[dev]'
