#!/usr/bin/env bash
# The host's part of every make target: decides where a command runs and in which image, and runs it there. It needs
# bash, coreutils, git and, for containers, Docker with Compose v2; Python only for a run in .venv.
#   front.sh env                         find the GPUs, choose the image, write .env
#   front.sh image                       build that image
#   front.sh run COMMAND [ARGUMENT...]   run a command of tunebook in a container or in .venv
#   front.sh push | publish | pull       the image to or from a registry: REGISTRY=host/path
# Choices are variables, typed after make or set before it: WHERE, GPU and GPUS say where a command runs (`make help`);
# DATA is a folder that containers may read; BASE_IMAGE, CA, PIP_CONF, APT_CONF, WHEELS and NETWORK are for a build
# behind a site's own mirrors; ATTENTION=none builds an image without flash-attn 2. DATA and those of the build are kept
# in .env until they are given again; empty forgets.
# Exit codes: 2 the request cannot be served here, else that of the command, unchanged.
# Messages go to standard error, so that a command's output can be piped.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"

say() { printf 'tunebook: %s\n' "$*" >&2; }

refuse() { # refuse PROBLEM [ADVICE...]; each argument is a line
  printf '%s\n' "error: $1" "${@:2}" >&2
  exit 2
}

# shellcheck source=docker/front/machine.sh
. docker/front/machine.sh
# shellcheck source=docker/front/image.sh
. docker/front/image.sh

write_env() {
  look_at_engine
  choose_image
  write_settings
  say "image $image: $generation_why; .env says so"
  local access
  access=$(gpu_access)
  if [ "$generation" != cpu ]; then say "GPUs in containers: by ${access:-nothing yet, make train says what is missing}"; fi
}

make_image() {
  require_engine
  choose_image
  write_settings
  if [[ $image == *@* ]]; then say "$image is here and current: nothing to build"; else build_image; fi
}

run_command() { # run_command COMMAND [ARGUMENT...]
  local place=${WHERE:-auto} why
  case $place in auto | container | local) ;; *) refuse "WHERE=$WHERE is unknown." "Choose: auto container local" ;; esac
  case $1 in
    list | explain | report | verify | diff | export | data) # they need no GPU, so they take what is set up already
      if [ "$place" != container ] && [ "${GPU:-auto}" = auto ] && [ -e .venv/.ready-run ]; then
        exec docker/venv.sh run any "it is set up already" "$@"
      fi ;;
  esac
  choose_generation
  if [ "$generation" != cpu ]; then find_gpus; fi
  why=${WHERE:+WHERE=$WHERE and }$generation_why
  if [ "$place" = auto ] && [ "${GPU:-auto}" != auto ]; then
    place=container
  elif [ "$place" = auto ] && [ ${#gpus[@]} -gt 0 ]; then
    look_at_engine
    place=container
    if [ -n "$engine_problem" ]; then place=local why+=", but no container: $engine_problem"; fi
  fi
  if [ "$place" = container ]; then run_in_container "$why" "$@"; fi
  exec docker/venv.sh run "$generation" "$why" "$@"
}

# --- a command in a container: its exit code comes back unchanged, and a request to stop reaches it once
#
# Ctrl-C reaches every process of a terminal's foreground group, and make forwards SIGTERM. `docker compose run` forwards
# a signal twice or not at all, and a run takes a second Ctrl-C as "do not save". So compose runs in a session of its
# own, which only this script reaches, and the script signals the container.

container="" compose_process="" num_signals=0 is_delivered=""

run_in_container() { # run_in_container WHY COMMAND [ARGUMENT...]
  local why=$1 service=$2 compose=(docker compose) words
  shift
  require_engine
  if [ "$generation" != cpu ]; then
    case $1 in
      train | eval | sweep | chat | doctor) require_gpus ;;
      *) if [ ${#gpus[@]} = 0 ]; then compose+=(-f compose.yaml -f docker/cpu/compose.yaml); fi ;;
    esac
  fi
  choose_image
  write_settings
  require_image
  say "in a container, image $image: $why"
  container=tunebook-$1-$(date +%Y%m%d-%H%M%S)-$$
  if needs_sandbox "$@"; then
    say "the sandbox executes what the model writes; it stays up until: docker compose stop sandbox"
    "${compose[@]}" up --detach --build sandbox >&2 || say "the sandbox could not be started; the reason is above"
  fi
  words=("${compose[@]}" run --rm --name "$container")
  # An image that was built here has no digest in a registry. Its id identifies it as exactly, and `docker load` keeps it.
  if [[ $image != *@* ]]; then
    words+=(--env "TUNEBOOK_IMAGE_DIGEST=$(docker image inspect --format '{{.Id}}' "$image")")
  fi
  if [ ! -t 1 ]; then words+=(-T); fi
  # Without standard input the terminal stays as it is, so that Ctrl-C in it makes a signal.
  if [ "$1" != chat ]; then words+=(--interactive=false); fi
  case $1 in
    train | eval | sweep | plan | chat) ;;
    *) service=plan words+=(--entrypoint "/opt/tunebook/entrypoint.sh $1") ;;
  esac
  words+=("$service" "${@:2}")
  # The terminal of a chat belongs to the conversation: keys, Ctrl-C among them, go to the container as they are.
  if [ "$1" = chat ] && [ -t 0 ]; then exec "${words[@]}"; fi
  run_stoppable "${words[@]}"
}

require_gpus() { # before a build, which can take hours: GPUs that the image is for, and that Docker gives to containers
  if [ ${#gpus[@]} = 0 ]; then
    refuse "GPU=$GPU needs such GPUs, and there is none here: $no_gpu." "Without a GPU: GPU=cpu"
  fi
  local own
  own=$(generation_of "$(cut -d , -f 3 <<< "${gpus[0]}")")
  if [ "$generation" != "$own" ] && [ "$generation" != "$(fact "${own:-cpu}" OLDER_DRIVER_IMAGE)" ]; then
    refuse "The $generation image is not for the GPUs here: $(describe_gpus)." "Leave GPU out."
  fi
  if [ -n "$(gpu_access)" ]; then return; fi
  refuse "nvidia-smi finds $(describe_gpus), but Docker has neither NVIDIA's runtime nor a CDI file of GPUs." \
    "Install the NVIDIA Container Toolkit, then: sudo nvidia-ctk runtime configure --runtime=docker" \
    "    https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/install-guide.html" \
    "Or, with Docker 25 or newer: sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml" \
    "Without Docker, in .venv: WHERE=local"
}

needs_sandbox() { # needs_sandbox COMMAND [ARGUMENT...]; whether the arguments ask for programs that a model writes
  case $1 in train | eval | sweep) ;; *) return 1 ;; esac
  [[ " $* " != *" --dry-run "* ]] \
    && printf '%s\n' "$@" \
    | grep -E '^(suite|evaluation)=code|^(evaluation\.)?tasks?=.*(humaneval|mbpp|small_python)' > /dev/null
}

run_stoppable() { # run_stoppable WORD...; ends this script with the container's exit code
  local code=0 again seen name
  for name in INT TERM HUP; do
    # shellcheck disable=SC2064  # the name, now
    trap "forward $name" "$name"
  done
  setsid "$@" <&0 &
  compose_process=$!
  while true; do # a signal interrupts `wait`
    seen=$num_signals
    wait "$compose_process" && again=0 || again=$?
    # 127: it was waited for already; -1: bash 5.2 lost its status while a trap ran, and the signal's stays.
    if ((again >= 0 && again != 127)); then code=$again; fi
    if [ "$num_signals" = "$seen" ]; then break; fi
  done
  # Compose ends before the container if the terminal that it writes to is closed.
  if [ "$code" != 0 ] && again=$(setsid docker wait "$container" 2> /dev/null); then code=$again; fi
  # Compose may end with 0 if it is stopped before it has started the container.
  if [ "$code" = 0 ] && [ "$num_signals" -gt 0 ] && [ -z "$is_delivered" ]; then code=130; fi
  setsid docker rm --force "$container" > /dev/null 2>&1 || true
  exit "$code"
}

forward() { # forward SIGNAL; before the container runs there is nothing to save, and compose is ended
  num_signals=$((num_signals + 1))
  if [ -z "${compose_process:=${!:-}}" ]; then exit 130; fi
  # Without the 0, `return` in a trap has the status of what the signal interrupted.
  if signal_container "$1" || [ -n "$is_delivered" ]; then return 0; fi
  kill "$compose_process" 2> /dev/null || true
  # Compose may start the container all the same, if it is about to.
  while kill -0 "$compose_process" 2> /dev/null && ! signal_container "$1"; do sleep 0.2; done
}

signal_container() { # signal_container SIGNAL
  setsid docker kill --signal "$1" "$container" > /dev/null 2>&1 && is_delivered=1
}

# Bash ends on Ctrl-C only if the program that it waits for dies of it. Docker and nvidia-smi may catch it and end with
# a code, like any failure. This comes once all scripts are read: bash 5.2 that gets a signal while it parses a $() takes
# the trap for a part of it.
trap 'exit 130' INT
case ${1:-} in
  env) write_env ;;
  image) make_image ;;
  run) run_command "${@:2}" ;;
  push) push_image ;;
  publish) publish_image ;;
  pull) pull_image ;;
  *) refuse "usage: front.sh env | image | run COMMAND [ARGUMENT...] | push | publish | pull" "People type: make help" ;;
esac
