# shellcheck shell=bash
# Images in a registry: `make push` publishes what was built here and notes its digest in
# docker/<generation>/image.digest, by which everybody else gets that very image; `make pull` fetches it.

not_pulled="" # why pull_current did not

require_registry() {
  if [ -z "${REGISTRY:-}" ]; then refuse "$1 needs a registry." "Name it: make $1 REGISTRY=host/path"; fi
  REGISTRY=${REGISTRY%/}
  if [[ $REGISTRY == *://* ]]; then
    refuse "REGISTRY=$REGISTRY is an address, and Docker wants a name." "Type REGISTRY=${REGISTRY#*://}"
  fi
}

push_images() {
  require_registry push
  require_engine
  local pushed=0
  if [ "${GPU:-auto}" != auto ]; then
    choose_generation
    if ! is_pushable; then
      refuse "$image is not built, or not from this checkout." "Build it: make image GPU=$generation"
    fi
    push_image
    return
  fi
  for generation in $(generation_names); do
    sources_sha256=""
    if is_pushable; then
      push_image
      pushed=$((pushed + 1))
    fi
  done
  if [ "$pushed" = 0 ]; then
    refuse "No image of this checkout is built here, so there is nothing to push." "Build one: make image"
  fi
}

is_pushable() { # whether the image that was built here is current
  image=$(built_image)
  if is_current "$image"; then return; fi
  if labels_of "$image" > /dev/null; then
    say "leaving out $image: it was built from other sources or another lock (make image GPU=$generation)"
  fi
  return 1
}

push_image() {
  local name=$REGISTRY/$image digest
  docker tag "$image" "$name"
  say "pushing $name"
  with_registry push "$name"
  digest=$(digest_of "$name")
  write_digest "$digest"
  printf '%s\n' "$digest"
}

with_registry() { # with_registry PUSH_OR_PULL NAME; Docker shows its progress, and a failure is explained
  local errors said
  errors=$(mktemp)
  if docker "$1" "$2" 1>&2 2> "$errors"; then
    rm -f "$errors"
    return
  fi
  said=$(cat "$errors")
  rm -f "$errors"
  printf '%s\n' "$said" >&2
  explain_registry "$1" "$2" "$said"
}

digest_of() { # digest_of NAME; prints REGISTRY/tunebook@sha256:..., which pushing or pulling made known
  docker image inspect --format '{{range .RepoDigests}}{{println .}}{{end}}' "$1" | grep "^${1%:*}@" | head -n 1
}

write_digest() { # write_digest NAME_WITH_DIGEST
  local file=docker/$generation/image.digest
  printf '%s\n' "$1" > "$file"
  own "$file"
  say "$file names it: commit that file, and other machines take the image instead of building it"
}

explain_registry() { # explain_registry PUSH_OR_PULL NAME WHAT_DOCKER_SAID
  local host=${2%%/*}
  case $3 in
    *denied* | *"no basic auth credentials"* | *nauthorized*)
      refuse "the registry does not let you $1." "Log in, then type the same again:" "    docker login $host" ;;
    *"server gave HTTP response to HTTPS client"*)
      refuse "the registry speaks plain http, which Docker accepts only from this machine." \
        "Put {\"insecure-registries\": [\"$host\"]} into /etc/docker/daemon.json, then:" \
        "    sudo systemctl restart docker" ;;
    *"manifest unknown"* | *"not found"* | *"name unknown"*)
      refuse "the registry does not have $2." \
        "Push it from a machine that has built it: make push REGISTRY=${2%/*}" ;;
    *"connection refused"* | *"no such host"* | *"i/o timeout"* | *"network is unreachable"*)
      refuse "the registry $host cannot be reached." \
        "Is that its name, and does the network lead there? docker login $host" ;;
    *"invalid reference format"*)
      refuse "'${2%/*}' is no place in a registry." "Type it in lower case, as in REGISTRY=host:5000/path" ;;
  esac
  find_reason "$3"
  end_with "$reason_code" "docker $1 failed: ${reason:-see above}" "${reason_advice[@]}"
}

pull_current() { # pull_current NAME; fetches it if it is of this checkout, else not_pulled says why not
  hash_checkout
  local answer code=0 config lock="" sources=""
  answer=$(mktemp)
  # Its labels first: nobody wants to fetch gigabytes to learn that they do not fit.
  run_stoppable end_command timeout 30 docker buildx imagetools inspect --format '{{json .Image}}' "$1" \
    > "$answer" 2>&1 || code=$?
  config=$(cat "$answer")
  rm -f "$answer"
  exit_if_stopped "stopped before $1 was pulled"
  if [ "$code" != 0 ]; then
    not_pulled="the registry does not show $1 (${config##*$'\n'})"
    return 1
  fi
  if [[ $config =~ \"tunebook.lock-sha256\":\ *\"([0-9a-f]*)\" ]]; then lock=${BASH_REMATCH[1]}; fi
  if [[ $config =~ \"tunebook.sources-sha256\":\ *\"([0-9a-f]*)\" ]]; then sources=${BASH_REMATCH[1]}; fi
  if [ "$lock $sources" != "$lock_sha256 $sources_sha256" ]; then
    not_pulled="$1 is of other sources or another lock than this checkout"
    return 1
  fi
  say "pulling $1"
  with_registry pull "$1"
}

pull_image() {
  choose_generation
  require_engine
  local name
  name=$(published_image)
  if [ -n "${REGISTRY:-}" ]; then
    require_registry pull
    # The same digest from another place, else whatever has this generation's tag.
    if [ -n "$name" ]; then name=$REGISTRY/tunebook@${name##*@}; else name=$REGISTRY/tunebook:$generation; fi
  fi
  if [ -z "$name" ]; then
    refuse "There is no docker/$generation/image.digest, so it is not known what to pull." \
      "Name a registry: make pull REGISTRY=host/path"
  fi
  say "pulling $name: $generation_why"
  with_registry pull "$name"
  if ! is_digest "$name"; then name=$(digest_of "$name"); fi
  if [ "$name" != "$(published_image)" ]; then write_digest "$name"; fi
  choose_image
  write_settings
  if [ "$image" = "$name" ]; then
    say "it is used from now on"
  else
    say "it is of other sources or another lock than this checkout, so it is not used: make image builds one that is"
  fi
}
