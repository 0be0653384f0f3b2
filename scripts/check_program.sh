#!/usr/bin/env bash
# Ends with one line, for the make target $1, where the program $2 is not on the path.
set -euo pipefail
command -v "$2" > /dev/null && exit
echo "$1: expected the program $2 on the path, found none: install it (Debian: apt-get install $2)" >&2
exit 1
