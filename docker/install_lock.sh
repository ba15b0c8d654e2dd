#!/usr/bin/env bash
# Install the lock of one GPU generation into a virtual environment that is there already.
#   install_lock.sh GENERATION VENV     cpu, volta, ampere, hopper or blackwell; VENV has a pip of its own
# The image's build calls this; venv.sh uses the functions. Only packages of the locks next to this script are fetched,
# and every file is checked against its hash. pip's own settings say where it looks and which certificates it trusts:
# PIP_CONFIG_FILE, PIP_CERT, PIP_FIND_LINKS and the rest work as usual. It does not install flash-attn 2, which needs a
# compiler and torch first: the image builds it in a stage of its own (requirements-attention.lock).
set -euo pipefail

locks=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

say() { printf 'tunebook: %s\n' "$*" >&2; }

fail() { # fail PROBLEM [ADVICE...]; each argument is a line
  printf '%s\n' "error: $1" "${@:2}" >&2
  exit 2
}

# Bash ends on Ctrl-C only if the program that it waits for dies of it; pip catches it and ends with 1, like any failure.
# Call this once the script is read: bash 5.2 that gets a signal while it parses a $() takes the trap for a part of it.
end_when_interrupted() { trap 'exit 130' INT; }

pip_install() { # pip_install VENV ARGUMENT...; twice quiet hides warnings about the registry, not errors
  local venv=$1
  shift
  # DeepSpeed comes as sources. Without its operators the wheel is plain Python, built in seconds with neither torch nor
  # CUDA; the few operators a run needs are compiled when they are first used.
  DS_BUILD_OPS=0 "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-input --no-deps \
    --no-build-isolation "$@"
}

install_hashed() { # install_hashed VENV LOCK
  pip_install "$1" --require-hashes -r "$locks/$2"
}

prefer_cpu_torch() { # prefer_cpu_torch VENV
  # With hashes, pip prefers the registry's build to a wheel from a plain folder, so this one is named. It is no error if
  # no registry has it, or if one has another build of it.
  local log=$1/torch-cpu.log code=0
  install_hashed "$1" cpu/requirements-torch-cpu.lock > "$log" 2>&1 || code=$?
  if [ "$code" = 0 ] || grep -q 'No matching distribution' "$log"; then return 0; fi
  cat "$log" >&2
  if grep -q 'Operation cancelled by user' "$log"; then return "$code"; fi
}

torch_is_cuda_build() { # torch_is_cuda_build VENV
  "$1/bin/python" -c 'import importlib.metadata, sys
needed = importlib.metadata.requires("torch") or []
sys.exit(not any(name.startswith(("nvidia-", "cuda-")) for name in needed))'
}

install_generation() { # install_generation GENERATION VENV
  local generation=$1 venv=$2
  # The build tools first: then nothing unpinned is fetched while packages without a wheel are built.
  install_hashed "$venv" requirements-build.lock
  if [ "$generation" = cpu ]; then prefer_cpu_torch "$venv"; fi
  install_hashed "$venv" "$generation/requirements.lock"
  if [ "$generation" = cpu ] && torch_is_cuda_build "$venv"; then
    say "torch here is the CUDA build: installing its libraries too, several GB"
    install_hashed "$venv" cpu/requirements-cuda.lock
  fi
}

check_packages() { # check_packages VENV
  local found
  found=$("$1/bin/python" -m pip check --disable-pip-version-check) || fail "the packages in $1 do not fit together:" \
    "$found" "A lock does not match its .in file (make lock), or .venv has others, too (make clean-venv)."
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  end_when_interrupted
  install_generation "$1" "$2"
  check_packages "$2"
fi
