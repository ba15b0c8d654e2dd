# shellcheck shell=bash disable=SC2034  # some variables are the callers'
# Messages: what was chosen, and why a command stops. What Docker itself prints is shown as it is.

say() { printf 'tunebook: %s\n' "$*" >&2; }

end_with() { # end_with EXIT_CODE PROBLEM [ADVICE...]; each argument is a line
  printf 'error: %s\n' "$2" >&2
  if [ $# -gt 2 ]; then printf '%s\n' "${@:3}" >&2; fi
  exit "$1"
}

refuse() { end_with 2 "$@"; } # the request is wrong, or this machine cannot serve it

disk_advice=(
  "See what takes space, then remove what is unused, and build caches:"
  "    docker system df"
  "    docker system prune"
  "    docker builder prune"
)
toolkit_advice=(
  "Install the NVIDIA Container Toolkit and register it with Docker:"
  "    https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/install-guide.html"
  "    sudo nvidia-ctk runtime configure --runtime=docker"
  "    sudo systemctl restart docker"
  "Or, with Docker 25 or newer, let it make a CDI file, and again after each driver update:"
  "    sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"
  "Without Docker, in .venv: WHERE=local"
)
