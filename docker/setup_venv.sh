#!/usr/bin/env bash
# Set up .venv from the locks and put Tunebook into it; make calls this, from the top of the checkout. It is for
# machines without Docker: the image installs the same locks by the same functions.
#   setup_venv.sh run [GENERATION]     what a run needs, on a CPU or on the named GPU generation
#   setup_venv.sh dev [GENERATION]     that and what `make check` needs
# PYTHON names the Python to use (python3). It may be interrupted and started again at any time: a half-made .venv is
# made anew, because pip takes a half-copied package for an installed one; what was downloaded comes from pip's cache.
set -euo pipefail

# shellcheck source=docker/install_lock.sh
. "$(dirname "${BASH_SOURCE[0]}")/install_lock.sh"

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
  [ "$(cat "$made_for" 2> /dev/null || echo cpu)" = "$generation" ]
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
[ "$purpose" = run ] || [ "$purpose" = dev ] || fail "usage: setup_venv.sh run|dev [GENERATION]"
require_generation "$generation"
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
