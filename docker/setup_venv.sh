#!/usr/bin/env bash
# Set up .venv from the locks and put Tunebook into it; make calls this, from the top of the checkout. It is for
# machines without Docker: the image installs the same locks by the same functions.
#   setup_venv.sh run [GENERATION]     what a run needs, on a CPU or on the named GPU generation
#   setup_venv.sh dev [GENERATION]     that and what `make check` needs
#   setup_venv.sh remove               no .venv
# PYTHON names the Python to use (python3). It may be interrupted and started again at any time: a half-made .venv is
# made anew, because pip takes a half-copied package for an installed one; what was downloaded comes from pip's cache.
# Nothing is changed under a command that runs from .venv: that ends with 2, the exit code for a request that is wrong.
set -euo pipefail

# shellcheck source=docker/install_lock.sh
. "$(dirname "${BASH_SOURCE[0]}")/install_lock.sh"
# shellcheck source=docker/front/venv_lock.sh
. "$(dirname "${BASH_SOURCE[0]}")/front/venv_lock.sh"

purpose=${1:-}
generation=${2:-cpu}
python=${PYTHON:-python3}
unfinished=.venv/.unfinished
made_for=.venv/.generation

require_python() {
  command -v "$python" > /dev/null || fail "No '$python' here: Tunebook needs Python 3.11 or newer." \
    "On Debian or Ubuntu: apt install python3 python3-venv. Another one: make train PYTHON=/path/to/python3.12"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail \
    "$python is $("$python" --version 2>&1): Tunebook needs Python 3.11 or newer." \
    "Name a newer one: make train PYTHON=/path/to/python3.12"
}

is_usable() { # finished, with a pip, and for this generation, since pip takes torch's CPU build for the CUDA build
  [ ! -e "$unfinished" ] && .venv/bin/python -m pip --version > /dev/null 2>&1 || return
  [ "$(packages_there)" = "$generation" ]
}

hold_venv_alone() {
  if lock_venv -x; then return; fi
  if ! (lock_venv -s); then
    refuse "another command is setting up .venv." "Wait until it is done, then type the same again."
  fi
  local there what processes advice="Wait for it"
  there=$(packages_there)
  processes=$(processes_in_venv)
  if [ "$purpose" = remove ]; then
    what="it would be removed"
  elif [ "$there" != "$generation" ]; then
    what="it would be made anew for $generation"
    advice+=", or use it as it is: WHERE=local GPU=$there make ..."
  else
    what="what it holds would be brought up to date with the locks"
    advice+=", or work in a checkout of its own: git worktree add FOLDER"
  fi
  refuse "a command of tunebook is running from .venv (packages of docker/$there), and $what." "$advice" \
    "Its processes on this machine: ${processes:-none that can be seen}"
}

refuse() { # refuse WHAT_IS_WRONG WHAT_TO_TYPE_NEXT...
  printf 'error: %s\n' "$1" >&2
  printf '%s\n' "${@:2}" >&2
  exit 2
}

make_venv() {
  # A folder with Python but without a working pip is what a failed or interrupted `python3 -m venv` leaves behind.
  if is_usable; then return; fi
  say "making .venv with $("$python" --version)"
  if ! "$python" -m venv --clear .venv > .venv.log 2>&1; then
    cat .venv.log >&2
    rm -rf .venv .venv.log
    fail "" "'$python -m venv' failed, so there is no .venv. Where it says that ensurepip is not available:" \
      "    apt install python3-venv"
  fi
  rm -f .venv.log
}

say_what_is_left_out() {
  [ -f "$locks/$generation/requirements-attention.lock" ] || return 0
  say "flash-attn 2 is not in .venv: it is compiled in the image (make image GPU=$generation)."
  say "here, attention=auto takes torch's own kernel for packed rows where the model is known to work with it, else sdpa"
  if grep -q '^flash-attn-4==' "$locks/$generation/requirements.lock"; then
    say "flash-attn 4 is here, a beta: attention=varlen_attention_4"
  fi
}

end_when_interrupted
case $purpose in
  run | dev) require_generation "$generation" ;;
  remove) ;;
  *) fail "usage: setup_venv.sh run|dev [GENERATION], or: setup_venv.sh remove" ;;
esac
hold_venv_alone
if [ "$purpose" = remove ]; then
  rm -rf .venv
  exit
fi
require_python
make_venv
touch "$unfinished"
printf '%s\n' "$generation" > "$made_for"
say "installing the lock of docker/$generation into .venv; the first time takes minutes and may be interrupted"
install_generation "$generation" .venv
if [ "$purpose" = dev ]; then install_hashed .venv requirements-dev.lock; fi
pip_install .venv --editable .
check_packages .venv "Something outside the locks was installed there, or a lock is out of step with its .in file. \
Start afresh: make clean-venv, then the same command again."
rm "$unfinished"
say_what_is_left_out
say "ready"
