#!/usr/bin/env bash
# The host's part of every make target: decides where a command runs and in which image, and runs it there. It needs
# bash, coreutils, git and, for containers, Docker with Compose v2; Python only for a run in .venv.
#   front.sh env                         find the GPUs, choose the image, write .env
#   front.sh image                       build that image
#   front.sh run COMMAND [ARGUMENT...]   run a command of tunebook in a container or in .venv
#   front.sh push                        publish the images that are built and current: REGISTRY=host/path
#   front.sh publish                     build an image and push it with SBOM and provenance: REGISTRY=host/path
#   front.sh pull                        take the image from a registry instead of building it
# Choices are variables, typed after make or set before it: WHERE, GPU and GPUS say where a command runs (`make help`);
# DATA is a folder that containers may read; BASE_IMAGE, CA, PIP_CONF, APT_CONF, WHEELS and NETWORK are for a build
# behind a site's own mirrors; ATTENTION=none builds an image without flash-attn 2. DATA and those of the build are kept
# in .env until they are given again; empty forgets.
# Exit codes: 2 the request cannot be served here, 3 not enough disk space, else that of the command, unchanged.
# Messages go to standard error, so that a command's output can be piped.
set -euo pipefail

if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404)); then
  echo "error: bash $BASH_VERSION is too old: version 4.4 or newer is needed. Install a newer bash, first in PATH" >&2
  exit 2
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"

# shellcheck source=docker/front/messages.sh
. docker/front/messages.sh
# shellcheck source=docker/front/machine.sh
. docker/front/machine.sh
# shellcheck source=docker/front/settings.sh
. docker/front/settings.sh
# shellcheck source=docker/front/image.sh
. docker/front/image.sh
# shellcheck source=docker/front/publish.sh
. docker/front/publish.sh
# shellcheck source=docker/front/container.sh
. docker/front/container.sh

uses_gpus() { # uses_gpus COMMAND
  case $1 in train | eval | sweep | chat | doctor) ;; *) return 1 ;; esac
}

# --- where a command runs: choose_place sets place and place_why

place="" place_why=""

choose_place() { # choose_place COMMAND
  case ${WHERE:-auto} in
    container | local) place=$WHERE ;;
    auto) if [ "${GPU:-auto}" != auto ]; then place=container; else choose_place_for_machine "$1"; fi ;;
    *) refuse "WHERE=$WHERE is unknown." "Choose one of: auto container local" ;;
  esac
  choose_generation
  place_why=${place_why:-${WHERE:+WHERE=$WHERE and }$generation_why}
}

choose_place_for_machine() { # choose_place_for_machine COMMAND
  case $1 in list | explain | report | verify | diff | export | data) take_existing ;; esac
  if [ -n "$place" ]; then return; fi
  choose_generation
  place=local
  if [ "$gpu_state" != found ]; then return; fi
  look_at_engine
  if [ -z "$engine_problem" ]; then
    place=container
  else
    place_why="$generation_why, but no container: ${engine_problem%.} (WHERE=container says what to do)"
  fi
}

take_existing() { # these commands need no GPU, so they run in whatever is set up already
  local there
  if [ -e .venv/.ready-run ]; then
    place=local generation=$(cat .venv/.generation 2> /dev/null || echo cpu)
  else
    there=$(read_setting TUNEBOOK_GENERATION)
    if [ ! -f "docker/$there/generation.env" ]; then return; fi
    if ! labels_of "$(read_setting TUNEBOOK_IMAGE)" > /dev/null; then return; fi
    place=container generation=$there
  fi
  generation_why="that is set up already"
}

# --- the commands

write_env() {
  choose_generation
  choose_image
  look_at_engine
  write_settings
  say "image $image: $generation_why; .env says so"
  if [ -z "$engine_problem" ] && [ "$generation" != cpu ]; then
    say "GPUs in containers: $(describe_gpu_access)"
  fi
}

make_image() {
  choose_generation
  require_engine
  require_buildx
  choose_image
  write_settings
  if [[ $image == *@* ]]; then
    say "$image is here and current: nothing to build"
  else
    say "image $image: $generation_why"
    build_image
  fi
}

run_command() { # run_command COMMAND [ARGUMENT...]
  choose_place "$1"
  if uses_gpus "$1"; then require_fitting_gpus; fi
  if [ "$place" = container ]; then run_in_container "$@"; fi
  if [ "$gpu_count" != all ]; then
    CUDA_VISIBLE_DEVICES=$(seq -s , 0 $((gpu_count - 1)))
    export CUDA_VISIBLE_DEVICES
  fi
  exec docker/venv.sh run "$generation" "$place_why" "$@"
}

end_when_interrupted
case ${1:-} in
  env) write_env ;;
  image) make_image ;;
  run) run_command "${@:2}" ;;
  push) push_images ;;
  publish) publish_image ;;
  pull) pull_image ;;
  *) refuse "usage: front.sh env | image | run COMMAND [ARGUMENT...] | push | publish | pull" "People type make: make help" ;;
esac
