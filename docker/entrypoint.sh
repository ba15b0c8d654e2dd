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

refuse() { # refuse PROBLEM [ADVICE...]; each argument is a line; 2 is the exit code for a wrong request
  printf '%s\n' "error: $1" "${@:2}" >&2
  exit 2
}

asks_for_help() { # such a command writes nothing
  [ $# = 0 ] || [[ " $* " =~ \ (-h|--help|--version)\  ]]
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

check_caches() {
  local folder folders=("$HOME" "${TUNEBOOK_CACHE:-$HOME}")
  # Without downloads, the folder of models may be read-only on purpose.
  if [ "${HF_HUB_OFFLINE:-0}" = 0 ]; then folders+=("${HF_HOME:-$HOME}"); fi
  for folder in "${folders[@]}"; do
    if mkdir -p "$folder" 2> /dev/null && [ -w "$folder" ]; then continue; fi
    refuse "$folder in the container is not writable for uid $(id -u)." \
      "If it is a volume of another user's, name the project after yourself: COMPOSE_PROJECT_NAME=tunebook-me" \
      "If it is your HF_HOME and everything is there already, type HF_HUB_OFFLINE=1 in front."
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
  if [ -n "${1:-}" ] && type -P -- "$1" > /dev/null; then exec "$@"; fi
  if ! asks_for_help "$@"; then
    check_sources
    check_caches
  fi
  exec tunebook "$@"
}

main "$@"
