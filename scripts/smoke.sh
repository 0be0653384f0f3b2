#!/usr/bin/env bash
# Runs what needs no extra with an installed penstock: the command line and three examples, two processes among them.
#
#   scripts/smoke.sh empty/bin     the folder with the interpreter and the command
#
# It runs in a folder of its own, where the package of the checkout cannot be imported by accident.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
bin=$(cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$root"/examples/{hello,custom_stage,two_processes}.py "$work"
cd "$work"

"$bin/penstock" --help
for script in hello custom_stage two_processes; do
  timeout 120 "$bin/python" "$script.py"
done
