#!/usr/bin/env bash
# Tries the CUDA pool on a real GPU, in under five minutes: two processes, one owns tensors, the other maps them by IPC.
#
# Exit codes: 0 every byte right; 1 a check failed; 2 something is missing that the message names; 77 no GPU here.
# KVPOOL_GPU_PYTHON names another interpreter (any with torch, cuda-bindings, numpy and protobuf; torch may be a CPU
# build, the owner then allocates by the driver).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

if ! command -v nvidia-smi >/dev/null || ! gpus=$(nvidia-smi -L 2>/dev/null) || [[ -z $gpus ]]; then
  echo "test-gpu: no NVIDIA GPU here (nvidia-smi -L lists none); nothing was tried. Run this on a machine with a GPU." >&2
  exit 77
fi
echo "test-gpu: $gpus"

python=${KVPOOL_GPU_PYTHON:-}
if [[ -z $python ]]; then
  python=python3
  [[ -x .venv/bin/python ]] && python=.venv/bin/python
fi

cuda=$(nvidia-smi | sed -n 's/.*CUDA [A-Za-z ]*Version: *\([0-9]*\).*/\1/p' | head -n 1)
added=.cache/gpu-packages-${cuda:-any}
export PYTHONPATH="agent:tests${PYTHONPATH:+:$PYTHONPATH}"
if ! "$python" -c 'import cuda.bindings.driver' 2>/dev/null; then
  # Not among what `make setup` installs, since few machines can use it; kept out of the virtual environment.
  if [[ ! -d $added ]]; then
    echo "test-gpu: fetching cuda-bindings for CUDA ${cuda:-of any version} into $added"
    "$python" -m pip install --quiet --target "$added" "cuda-bindings${cuda:+==$cuda.*}" || {
      rm -rf "$added"
      echo "test-gpu: $python has no cuda-bindings and it could not be fetched; install it, or set KVPOOL_GPU_PYTHON" >&2
      exit 2
    }
  fi
  export PYTHONPATH="$PYTHONPATH:$added"
fi
for package in numpy google.protobuf; do
  if ! "$python" -c "import $package" 2>/dev/null; then
    echo "test-gpu: $python lacks $package; run make setup, or: $python -m pip install numpy protobuf" >&2
    exit 2
  fi
done

exec timeout --signal=TERM --kill-after=10 280 "$python" tests/gpu/try_pool.py
