# shellcheck shell=bash
# Whether Docker can be used here, and what to type where it cannot. look_at_engine sets engine_problem (empty: it can)
# and engine_advice; it is asked once.

engine_problem=unknown engine_info="" engine_root=""
engine_advice=()
engine_timeout_s=${TUNEBOOK_ENGINE_TIMEOUT_S:-30}
# Tried with 2.26.1. Before 2.19 `!reset`, by which docker/cpu/compose.yaml takes the GPUs away, worked for the first
# service only (docker/compose#10656).
oldest_compose=2.19.0
install_page=https://docs.docker.com/engine/install/
toolkit_page=https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/install-guide.html

engine_fails() { # engine_fails PROBLEM ADVICE...
  engine_problem=$1
  engine_advice=("${@:2}")
}

look_at_engine() {
  if [ "$engine_problem" != unknown ]; then return; fi
  engine_problem=""
  if ! command -v docker > /dev/null; then
    engine_fails "Docker is not installed: there is no command docker." \
      "Install Docker Engine with its Compose plugin: $install_page"
    return
  fi
  look_at_daemon
  if [ -z "$engine_problem" ]; then look_at_compose; fi
}

look_at_daemon() {
  local code=0 errors
  errors=$(mktemp)
  # The exit code says nothing: with --format it is 0 where no daemon answers.
  engine_info=$(timeout "$engine_timeout_s" docker info --format '{{json .}}' 2> "$errors") || code=$?
  local said
  said="$engine_info $(cat "$errors")"
  rm -f "$errors"
  if [[ $engine_info =~ \"DockerRootDir\":\"([^\"]+)\" ]]; then
    engine_root=${BASH_REMATCH[1]}
    return
  fi
  name_daemon_problem "$said" "$code"
}

name_daemon_problem() { # name_daemon_problem WHAT_DOCKER_SAID EXIT_CODE
  local address=""
  if [[ $1 =~ (unix|tcp|ssh|npipe)://[^\ :\"]+(:[0-9]+)? ]]; then address=${BASH_REMATCH[0]}; fi
  case $1 in
    *"using podman"*)
      engine_fails "The command docker is Podman here, which the images are not made for." \
        "Install Docker Engine with its Compose plugin: $install_page" ;;
    *"permission denied"*)
      engine_fails "You may not use Docker: no permission on its socket ${address#unix://}." \
        "Join its group, then log in again:" "    sudo usermod -aG docker ${SUDO_USER:-${USER:-\$USER}}" \
        "or type sudo in front of make; files will be yours all the same." ;;
    *"Cannot connect to the Docker daemon"* | *"dial tcp"* | *"connection refused"*)
      engine_fails "Docker is installed, but its daemon does not answer at ${address:-its address}." \
        "${start_daemon[@]}" ;;
    *)
      if [ "$2" = 124 ]; then
        engine_fails "Docker's daemon did not answer within $engine_timeout_s s." \
          "Start it again, which ends its containers:" "    sudo systemctl restart docker"
      else
        local said=${1##*\"ServerErrors\":}
        engine_fails "\`docker info\` fails: ${said:0:300}" "See what it says by itself: docker info"
      fi ;;
  esac
}

start_daemon=("Start it:" "    sudo systemctl start docker")
if [ -n "${DOCKER_HOST:-}" ]; then
  start_daemon=("DOCKER_HOST=$DOCKER_HOST says where it is; for the one on this machine: unset DOCKER_HOST")
fi

look_at_compose() {
  local version
  # `docker compose` fails without the plugin, and each Docker has words of its own for that.
  if ! version=$(docker compose version --short 2> /dev/null); then
    local problem="Docker is here, but Compose v2, its plugin, is not."
    if command -v docker-compose > /dev/null; then
      problem="Only Compose v1 is here, the command docker-compose; v2 is a plugin of Docker: docker compose."
    fi
    engine_fails "$problem" "Install it with one of these, depending on where Docker came from:" \
      "    sudo apt install docker-compose-plugin" "    sudo apt install docker-compose-v2"
    return
  fi
  version=${version#v}
  if [ "$(printf '%s\n' "$oldest_compose" "$version" | sort -V | head -n 1)" != "$oldest_compose" ]; then
    engine_fails "Compose $version is too old: $oldest_compose or newer is needed." \
      "Update it:" "    sudo apt update && sudo apt install --only-upgrade docker-compose-plugin"
  fi
}

require_engine() {
  look_at_engine
  if [ -n "$engine_problem" ]; then
    refuse "$engine_problem" "${engine_advice[@]}" "Without Docker, in .venv: WHERE=local"
  fi
}

require_buildx() { # only a build needs it
  if docker buildx version > /dev/null 2>&1; then return; fi
  refuse "Docker is here, but buildx, the plugin that builds images, is not." \
    "Install it with one of these, depending on where Docker came from:" \
    "    sudo apt install docker-buildx-plugin" "    sudo apt install docker-buildx"
}

gives_gpus() { # whether Docker looks as if it can hand GPUs to containers
  # A runtime or a CDI device that the daemon knows, or the hook that it finds in PATH when it starts: the last is
  # enough, although `docker info` does not show it.
  [[ $engine_info == *'"nvidia":{'* || $engine_info == *nvidia.com/gpu* ]] \
    || command -v nvidia-container-runtime-hook nvidia-container-toolkit > /dev/null
}

toolkit_advice=(
  "Install the NVIDIA Container Toolkit ($toolkit_page) and tell Docker of it:"
  "    sudo apt install nvidia-container-toolkit"
  "    sudo nvidia-ctk runtime configure --runtime=docker"
  "    sudo systemctl restart docker"
  "Without Docker, in .venv: WHERE=local"
)

require_gpu_runtime() {
  if [ "$generation" = cpu ] || gives_gpus; then return; fi
  refuse "nvidia-smi finds ${#gpu_names[@]} x ${gpu_names[0]}, but Docker cannot hand GPUs to containers: it has no" \
    "NVIDIA runtime. ${toolkit_advice[0]}" "${toolkit_advice[@]:1}"
}
