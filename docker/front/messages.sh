# shellcheck shell=bash disable=SC2034,SC2154  # some variables are the callers'
# Messages: what was chosen, why a command stops, what a misspelled name may have meant, and what the errors of Docker,
# BuildKit, apt, pip and compilers mean.

say() { printf 'tunebook: %s\n' "$*" >&2; }

end_with() { # end_with EXIT_CODE PROBLEM [ADVICE...]; each argument is a line
  printf 'error: %s\n' "$2" >&2
  if [ $# -gt 2 ]; then printf '%s\n' "${@:3}" >&2; fi
  exit "$1"
}

refuse() { end_with 2 "$@"; } # the request is wrong, or this machine cannot serve it

nearest() { # nearest WORD KNOWN...; prints the known word that is at most two edits away, or nothing
  printf '%s\n' "${@:2}" | awk -v word="${1,,}" '
    function least(a, b) { return a < b ? a : b }
    BEGIN { fewest = 3 }
    {
      for (j = 0; j <= length($0); j++) row[j] = j
      for (i = 1; i <= length(word); i++) {
        diagonal = row[0]
        row[0] = i
        for (j = 1; j <= length($0); j++) {
          above = row[j]
          row[j] = least(diagonal + (substr(word, i, 1) != substr($0, j, 1)), least(above, row[j - 1]) + 1)
          diagonal = above
        }
      }
      if (row[length($0)] < fewest) { fewest = row[length($0)]; found = $0 }
    }
    END { printf "%s", found }'
}

# --- errors of other programs

# A table is a function that calls `sign` once per row; the first row whose pattern is in `output` sets the other three.
output="" reason="" reason_code=1
reason_advice=()

look_up() { # look_up TABLE OUTPUT; leaves reason empty where no row matches
  output=$2 reason="" reason_code=1 reason_advice=()
  "$1"
}

sign() { # sign PATTERN EXIT_CODE REASON [ADVICE...]
  if [ -n "$reason" ] || ! grep -qiE -- "$1" <<< "$output"; then return 0; fi
  reason_code=$2 reason=$3 reason_advice=("${@:4}")
}

disk_advice=(
  "See what takes space, then remove what is unused, and build caches:"
  "    docker system df"
  "    docker system prune"
  "    docker builder prune"
)
toolkit_advice=(
  "Install the NVIDIA Container Toolkit and register it with Docker:"
  "    https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/install-guide.html"
  "    sudo apt install nvidia-container-toolkit"
  "    sudo nvidia-ctk runtime configure --runtime=docker"
  "    sudo systemctl restart docker"
  "Or, with Docker 25 or newer, let it make a CDI file, and again after each driver update:"
  "    sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"
  "    sudo nvidia-ctk runtime configure --runtime=docker --cdi.enabled    # before Docker 28"
  "Without Docker, in .venv: WHERE=local"
)
start_daemon=("Start it:" "    sudo systemctl start docker")
if [ -n "${DOCKER_HOST:-}" ]; then
  start_daemon=("DOCKER_HOST=$DOCKER_HOST names its address; for the daemon on this machine: unset DOCKER_HOST")
fi
install_advice=("Install Docker Engine with its Compose plugin: https://docs.docker.com/engine/install/")

daemon_errors() { # of `docker info`
  local address=""
  if [[ $output =~ (unix|tcp|ssh|npipe)://[^\ :\"]+(:[0-9]+)? ]]; then address=${BASH_REMATCH[0]%.}; fi
  sign 'using podman' 2 "The command docker is Podman here, which the images do not support." "${install_advice[@]}"
  sign 'permission denied' 2 "You may not use Docker: no permission on its socket ${address#unix://}." \
    "Join its group, then log in again:" "    sudo usermod -aG docker ${SUDO_USER:-${USER:-\$USER}}" \
    "or type sudo in front of make; files will still belong to you."
  sign 'Cannot connect to the Docker daemon|dial tcp|connection refused' 2 \
    "Docker is installed, but its daemon does not answer at ${address:-its address}." "${start_daemon[@]}"
}

start_errors() { # of `docker compose build` and `docker compose run`
  sign 'no space left on device|disk quota exceeded|ENOSPC|not enough free space' 3 \
    "the disk is full${engine_root:+; Docker keeps everything under $engine_root}" "${disk_advice[@]}"
  sign 'could not select device driver' 2 "Docker cannot give GPUs to containers: it has no NVIDIA runtime" \
    "${toolkit_advice[@]}"
  sign 'nvidia-container-cli|failed to discover GPU vendor|unresolvable CDI devices' 2 \
    "the NVIDIA Container Toolkit could not give the GPUs to the container" \
    "After a driver update restart the machine, or at least Docker:" "    sudo systemctl restart docker" \
    "To see the error by itself: docker run --rm --gpus all --entrypoint true $image"
  sign 'Cannot connect to the Docker daemon' 1 "Docker's daemon stopped" "${start_daemon[@]}" "then type the same again"
  sign 'CERTIFICATE_VERIFY_FAILED|certificate verif|signed by unknown authority' 2 \
    "the build does not know a certificate: this network has certificates of its own" \
    "Give them to the build, all in one file:" "    make image GPU=$generation CA=/etc/ssl/certs/ca-certificates.crt"
  sign 'DO NOT MATCH THE HASHES' 1 "the package registry sent a file whose hash is not in the lock" \
    "A mirror may hold other files than PyPI: name another with PIP_CONF=FILE." \
    "If one of docker/*/requirements*.in was changed: make lock"
  sign 'failed to resolve source metadata|pull access denied|manifest unknown' 2 \
    "the base image cannot be fetched: there is no network, or no such image" \
    "Name one that is here or in a registry within reach: BASE_IMAGE=debian:bookworm-slim" "    docker images"
  sign 'temporary failure (in name resolution|resolving)|could not resolve|name or service not known|network is unreach' \
    2 "${no_network[@]}"
  sign 'network bridge not found|not connect to|failed to fetch|NewConnectionError|ConnectTimeout|ProxyError' \
    2 "${no_network[@]}"
  sign 'no matching distribution found' 2 "the package registry lacks a package of the lock (above)" \
    "Name a complete registry with PIP_CONF=FILE, or put the missing wheels into a folder: WHEELS=DIR"
  sign 'signal 9|signal: killed|\bkilled\b|exit code: 137|cannot allocate memory' 1 \
    "a compiler was killed because memory ran out" \
    "Close other programs and type the same again: what was compiled is kept." \
    "Or build on a machine with more memory: make push REGISTRY=... there, make pull here"
}

no_network=(
  "there is no network inside the build, or no route to Debian's mirror or the package registry"
  "Where the host has a network, share it: NETWORK=host. Behind a proxy or with your own mirrors: PIP_CONF=FILE and"
  "APT_CONF=FILE, a pip.conf and an apt.conf. Or build elsewhere: make push REGISTRY=... there, make pull here"
)

registry_errors() { # of `docker push` and `docker pull`; reads the caller's direction, name, host and place
  sign 'denied|no basic auth credentials|unauthorized' 2 "the registry does not let you $direction." \
    "Log in, then type the same again:" "    docker login $host"
  sign 'server gave HTTP response to HTTPS client' 2 \
    "the registry speaks plain http, which Docker accepts only from this machine." \
    "Put {\"insecure-registries\": [\"$host\"]} into /etc/docker/daemon.json, then:" "    sudo systemctl restart docker"
  sign 'manifest unknown|not found|name unknown' 2 "the registry does not have $name." \
    "Push it from a machine that has built it: make push REGISTRY=$place"
  sign 'connection refused|no such host|i/o timeout|network is unreachable' 2 "the registry $host cannot be reached." \
    "Is that its name, and is there a route to it? docker login $host"
  sign 'invalid reference format' 2 "'$place' is not a valid registry path." \
    "Type it in lower case, as in REGISTRY=host:5000/path"
  start_errors
}
