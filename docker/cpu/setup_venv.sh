#!/usr/bin/env bash
# Set up .venv from the locks of this folder and put Tunebook into it; make calls this, from the top of the checkout.
#   setup_venv.sh run     what a run needs
#   setup_venv.sh dev     that and what `make check` needs
# PYTHON names the Python to use (python3). It may be interrupted and started again at any time: a half-made .venv is
# made anew, because pip takes a half-copied package for an installed one; what was downloaded comes from pip's cache.
set -euo pipefail

purpose=${1:?usage: setup_venv.sh run|dev}
python=${PYTHON:-python3}
locks=docker/cpu
unfinished=.venv/.unfinished

fail() {
  printf '%s\n' "$@" >&2
  exit 1
}

say() { printf 'tunebook set-up: %s\n' "$*"; }

require_python() {
  command -v "$python" > /dev/null || fail "No '$python' here: Tunebook needs Python 3.11 or newer." \
    "On Debian or Ubuntu: apt install python3 python3-venv. Another one: make train PYTHON=/path/to/python3.12"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail \
    "$python is $("$python" --version 2>&1): Tunebook needs Python 3.11 or newer." \
    "Name a newer one: make train PYTHON=/path/to/python3.12"
}

make_venv() {
  # A folder with Python but without a working pip is what a failed or interrupted `python3 -m venv` leaves behind.
  if [ ! -e "$unfinished" ] && .venv/bin/python -m pip --version > /dev/null 2>&1; then return; fi
  say "making .venv with $("$python" --version)"
  if ! "$python" -m venv --clear .venv > .venv.log 2>&1; then
    cat .venv.log >&2
    rm -rf .venv .venv.log
    fail "" "'$python -m venv' failed, so there is no .venv. Where it says that ensurepip is not available:" \
      "    apt install python3-venv"
  fi
  rm -f .venv.log
}

pip_install() { # nothing is fetched that is not named; twice quiet hides warnings about the registry, not errors
  .venv/bin/python -m pip install -qq --disable-pip-version-check --no-input --no-deps --no-build-isolation "$@"
}

install_lock() { # every file is checked against its hash
  pip_install --require-hashes -r "$locks/$1"
}

prefer_cpu_torch() {
  # With hashes, pip would rather take the registry's build than a wheel from a plain folder; so this one is asked for
  # by name, and that it is not on offer is no error.
  install_lock requirements-torch-cpu.lock > .venv/torch-cpu.log 2>&1 && return
  grep -q 'No matching distribution' .venv/torch-cpu.log || cat .venv/torch-cpu.log >&2
}

torch_is_cuda_build() {
  .venv/bin/python -c 'import importlib.metadata, sys
needed = importlib.metadata.requires("torch") or []
sys.exit(not any(name.startswith(("nvidia-", "cuda-")) for name in needed))'
}

check() {
  .venv/bin/python -m pip check --disable-pip-version-check > .venv/pip-check.log || {
    cat .venv/pip-check.log >&2
    fail "The packages in .venv do not fit together (above). Something outside the locks was installed there," \
      "or a lock is out of step with its .in file. Start afresh: make clean-venv, then the same command again."
  }
}

require_python
make_venv
touch "$unfinished"
say "installing $locks/requirements.lock into .venv; the first time takes a few minutes and may be interrupted"
install_lock requirements-build.lock
prefer_cpu_torch
install_lock requirements.lock
if torch_is_cuda_build; then
  say "torch here is the CUDA build: installing its libraries too, several GB"
  install_lock requirements-cuda.lock
fi
if [ "$purpose" = dev ]; then
  install_lock requirements-dev.lock
fi
pip_install --editable .
check
rm "$unfinished"
say "ready"
