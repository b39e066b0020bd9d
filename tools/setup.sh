#!/usr/bin/env bash
# Makes .venv in this checkout ready for `make demo` and `make test`; doing it again is harmless.
#
# Promises: a Python of 3.11 or newer with venv, the shared libraries that Mooncake links, the pinned packages, and
# kvpool itself in editable form. What needs root is installed when the user is root and named otherwise.
# Refuses: to touch a Python outside .venv, and to guess at systems without apt.
#
#   tools/setup.sh            everything
#   tools/setup.sh libraries  only look for what has to come from the system
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=.venv
STAMP=$VENV/.kvpool-stamp
EXTRAS=agent-cpu,engine,operator,dev
# What is given to pip as torch: a requirement, or the path of a wheel.
TORCH=${KVPOOL_TORCH:-torch==2.13.0}

# What mooncake's extension modules and mooncake_master link, by soname, with Debian's package for each.
LIBRARIES=(
  "libibverbs.so.1 libibverbs1"
  "libnuma.so.1 libnuma1"
  "libcurl.so.4 libcurl4"
  "libstdc++.so.6 libstdc++6"
)

say() { printf 'setup: %s\n' "$*"; }
die() {
  printf 'setup: %s\n' "$@" >&2
  exit 1
}

# The first Python that is new enough; prints its path.
find_python() {
  local name path
  for name in ${KVPOOL_PYTHON:+"$KVPOOL_PYTHON"} python3.11 /usr/bin/python3.11 python3 /usr/bin/python3 \
    python3.12 python3.13; do
    path=$(command -v "$name" 2>/dev/null) || continue
    if "$path" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      printf '%s\n' "$path"
      return 0
    fi
  done
  return 1
}

# Every Debian package that this machine lacks, one a line.
missing_packages() {
  local known entry python
  # A system without ldconfig in PATH (Debian keeps it in /sbin) still has it.
  known=$(PATH="$PATH:/sbin:/usr/sbin" ldconfig -p)
  for entry in "${LIBRARIES[@]}"; do
    [[ $known == *"${entry% *} "* ]] || printf '%s\n' "${entry#* }"
  done
  if ! python=$(find_python); then
    printf '%s\n' python3 python3-venv
  elif ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    # Debian splits venv off; the package bears the interpreter's own version.
    printf 'python%s-venv\n' "$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
  fi
}

ensure_packages() {
  local missing
  mapfile -t missing < <(missing_packages)
  ((${#missing[@]})) || return 0
  if (($(id -u) != 0)) || ! command -v apt-get >/dev/null; then
    die "this machine lacks: ${missing[*]}" \
      "on Debian or Ubuntu, as root: apt-get update && apt-get install ${missing[*]}" \
      "elsewhere: the packages that provide ${LIBRARIES[*]/% */}, and Python 3.11 or newer with venv"
  fi
  say "installing ${missing[*]}"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

make_venv() {
  local python
  # The stamp names the folder that .venv was made in; one that was copied from elsewhere points back at it.
  if [[ -x $VENV/bin/python ]] && "$VENV/bin/python" -c '' && [[ ! -s $STAMP || $(<"$STAMP") == "$PWD" ]]; then
    return 0
  fi
  python=$(find_python) || die "no Python of 3.11 or newer; install one or name it: KVPOOL_PYTHON=/path make setup"
  say "making $VENV with $("$python" --version)"
  "$python" -m venv --clear "$VENV"
}

# Any build of torch serves, and nothing here uses a GPU. Which one pip would take is for its own settings to say; the
# large one is announced before it is fetched, and fetched all the same: a set-up that works beats a small one.
look_at_torch() {
  local plan
  plan=$("$VENV/bin/python" -m pip --disable-pip-version-check install --dry-run -c constraints.txt "$TORCH") ||
    die "pip finds no $TORCH (its own words are above); name another build: KVPOOL_TORCH=requirement or wheel"
  [[ $plan == *"Would install"*nvidia-* ]] || return 0
  printf 'setup: %s\n' >&2 \
    "pip is about to take torch's CUDA build: some 3 GB to fetch, 7 GB on disk. It works as well." \
    "For the CPU build (0.2 GB), stop this with Ctrl-C and tell pip where one is, by one of" \
    "  PIP_INDEX_URL=...      an index that holds CPU builds, and all other packages" \
    "  PIP_FIND_LINKS=...     a folder or page with a CPU wheel beside the index that you have" \
    "  KVPOOL_TORCH=...       the wheel itself, a path or an address" \
    "and run make setup again; docs/how-to/install.md says more."
}

install_packages() {
  local pip=("$VENV/bin/python" -m pip --disable-pip-version-check install --quiet)
  # pip keeps its cache under HOME; an account whose HOME cannot be written keeps it here.
  if [[ -z ${PIP_CACHE_DIR:-} && ! -w ${HOME:-/nonexistent} ]]; then
    export PIP_CACHE_DIR="$PWD/.cache/pip"
  fi
  # torch first and by itself: it is by far the largest.
  say "installing packages (torch is the largest; the first time takes some minutes)"
  look_at_torch
  "${pip[@]}" -c constraints.txt "$TORCH"
  "${pip[@]}" -c constraints.txt -e ".[$EXTRAS]"
}

main() {
  case ${1:-everything} in
    everything) ;;
    libraries)
      ensure_packages
      return
      ;;
    *) die "unknown argument '$1'; see the head of tools/setup.sh" ;;
  esac
  ensure_packages
  make_venv
  install_packages
  printf '%s\n' "$PWD" >"$STAMP"
  say "done"
}

main "$@"
