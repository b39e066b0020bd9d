#!/usr/bin/env bash
# Writes constraints.txt anew: the newest releases that pyproject.toml allows, as one clean environment resolves them.
# Refuses to keep a local suffix or a path: another machine has neither.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
python=$work/venv/bin/python
pip=("$python" -m pip --disable-pip-version-check)
"${pip[@]}" install --quiet torch==2.13.0
"${pip[@]}" install --quiet -e '.[agent-cpu,engine,operator,dev]'
"${pip[@]}" check
{
  sed -n '/^#/p' constraints.txt
  "${pip[@]}" freeze --exclude-editable | sed -E '/ @ /d; s/^([^+]*)\+.*/\1/'
} >"$work/constraints.txt"
mv "$work/constraints.txt" constraints.txt
