#!/usr/bin/env bash
# Fails if the notebooks and what is made from them disagree. Run from a clean checkout, with the development environment active.
set -euo pipefail
cd "$(dirname "$0")/.."
fail() { echo "CHECK FAILED: $*" >&2; exit 1; }
changed() { git status --porcelain --untracked-files=all -- "$@"; }
unchanged() { local now; now="$(changed "$1")"; [ -z "$now" ] || fail "$2:"$'\n'"$now"; }
unchanged . "start from a clean checkout"
# nbdev hides merge markers in Markdown cells, where they break no test
if git ls-files -z 'nbs/*.ipynb' | xargs -0 grep -lE '(<<<<<<<|>>>>>>>) '; then fail "merge markers are left in the notebooks above"; fi
nbdev-clean
unchanged nbs "these notebooks are not clean, run nbdev-clean"
# delete what is generated, so that a module which no notebook makes any more shows as deleted; an __init__.py is nbdev's only when it holds nothing
git ls-files -z 'sparkinfer/*.py' | grep -zv '__init__\.py$' | xargs -0 rm -f
nbdev-export
unchanged . "package and notebooks differ, run nbdev-export"
python tools/readme.py --check || fail "README.md is not up to date"
echo "check: notebooks, package and README agree"
