#!/usr/bin/env bash
# The host's side of the front door, called by make. It needs bash, coreutils, git and, for containers, Docker with
# Compose v2; never Python, unless a run belongs into .venv.
#   front.sh env                         find the GPUs, pick the image, write .env
#   front.sh image                       build that image
#   front.sh run COMMAND [ARGUMENT...]   run a command of tunebook where it belongs: in a container or in .venv
#   front.sh push                        publish the images that are built and current: REGISTRY=host/path
#   front.sh pull                        take the image from a registry instead of building it
# Choices are variables, typed after make or set before it: WHERE, GPU and GPUS say where a command runs (`make help`);
# DATA is a folder that containers may read; BASE_IMAGE, CA, PIP_CONF, APT_CONF, WHEELS and NETWORK are for a build
# behind a site's own mirrors. DATA and those of the build are kept in .env until they are given again; empty forgets.
# Exit codes: 2 the request cannot be served here, 3 no room on the disk, else that of the command, unchanged.
# What is said on the way goes to standard error, so that a command's output can be piped.
set -euo pipefail

if [ "${BASH_VERSINFO[0]}" -lt 4 ]; then
  echo "error: bash $BASH_VERSION is too old: version 4 or newer is needed. Install a newer bash, first in PATH" >&2
  exit 2
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"

# shellcheck source=docker/front/words.sh
. docker/front/words.sh
# shellcheck source=docker/front/gpus.sh
. docker/front/gpus.sh
# shellcheck source=docker/front/generations.sh
. docker/front/generations.sh
# shellcheck source=docker/front/engine.sh
. docker/front/engine.sh
# shellcheck source=docker/front/reasons.sh
. docker/front/reasons.sh
# shellcheck source=docker/front/settings.sh
. docker/front/settings.sh
# shellcheck source=docker/front/stoppable.sh
. docker/front/stoppable.sh
# shellcheck source=docker/front/image.sh
. docker/front/image.sh
# shellcheck source=docker/front/registry.sh
. docker/front/registry.sh
# shellcheck source=docker/front/container.sh
. docker/front/container.sh
# shellcheck source=docker/front/venv_lock.sh
. docker/front/venv_lock.sh
# shellcheck source=docker/front/place.sh
. docker/front/place.sh

write_env() {
  choose_generation
  choose_image
  write_settings
  say "image $image: $generation_why; $settings_file says so"
}

make_image() {
  choose_generation
  require_engine
  require_buildx
  choose_image
  write_settings
  if is_digest "$image"; then
    say "$image is here and current: nothing to build"
  else
    say "image $image: $generation_why"
    build_image
  fi
}

run_command() { # run_command COMMAND [ARGUMENT...]
  choose_place "$1"
  choose_generation
  if uses_gpus "$1"; then require_fitting_gpus; fi
  case $place in
    local) run_in_venv "$@" ;;
    container) run_in_container "$@" ;;
  esac
}

usage() {
  end_with 2 "usage: front.sh env | image | run COMMAND [ARGUMENT...] | push | pull" "People type make: make help"
}

end_when_interrupted
load_generations
case ${1:-} in
  env) write_env ;;
  image) make_image ;;
  run)
    [ $# -ge 2 ] || usage
    run_command "${@:2}"
    ;;
  push) push_images ;;
  pull) pull_image ;;
  *) usage ;;
esac
