#!/usr/bin/env bash
# .venv, for machines without Docker: sets it up from the locks, runs commands of tunebook from it, removes it. The
# image installs the same locks by the same functions (install_lock.sh).
#   venv.sh run GENERATION WHY COMMAND [ARGUMENT...]   run `tunebook COMMAND`, after a set-up for GENERATION if needed
#   venv.sh setup run|dev [GENERATION]                 install what a run needs; dev: and what `make check` needs
#   venv.sh remove
# PYTHON names the Python to use (python3). A set-up may be interrupted and started again at any time: a partly made
# .venv is made again, because pip takes a partly copied package for an installed one; pip's cache keeps the downloads.
#
# Nothing is changed under a command that runs from .venv. A command holds .venv.lock together with other commands; a
# set-up or removal holds it alone. A process holds it by having it open, and so do the processes that inherit that:
# nothing stays locked after a crash, and a training keeps it if the script that started it is killed. The lock file
# lies next to .venv, which may be emptied.
# Exit codes: 2 the request cannot be served, else that of the command, unchanged.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# shellcheck source=docker/install_lock.sh
. docker/install_lock.sh
# shellcheck source=docker/front/messages.sh
. docker/front/messages.sh

python=${PYTHON:-python3}
ready=.venv/.ready- # with a purpose, run or dev, behind it: made once .venv is set up for that
unfinished=.venv/.unfinished

packages_there() { cat .venv/.generation 2> /dev/null || echo cpu; } # the generation whose packages are in .venv

lock_venv() { # lock_venv -s|-x; shared or alone, until this process and those that inherit it end; fails if it is taken
  # Without flock, or on a disk without locks, nobody can be asked: then it counts as free.
  command -v flock > /dev/null && { : >> .venv.lock; } 2> /dev/null || return 0
  local file code=0
  exec {file}>> .venv.lock
  flock "$1" -n "$file" 2> /dev/null || code=$?
  if [ "$code" = 1 ]; then
    exec {file}>&-
    return 1
  fi
}

in_use() { ! (lock_venv -x); }

is_up_to_date() { # is_up_to_date PURPOSE GENERATION
  local sources=(pyproject.toml docker/venv.sh docker/install_lock.sh docker/requirements-build.lock)
  sources+=("docker/$2"/requirements*.lock)
  if [ "$1" = dev ]; then sources+=(docker/requirements-dev.lock); fi
  [ -e "$ready$1" ] && [ ! -e "$unfinished" ] && [ "$(packages_there)" = "$2" ] \
    && [ -z "$(find "${sources[@]}" -newer "$ready$1" 2> /dev/null)" ]
}

# --- run

run() { # run GENERATION WHY COMMAND [ARGUMENT...]
  local generation=$1 why=$2 there
  shift 2
  there=$(packages_there)
  if [ -e "${ready}run" ] && [ "$there" != "$generation" ]; then choose_packages "$@"; fi
  say "in .venv with the packages of docker/$generation: $why"
  if ! is_up_to_date run "$generation"; then
    if [ -e "${ready}run" ] && [ "$there" = "$generation" ] && takes_any_packages "$@" && in_use; then
      say "the packages are older than the locks; they stay as they are while a command is running from .venv"
    else
      docker/venv.sh setup run "$generation" 1>&2 || exit 2
    fi
  fi
  # Twice: another command that looks whether .venv is in use takes a moment.
  if ! lock_venv -s && sleep 0.5 && ! lock_venv -s; then
    refuse "another command is setting up .venv." "Wait until it is done, then type the same again."
  fi
  # Another command may have come between the set-up and the lock.
  if [ ! -e "${ready}run" ] || [ -e "$unfinished" ] || [ "$(packages_there)" != "$generation" ]; then
    refuse "another command has just changed .venv, or removed it." "Type the same again."
  fi
  exec .venv/bin/tunebook "$@"
}

needs_no_gpu() { # needs_no_gpu COMMAND; works with what exists, whatever the GPUs are
  case $1 in list | explain | report | verify | diff | export | data) ;; *) return 1 ;; esac
}

takes_any_packages() { # takes_any_packages COMMAND [ARGUMENT...]; so that no .venv is made again for it
  needs_no_gpu "$1" || [[ $1 == plan || $1 == fetch || $1 == doctor || " $* " == *" --dry-run "* ]]
}

choose_packages() { # choose_packages COMMAND [ARGUMENT...]; sets run's generation and why if what is there is to stay
  if takes_any_packages "$@"; then
    # A plan for the GPUs here needs their packages, by which a training makes its choices; but not under a command.
    if [ "$generation" = cpu ] || needs_no_gpu "$1"; then
      why="that is set up already" generation=$there
    elif in_use; then
      why="a command is running from it, so it is not made again for $generation" generation=$there
    fi
  elif [ "$generation" = cpu ] && [ "${GPU:-auto}" = auto ]; then
    # On a disk that machines share, the lock of another machine may not be seen here.
    refuse ".venv has the packages of docker/$there, for GPUs, and here: ${why#WHERE=* and }. It is not made again" \
      "for cpu automatically, because a command on another machine may be running from it." \
      "To make it again for a CPU: WHERE=local GPU=cpu make $1 ..." \
      "To use it as it is, for example to submit a job: .venv/bin/tunebook$(printf ' %q' "$@")"
  fi
}

# --- setup and remove

require_unused() { # require_unused WHAT_WOULD_HAPPEN ADVICE; holds the lock alone from here on
  if lock_venv -x; then return; fi
  if ! (lock_venv -s); then
    refuse "another command is setting up .venv." "Wait until it is done, then type the same again."
  fi
  local processes
  processes=$(find /proc/[0-9]*/fd -lname "$(realpath .venv.lock)" 2> /dev/null \
    | cut -d / -f 3 | sort -un | paste -sd ' ') || true
  refuse "a command of tunebook is running from .venv (packages of docker/$(packages_there)), and $1." "$2" \
    "Its processes on this machine: ${processes:-none that can be seen}"
}

set_up() { # set_up run|dev GENERATION
  local purpose=$1 generation=$2 there
  if is_up_to_date "$purpose" "$generation"; then return; fi
  require_generation "$generation"
  there=$(packages_there)
  if [ "$there" != "$generation" ]; then
    require_unused "it would be made again for $generation" \
      "Wait for it, or use it as it is: WHERE=local GPU=$there make ..."
  else
    require_unused "its packages would be updated to the locks" \
      "Wait for it, or work in a checkout of its own: git worktree add FOLDER"
  fi
  require_python
  make_venv "$generation"
  touch "$unfinished"
  printf '%s\n' "$generation" > .venv/.generation
  setup_says "installing the lock of docker/$generation into .venv; the first time takes minutes and may be interrupted"
  install_generation "$generation" .venv
  if [ "$purpose" = dev ]; then install_hashed .venv requirements-dev.lock; fi
  pip_install .venv --editable .
  check_packages .venv "Something outside the locks was installed there, or a lock does not match its .in file. \
Start afresh: make clean-venv, then the same command again."
  rm "$unfinished"
  touch "${ready}run" "$ready$purpose"
  report_attention "$generation"
  setup_says "ready"
}

require_python() {
  command -v "$python" > /dev/null || fail "No '$python' here: Tunebook needs Python 3.11 or newer." \
    "On Debian or Ubuntu: apt install python3 python3-venv. Another one: make train PYTHON=/path/to/python3.12"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail \
    "$python is $("$python" --version 2>&1): Tunebook needs Python 3.11 or newer." \
    "Name a newer one: make train PYTHON=/path/to/python3.12"
}

make_venv() { # make_venv GENERATION; unless there is a finished one for it with a pip, which a failed set-up lacks
  if [ "$(packages_there)" = "$1" ] && [ ! -e "$unfinished" ] && .venv/bin/python -m pip --version > /dev/null 2>&1; then
    return # another generation's is of no use, since pip takes torch's CPU build for the CUDA build
  fi
  setup_says "making .venv with $("$python" --version)"
  if ! "$python" -m venv --clear .venv > .venv.log 2>&1; then
    cat .venv.log >&2
    rm -rf .venv .venv.log
    fail "" "'$python -m venv' failed, so there is no .venv. Where it says that ensurepip is not available:" \
      "    apt install python3-venv"
  fi
  rm -f .venv.log
}

report_attention() { # report_attention GENERATION; the packages that .venv lacks, compared with the image
  if [ ! -f "docker/$1/requirements-attention.lock" ]; then return; fi
  setup_says "flash-attn 2 is not in .venv: it is compiled in the image (make image GPU=$1)."
  setup_says "here attention=auto takes torch's kernel for packed rows if the model is known to work with it, else sdpa"
  if grep -q '^flash-attn-4==' "docker/$1/requirements.lock"; then
    setup_says "flash-attn 4 is here, a beta: attention=varlen_attention_4"
  fi
}

end_when_interrupted
case ${1:-} in
  run) run "${@:2}" ;;
  setup)
    case ${2:-} in run | dev) ;; *) fail "usage: venv.sh setup run|dev [GENERATION]" ;; esac
    set_up "$2" "${3:-$(packages_there)}" ;;
  remove)
    require_unused "it would be removed" "Wait for it"
    rm -rf .venv ;;
  *) fail "usage: venv.sh run GENERATION WHY COMMAND [ARGUMENT...] | setup run|dev [GENERATION] | remove" ;;
esac
