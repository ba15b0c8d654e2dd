# shellcheck shell=bash
# What the words of Docker, BuildKit, apt, pip and compilers mean for who reads them. find_reason sets reason (empty:
# unknown), reason_advice and reason_code, the exit code that fits.

reason="" reason_code=1
reason_advice=()

disk_advice=(
  "See what takes room, and remove what is not needed: what nothing uses, then build caches:"
  "    docker system df"
  "    docker system prune"
  "    docker builder prune"
)

because() { # because EXIT_CODE REASON ADVICE...
  reason_code=$1 reason=$2
  reason_advice=("${@:3}")
}

says() { grep -qiE -- "$1" <<< "$said"; } # in the caller's said

find_reason() { # find_reason TEXT
  local said=$1
  reason="" reason_code=1 reason_advice=()
  if says 'no space left on device|disk quota exceeded|ENOSPC|not enough free space'; then
    because 3 "the disk is full${engine_root:+; Docker keeps everything under $engine_root}" "${disk_advice[@]}"
  elif says 'could not select device driver'; then
    because 2 "Docker cannot hand GPUs to containers: it has no NVIDIA runtime" "${toolkit_advice[@]}"
  elif says 'nvidia-container-cli|failed to discover GPU vendor|unresolvable CDI devices'; then
    because 2 "the NVIDIA Container Toolkit could not hand the GPUs over" \
      "After an update of the driver restart the machine, or at least Docker:" "    sudo systemctl restart docker" \
      "To see it by itself: docker run --rm --gpus all --entrypoint true $image"
  elif says 'Cannot connect to the Docker daemon'; then
    because 1 "Docker's daemon went away" "${start_daemon[@]}" "then type the same again"
  else
    find_build_reason
  fi
}

find_build_reason() { # in the caller's said
  if says 'CERTIFICATE_VERIFY_FAILED|certificate verif|signed by unknown authority'; then
    because 2 "a certificate is not known inside the build: this network has certificates of its own" \
      "Hand them to the build, all in one file:" "    make image GPU=$generation CA=/etc/ssl/certs/ca-certificates.crt"
  elif says 'DO NOT MATCH THE HASHES'; then
    because 1 "the package registry gave a file that is not the one in the lock" \
      "A mirror may hold other files than PyPI: name another with PIP_CONF=FILE." \
      "If one of docker/*/requirements*.in was changed: make lock"
  elif says 'failed to resolve source metadata|pull access denied|manifest unknown'; then
    because 2 "the base image cannot be had: there is no network, or no such image" \
      "Name one that is here or in a registry that can be reached: BASE_IMAGE=debian:bookworm-slim" "    docker images"
  elif says 'temporary failure (in name resolution|resolving)|could not resolve|name or service not known' \
    || says 'network is unreachable|network bridge not found|not connect to|failed to fetch' \
    || says 'NewConnectionError|ConnectTimeout|ProxyError'; then
    because 2 "there is no network inside the build, or none to Debian's mirror or the package registry" \
      "Where the host has one, share it: NETWORK=host. Behind a proxy or with mirrors of your own: PIP_CONF=FILE and" \
      "APT_CONF=FILE, a pip.conf and an apt.conf. Or build elsewhere: make push REGISTRY=... there, make pull here"
  elif says 'no matching distribution found'; then
    because 2 "the package registry lacks a package of the lock (above)" \
      "Name a complete one with PIP_CONF=FILE, or put the missing wheels into a folder: WHEELS=DIR"
  elif says 'signal 9|signal: killed|\bkilled\b|exit code: 137|cannot allocate memory'; then
    because 1 "a compiler was killed, because memory ran out" \
      "Close other programs and type the same again: what was compiled is kept." \
      "Or build on a machine with more memory: make push REGISTRY=... there, make pull here"
  fi
}
