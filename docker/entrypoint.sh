#!/usr/bin/env bash
# The entry point of every container: checks, before Python starts, what would make a run fail late or record wrong
# facts, and then becomes `tunebook ARGUMENT...` with tini as its parent.
#   entrypoint.sh [COMMAND [ARGUMENT...]]     a command of tunebook; or a program, such as bash, that runs unchecked
# Checks that need Python, such as the GPU against the image's generation, are tunebook's own.
set -euo pipefail

# The kernel delivers to process 1 only signals that it handles, so tini is process 1 and forwards them. A trap of this
# script would not do: bash 5.2 that gets a signal while it reads a $() takes the trap for a part of it, ending with 2, or
# never ends. So there is none on the way of a correct request.
if [ $$ = 1 ] && type -P tini > /dev/null; then exec tini -- "$0" "$@"; fi

here=${BASH_SOURCE[0]%/*}
site_ca=${TUNEBOOK_SITE_CA:-/run/secrets/ca}

refuse() { # refuse LINE...; 2 is the exit code for a wrong request
  printf 'error: %s\n' "$1" >&2
  shift
  if [ $# -gt 0 ]; then printf '%s\n' "$@" >&2; fi
  exit 2
}

me() { printf 'uid %s, gid %s' "$(id -u)" "$(id -g)"; }

owner() { stat -c 'uid %u, gid %g' "$1"; }

asks_for_help() { # such a command writes nothing
  [ $# = 0 ] || [[ " $* " =~ \ (-h|--help|--version)\  ]]
}

check_cache() { # check_cache FOLDER MEANING ADVICE
  if mkdir -p "$1" 2> /dev/null && [ -w "$1" ]; then return; fi
  local whose
  whose=$(owner "$1" 2> /dev/null) || whose="nobody: it does not exist"
  refuse "$2, $1 in the container, is not writable: it belongs to $whose, and this runs as $(me)." "$3"
}

check_caches() {
  local volume="If it is a volume of another user's, name the project after yourself: COMPOSE_PROJECT_NAME=tunebook-me"
  check_cache "$HOME" "The cache folder" "$volume"
  check_cache "${TUNEBOOK_CACHE:-$HOME}" "The folder of prepared data" "$volume"
  # Without downloads, the folder of models may be read-only on purpose.
  case ${HF_HUB_OFFLINE:-} in 1 | on | ON | yes | YES | true | TRUE) return ;; esac
  check_cache "${HF_HOME:-$HOME}" "The folder of models and data sets" \
    "If it is your HF_HOME and everything is there already, type HF_HUB_OFFLINE=1 in front. $volume"
}

check_sources() { # the code is the image's and the recipes are the checkout's: both must be of the same sources
  if [ -z "${TUNEBOOK_CHECKOUT:-}" ]; then return; fi
  if [ "${TUNEBOOK_USE_IMAGE_SOURCES:-}" = 1 ]; then
    unset TUNEBOOK_HOME # so that the recipes are the image's, too
    return
  fi
  if [ ! -f "$TUNEBOOK_CHECKOUT/pyproject.toml" ]; then
    refuse "There is no checkout of Tunebook at $TUNEBOOK_CHECKOUT. It was there when .env was written; type: make env"
  fi
  if "$here/sources_hash.sh" "$TUNEBOOK_CHECKOUT" | cmp -s - "$here/sources.sha256"; then return; fi
  refuse "The image was built from other sources than $TUNEBOOK_CHECKOUT has now. Update it, which takes seconds:" \
    "    make image" \
    "Or run the code and recipes of the image instead of the checkout's: TUNEBOOK_USE_IMAGE_SOURCES=1"
}

writes_outputs() { # writes_outputs COMMAND ARGUMENT...; false if the arguments name another folder, which Python checks
  local word
  case $1 in train | sweep | eval | report | export) ;; *) return 1 ;; esac
  for word in "${@:2}"; do
    case $word in --dry-run | outputs=* | --outputs* | --run-folder* | --to | --to=*) return 1 ;; esac
  done
}

leave_gpus() { # leaves the first TUNEBOOK_GPUS visible, which docker/cdi/compose.yaml passes: CDI gives a container all
  if [[ ${TUNEBOOK_GPUS:-all} =~ ^[1-9][0-9]*$ && -z ${CUDA_VISIBLE_DEVICES+set} ]]; then
    CUDA_VISIBLE_DEVICES=$(seq -s , 0 $((TUNEBOOK_GPUS - 1)))
    export CUDA_VISIBLE_DEVICES
  fi
}

check_outputs() {
  local outputs=${TUNEBOOK_OUTPUTS:-$PWD/outputs}
  # The same device twice: the folder is on the container's own disk.
  if [ ! -d "$outputs" ] || stat -c %d "$outputs" / | uniq -d | grep -q .; then
    refuse "$outputs is no folder of the machine's, so what a run leaves there would vanish with the container." \
      "In a checkout of Tunebook, use make or, after \`make env\`, docker compose; otherwise mount one:" \
      "    docker run -v FOLDER:$outputs ..."
  fi
  if [ -w "$outputs" ]; then return; fi
  refuse "$outputs is not writable: it belongs to $(owner "$outputs"), and this runs as $(me). Make it yours:" \
    "    sudo chown -R $(id -u):$(id -g) $outputs"
}

check_compiled() { # torch silently waits forever for a lock that an interrupted compilation left behind
  local lock
  case $1 in train | sweep) ;; *) return 0 ;; esac
  for lock in "${TORCH_EXTENSIONS_DIR:-/nonexistent}"/*/lock; do
    if [ ! -e "$lock" ]; then continue; fi
    # No compilation takes two hours: DeepSpeed's longest took 17 minutes on a machine with ten other tasks.
    if [ -n "$(find "$lock" -mmin +120)" ] && rm -f "$lock"; then continue; fi
    printf '%s\n' "note: ${lock%/lock} is being compiled by another container, or was when it was interrupted." \
      "If no other is running, this one would wait forever; stop it, and type:" \
      "    docker compose run --rm --entrypoint 'rm -f $lock' train" >&2
  done
}

main() { # main [COMMAND [ARGUMENT...]]
  # Bash that waits for a program continues after a SIGINT which that program did not get.
  trap 'exit 130' INT
  if [ ! -f "$here/image.json" ]; then # without .env compose builds a stage that holds only this script
    refuse "There is no .env yet, so it is not known which image fits this machine. Type this once, then the same again:" \
      "    make env"
  fi
  if [ -s "$site_ca" ]; then # downloads at run time trust what the build trusted
    export SSL_CERT_FILE=$site_ca REQUESTS_CA_BUNDLE=$site_ca CURL_CA_BUNDLE=$site_ca
  fi
  leave_gpus
  if [ -n "${1:-}" ] && type -P -- "$1" > /dev/null; then exec "$@"; fi
  if ! asks_for_help "$@"; then
    check_sources
    check_caches
    if writes_outputs "$@"; then check_outputs; fi
    check_compiled "$@"
  fi
  exec tunebook "$@"
}

main "$@"
