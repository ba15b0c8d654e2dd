#!/usr/bin/env bash
# What every container of Tunebook starts with: looks, before Python does, for what would make a run fail late or lie
# about itself, and then becomes `tunebook ARGUMENT...` with tini as its parent.
#   entrypoint.sh [COMMAND [ARGUMENT...]]     a command of tunebook; or a program, such as bash, that is run as it is
# What needs Python, such as the GPU against the image's generation, is checked by tunebook itself.
set -euo pipefail

# To process 1 the kernel hands no signal that it has not asked for, so tini is that and hands them on. A trap of this
# script would not do: bash 5.2 that gets a signal while it reads a $() mistakes the trap for a part of it, ending with 2,
# or never ends. So there is none on the way of a request that is in order.
if [ $$ = 1 ] && type -P tini > /dev/null; then exec tini -- "$0" "$@"; fi

here=${BASH_SOURCE[0]%/*}
if [ "$here" = "${BASH_SOURCE[0]}" ]; then here=.; fi
site_ca=${TUNEBOOK_SITE_CA:-/run/secrets/ca}

refuse() { # refuse LINE...; 2 is the exit code for a request that is wrong
  printf 'error: %s\n' "$1" >&2
  shift
  if [ $# -gt 0 ]; then printf '%s\n' "$@" >&2; fi
  exit 2
}

me() { printf 'uid %s, gid %s' "$(id -u)" "$(id -g)"; }

owner() { stat -c 'uid %u, gid %g' "$1"; }

require_env_file() { # without one compose builds a stage that holds nothing but this script
  if [ -f "$here/image.json" ]; then return; fi
  refuse "There is no .env yet, so it is not known which image fits this machine. Type this once, then the same again:" \
    "    make env"
}

trust_site_ca() { # what downloads at run time trusts what the build trusted
  if [ ! -s "$site_ca" ]; then return; fi
  export SSL_CERT_FILE=$site_ca REQUESTS_CA_BUNDLE=$site_ca CURL_CA_BUNDLE=$site_ca
}

asks_for_help() { # nothing is written by these, wherever they are typed
  local word
  if [ $# -eq 0 ]; then return 0; fi
  for word in "$@"; do
    case $word in -h | --help | --version) return 0 ;; esac
  done
  return 1
}

check_cache() { # check_cache FOLDER MEANING ADVICE
  if mkdir -p "$1" 2> /dev/null && [ -w "$1" ]; then return; fi
  refuse "$2, $1 in the container, cannot be written to: it belongs to $(owner "$1" 2> /dev/null || echo 'nobody: it is not there')," \
    "and this runs as $(me). $3"
}

check_caches() {
  local volume="Where it is a volume of another user's, name the project after yourself: COMPOSE_PROJECT_NAME=tunebook-me"
  check_cache "$HOME" "The cache folder" "$volume"
  check_cache "${TUNEBOOK_CACHE:-$HOME}" "The folder of prepared data" "$volume"
  # A folder of models that is read-only on purpose is fine for who fetches nothing.
  case ${HF_HUB_OFFLINE:-} in 1 | on | ON | yes | YES | true | TRUE) return ;; esac
  check_cache "${HF_HOME:-$HOME}" "The folder of models and data sets" \
    "If it is your HF_HOME and everything is there already, type HF_HUB_OFFLINE=1 in front. $volume"
}

check_sources() { # the code is the image's, the recipes are the checkout's: they must be of one piece
  if [ -z "${TUNEBOOK_CHECKOUT:-}" ]; then return; fi
  if [ "${TUNEBOOK_USE_IMAGE_SOURCES:-}" = 1 ]; then
    unset TUNEBOOK_HOME # so the recipes are the image's, too
    return
  fi
  if [ ! -f "$TUNEBOOK_CHECKOUT/pyproject.toml" ]; then
    refuse "There is no checkout of Tunebook at $TUNEBOOK_CHECKOUT. It was there when .env was written; type: make env"
  fi
  if "$here/sources_hash.sh" "$TUNEBOOK_CHECKOUT" | cmp -s - "$here/sources.sha256"; then return; fi
  refuse "The image was built from other sources than $TUNEBOOK_CHECKOUT has now. Bring it up to date, which takes seconds:" \
    "    make image" \
    "Or run what the image holds, code and recipes, instead of the checkout's: TUNEBOOK_USE_IMAGE_SOURCES=1"
}

is_mounted() { ! stat -c %d "$1" / | uniq -d | grep -q .; } # the same device twice is the container's own disk

writes_outputs() { # writes_outputs COMMAND ARGUMENT...; false where they are elsewhere: Python looks at these folders
  local word
  case $1 in train | sweep | eval | report | export) ;; *) return 1 ;; esac
  for word in "${@:2}"; do
    case $word in --dry-run | outputs=* | --outputs* | --run-folder* | --to | --to=*) return 1 ;; esac
  done
}

check_outputs() {
  local outputs=${TUNEBOOK_OUTPUTS:-$PWD/outputs}
  if [ ! -d "$outputs" ] || ! is_mounted "$outputs"; then
    refuse "$outputs is no folder of the machine's, so what a run leaves there would vanish with the container." \
      "In a checkout of Tunebook, use make or, after \`make env\`, docker compose; otherwise mount one:" \
      "    docker run -v FOLDER:$outputs ..."
  fi
  if [ -w "$outputs" ]; then return; fi
  refuse "$outputs cannot be written to: it belongs to $(owner "$outputs"), and this runs as $(me). Make it yours:" \
    "    sudo chown -R $(id -u):$(id -g) $outputs"
}

check_compiled() { # torch waits, without a word and for ever, for a lock that an interrupted compilation left behind
  local lock
  case $1 in train | sweep) ;; *) return 0 ;; esac
  for lock in "${TORCH_EXTENSIONS_DIR:-/nonexistent}"/*/lock; do
    if [ ! -e "$lock" ]; then continue; fi
    # None takes two hours: DeepSpeed's largest took 17 minutes on a machine that was busy with ten other things.
    if [ -n "$(find "$lock" -mmin +120)" ] && rm -f "$lock"; then continue; fi
    printf '%s\n' "note: ${lock%/lock} is being compiled by another container, or was when it was interrupted." \
      "If no other is running, this one would wait for ever; stop it, and type:" \
      "    docker compose run --rm --entrypoint 'rm -f $lock' train" >&2
  done
}

main() { # main [COMMAND [ARGUMENT...]]
  # Bash that waits for a program goes on after a SIGINT which that program did not get.
  trap 'exit 130' INT
  require_env_file
  trust_site_ca
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
