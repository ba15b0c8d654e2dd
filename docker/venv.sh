#!/usr/bin/env bash
# .venv, for machines without Docker: sets it up from the locks, runs commands of tunebook from it, removes it. The
# image installs the same locks by the same functions (install_lock.sh).
#   venv.sh run GENERATION WHY COMMAND [ARGUMENT...]   run `tunebook COMMAND`, after a set-up for GENERATION if needed;
#                                                      `any` takes the packages that are there
#   venv.sh setup run|dev [GENERATION]                 install what a run needs; dev: and what `make check` needs
#   venv.sh remove
# PYTHON names the Python to use (python3). A set-up may be interrupted and started again at any time: a partly made
# .venv is made again, because pip takes a partly copied package for an installed one; pip's cache keeps the downloads.
# Exit codes: 2 the request cannot be served, else that of the command, unchanged.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# shellcheck source=docker/install_lock.sh
. docker/install_lock.sh

python=${PYTHON:-python3}
ready=.venv/.ready- # with a purpose, run or dev, behind it: made once .venv is set up for that
unfinished=.venv/.unfinished

packages_there() { cat .venv/.generation 2> /dev/null || echo cpu; } # the generation whose packages are in .venv

# Nothing is changed under a command that runs from .venv: a command holds .venv.lock together with others, a set-up or
# removal holds it alone. The open file is the lock, so whatever inherits it keeps it, and a crash leaves none behind.
hold_venv() { # hold_venv -s|-x; shared or alone, until this process and those that inherit it end; fails if it is taken
  local code=0
  exec 9>> .venv.lock
  flock "$1" -n 9 || code=$?
  [ "$code" != 1 ] # any other: a disk without locks
}

is_up_to_date() { # is_up_to_date PURPOSE GENERATION
  local sources=(pyproject.toml docker/venv.sh docker/install_lock.sh docker/requirements-build.lock)
  sources+=("docker/$2"/requirements*.lock)
  if [ "$1" = dev ]; then sources+=(docker/requirements-dev.lock); fi
  [ -e "$ready$1" ] && [ ! -e "$unfinished" ] && [ "$(packages_there)" = "$2" ] \
    && [ -z "$(find "${sources[@]}" -newer "$ready$1" 2> /dev/null)" ]
}

run() { # run GENERATION WHY COMMAND [ARGUMENT...]
  local generation=$1 why=$2 there
  shift 2
  there=$(packages_there)
  if [ -e "${ready}run" ] && [ "$there" != "$generation" ]; then
    # Without a GPU here, as on the node that submits jobs, a GPU's packages do as well.
    if [ "$generation" != any ] && { [ "$generation" != cpu ] || [ "${GPU:-auto}" != auto ]; }; then
      fail ".venv has the packages of docker/$there, and docker/$generation is asked for: $why." \
        "To take it as it is: WHERE=local GPU=$there. To make it again: make clean-venv, then the same command"
    fi
    generation=$there
  fi
  say "in .venv with the packages of docker/$generation: $why"
  if ! is_up_to_date run "$generation"; then docker/venv.sh setup run "$generation" >&2; fi
  hold_venv -s || fail "another command is setting up .venv: wait until it is done, then type the same again."
  exec .venv/bin/tunebook "$@"
}

set_up() { # set_up run|dev GENERATION
  local purpose=$1 generation=$2
  if is_up_to_date "$purpose" "$generation"; then return; fi
  hold_venv -x || fail "a command runs from .venv, and its packages would be changed to those of the locks." \
    "Wait for it. To use them as they are: .venv/bin/tunebook. For other work: git worktree add FOLDER"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "Tunebook needs Python 3.11 or newer." \
    "On Debian or Ubuntu: apt install python3 python3-venv. Another one: make train PYTHON=/path/to/python3.12"
  make_venv "$generation"
  touch "$unfinished"
  printf '%s\n' "$generation" > .venv/.generation
  say "installing the lock of docker/$generation into .venv; the first time takes minutes and may be interrupted"
  install_generation "$generation" .venv
  if [ "$purpose" = dev ]; then install_hashed .venv requirements-dev.lock; fi
  pip_install .venv --editable .
  check_packages .venv
  rm "$unfinished"
  touch "${ready}run" "$ready$purpose"
  say "ready"
}

make_venv() { # make_venv GENERATION; unless there is a finished one for it with a pip, which a failed set-up lacks
  if [ "$(packages_there)" = "$1" ] && [ ! -e "$unfinished" ] && .venv/bin/python -m pip --version > /dev/null 2>&1; then
    return # another generation's is of no use, since pip takes torch's CPU build for the CUDA build
  fi
  say "making .venv with $("$python" --version)"
  "$python" -m venv --clear .venv
}

end_when_interrupted
case ${1:-} in
  run) run "${@:2}" ;;
  setup) set_up "$2" "${3:-$(packages_there)}" ;;
  remove)
    hold_venv -x || fail "a command runs from .venv: wait for it."
    rm -rf .venv ;;
  *) fail "usage: venv.sh run GENERATION WHY COMMAND [ARGUMENT...] | setup run|dev [GENERATION] | remove" ;;
esac
