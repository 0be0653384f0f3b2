#!/usr/bin/env bash
# Ends with status 1, and says what to do, unless $1 is a checkout of the commit of Atropos that `make test-atropos` is for.
set -euo pipefail
checkout=${1:-}
commit=296a0bc55760e43b9c0743c052f8d6c2732606d1
url=https://github.com/NousResearch/atropos

if ! there=$(git -C "${checkout:-/nowhere}" rev-parse HEAD 2>/dev/null) || [ "$there" != "$commit" ]; then
  cat >&2 <<TEXT
ATROPOS: expected a checkout of Atropos at commit $commit, got ${checkout:-nothing}${there:+ at $there}.
  git clone $url atropos && git -C atropos checkout --detach $commit
  make test-atropos ATROPOS=atropos
TEXT
  exit 1
fi
