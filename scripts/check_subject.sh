#!/usr/bin/env bash
# Refuses the commit message in file $1 whose subject is longer than 72 characters, ends with a full stop or begins in lower case.
set -euo pipefail
subject=$(head -n 1 "$1")
case $subject in "fixup! "* | "squash! "* | "Merge "*) exit 0 ;; esac
if [ ${#subject} -gt 72 ] || [[ $subject == *. ]] || [[ $subject != [[:upper:]]* ]]; then
  echo "expected a subject that begins with a capital letter, of at most 72 characters, without a full stop;" >&2
  echo "got ${#subject} characters: $subject" >&2
  exit 1
fi
