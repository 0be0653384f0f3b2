#!/usr/bin/env bash
# Builds the sdist, and the wheel from it, and runs each in empty environments of the given interpreters.
#
#   scripts/test_dist.sh python3.11 python3.13
#
# The sdist is installed without extras, for what needs none (scripts/smoke.sh); the wheel with the extra `train`, for a run of a
# small model. All run in folders of their own, where the package of the checkout cannot be imported by accident. The
# distributions stay in build/dist.
set -euo pipefail
cd "$(dirname "$0")/.."
dist=$PWD/build/dist
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

rm -rf "$dist"
"$1" -m venv "$work/tools"
"$work/tools/bin/python" -m pip install --quiet build twine
"$work/tools/bin/python" -m build --outdir "$dist" >"$work/build.log" || { cat "$work/build.log"; exit 1; }
"$work/tools/bin/python" -m twine check --strict "$dist"/*

for python in "$@"; do
  echo "== $("$python" --version), sdist"
  "$python" -m venv "$work/sdist"
  "$work/sdist/bin/python" -m pip install --quiet "$dist"/*.tar.gz
  scripts/smoke.sh "$work/sdist/bin"
  rm -rf "$work/sdist"

  echo "== $("$python" --version), wheel"
  "$python" -m venv "$work/wheel"
  "$work/wheel/bin/python" -m pip install --quiet "$(echo "$dist"/*.whl)[train]"
  (
    cd "$work"
    wheel/bin/penstock --version
    wheel/bin/penstock init --tiny tiny
    cd tiny
    ../wheel/bin/penstock check config.yaml
    ../wheel/bin/penstock run config.yaml algorithm.steps=3 record=true
    ../wheel/bin/penstock replay run
    ../wheel/bin/penstock doctor
  )
  rm -rf "$work/wheel" "$work/tiny"
done
