#!/usr/bin/env bash
# Ends with status 1, and says what to do, unless $5 is a checkout of commit $4 of the repository at $3, which `make $1` is for.
set -euo pipefail
target=$1 variable=$2 url=$3 commit=$4 checkout=${5:-}
name=${url##*/}

if ! there=$(git -C "${checkout:-/nowhere}" rev-parse HEAD 2>/dev/null) || [ "$there" != "$commit" ]; then
  cat >&2 <<TEXT
$variable: expected a checkout of $name at commit $commit, got ${checkout:-nothing}${there:+ at $there}.
  git clone $url $name && git -C $name checkout --detach $commit
  make $target $variable=$name
TEXT
  exit 1
fi
