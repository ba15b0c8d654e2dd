# shellcheck shell=bash
# The image: which one is used, building it, and the registry that it is published in.
# An image is current if its labels name the lock and the sources of this checkout. docker/<generation>/image.digest, if
# it exists, names one in a registry to use instead of building.

image="" lock_sha256="" sources_sha256="" attention=""

built_image() { printf 'tunebook:%s' "$generation"; } # the name of what a build here makes

published_image() { # prints what image.digest names, if it exists
  local file=docker/$generation/image.digest name
  if [ ! -f "$file" ]; then return; fi
  name=$(grep -v '^#' "$file" | tr -d '[:space:]')
  if ! [[ $name =~ ^[^@]+@sha256:[0-9a-f]{64}$ ]]; then
    refuse "$file holds no image with its digest, as in REGISTRY/tunebook@sha256:..., but: ${name:-nothing}" \
      "Pull it again: make pull GPU=$generation REGISTRY=host/path. Or build here: rm $file"
  fi
  printf '%s' "$name"
}

hash_checkout() { # what an image has to be built from to be current
  sources_sha256=${sources_sha256:-$(docker/sources_hash.sh .)}
  lock_sha256=$(sha256sum < "docker/$generation/requirements.lock" | cut -d ' ' -f 1)
}

choose_attention() { # the attention package of the image: the generation's, or none, which saves hours of compiling
  local own
  own=$(fact "$generation" ATTENTION)
  case $(kept ATTENTION TUNEBOOK_ATTENTION_CHOICE) in
    "" | "$own") attention=$own ;;
    none) attention=none ;;
    *)
      if [ -z "${ATTENTION:-}" ]; then # kept from another generation's image
        attention=$own
        return
      fi
      refuse "ATTENTION=$ATTENTION is not known for the $generation image." \
        "Choose one of: $(printf '%s\n' none "$own" | uniq | paste -sd ' '); or leave it out" ;;
  esac
}

labels_of() { # labels_of IMAGE; prints the lock, the attention package and the sources of an image; fails if not here
  local label='index .Config.Labels "tunebook'
  docker image inspect \
    --format "{{$label.lock-sha256\"}} {{$label.attention\"}} {{$label.sources-sha256\"}}" "$1" 2> /dev/null
}

is_usable() { # is_usable IMAGE; current, or here at all if the image's own code and recipes are asked for
  local labels
  labels=$(labels_of "$1") || return
  hash_checkout
  choose_attention
  [ "$labels" = "$lock_sha256 $attention $sources_sha256" ] || [ "${TUNEBOOK_USE_IMAGE_SOURCES:-}" = 1 ]
}

what_differs() { # what_differs IMAGE; prints what the image was built from that is not as asked; after is_usable
  local lock kind sources differences=()
  read -r lock kind sources <<< "$(labels_of "$1")"
  if [ "$sources" != "$sources_sha256" ]; then differences+=("from other sources"); fi
  if [ "$lock" != "$lock_sha256" ]; then differences+=("from another lock"); fi
  if [ "$kind" != "$attention" ]; then
    differences+=("with the attention package $kind and not $attention (ATTENTION=$kind takes it as it is)")
  fi
  printf '%s\n' "${differences[@]}" | paste -sd , | sed 's/,/, /g'
}

choose_image() { # sets image: the published one if it is usable, else the one to build here
  local published
  published=$(published_image)
  image=$(built_image)
  if [ -n "$published" ] && is_usable "$published"; then image=$published; fi
}

require_image() { # makes the chosen image usable: as it is, pulled or built
  choose_image
  if is_usable "$image"; then return; fi
  local published not_pulled=""
  published=$(published_image)
  if [ -n "$published" ]; then
    pull_if_current "$published"
    if [ -z "$not_pulled" ]; then
      image=$published
      return
    fi
    say "docker/$generation/image.digest is not used: $not_pulled. Building instead."
  fi
  if labels_of "$image" > /dev/null; then say "$image was built $(what_differs "$image"): updating it"; fi
  require_buildx
  write_settings
  build_image
}

# --- building

require_disk_space() { # before a build from nothing
  local needed free
  needed=$(fact "$generation" BUILD_DISK_GIB)
  if [ ! -d "$engine_root" ] || labels_of "$image" > /dev/null; then return; fi
  free=$(($(df -Pk -- "$engine_root" | awk 'NR == 2 { print $4 }') / 1024 / 1024))
  if [ "$free" -ge "$needed" ]; then return; fi
  end_with 3 \
    "Building $image takes $needed GiB, and $free GiB are free in $engine_root, where Docker keeps everything." \
    "${disk_advice[@]}" "Or give Docker another disk: \"data-root\" in /etc/docker/daemon.json"
}

build_image() {
  require_disk_space
  local start=$SECONDS before
  before=$(docker image inspect --format '{{.Id}}' "$image" 2> /dev/null) || true
  say "building $image with the settings in .env"
  run_build "building $image" docker compose build train
  # The image before would stay without a name and fill the disk edit by edit; a container may still use it.
  if [ "$(docker image inspect --format '{{len .RepoTags}}{{len .RepoDigests}}' "$before" 2> /dev/null)" = 00 ]; then
    docker image rm "$before" > /dev/null 2>&1 || true
  fi
  say "$image is ready after $((SECONDS - start)) s"
}

run_build() { # run_build WHAT COMMAND...; shows what the builder prints
  local code=0
  export BUILDKIT_PROGRESS=${BUILDKIT_PROGRESS:-plain} # the command has no terminal of its own
  run_stoppable end_command "${@:2}" >&2 || code=$?
  exit_if_stopped "the build was stopped; what is finished is kept, and the same command continues from there"
  if [ "$code" = 0 ]; then return; fi
  end_with 1 "$1 failed; the reason is above." \
    "Where the network is a site's own (certificates, proxies, mirrors), see docker/README.md; where the disk is full:" \
    "${disk_advice[@]:1}"
}

# --- registries

require_registry() { # require_registry TARGET
  if [ -z "${REGISTRY:-}" ]; then refuse "$1 needs a registry." "Name it: make $1 REGISTRY=host/path"; fi
  REGISTRY=${REGISTRY%/}
  if [[ $REGISTRY == *://* ]]; then
    refuse "REGISTRY=$REGISTRY is an address, and Docker expects a name." "Type REGISTRY=${REGISTRY#*://}"
  fi
}

push_images() {
  require_registry push
  require_engine
  local pushed=0 names name digest
  if [ "${GPU:-auto}" = auto ]; then
    names=$(generation_names)
  else
    choose_generation
    names=$generation
  fi
  for generation in $names; do
    image=$(built_image)
    if ! TUNEBOOK_USE_IMAGE_SOURCES="" is_usable "$image"; then
      if labels_of "$image" > /dev/null; then
        say "leaving out $image: it was built $(what_differs "$image") (make image GPU=$generation)"
      fi
      continue
    fi
    name=$REGISTRY/$image
    docker tag "$image" "$name"
    say "pushing $name"
    with_registry push "$name"
    digest=$(digest_of "$name")
    write_digest "$digest"
    printf '%s\n' "$digest"
    pushed=$((pushed + 1))
  done
  if [ "$pushed" = 0 ] && [ "${GPU:-auto}" != auto ]; then
    refuse "$image is not built, or not from this checkout." "Build it: make image GPU=$generation"
  elif [ "$pushed" = 0 ]; then
    refuse "No image of this checkout is built here, so there is nothing to push." "Build one: make image"
  fi
}

with_registry() { # with_registry push|pull NAME
  if docker "$1" "$2" >&2; then return; fi
  end_with 1 "docker $1 $2 failed; the reason is above." "Where it wants an account: docker login ${2%%/*}"
}

digest_of() { # digest_of NAME; prints REGISTRY/tunebook@sha256:..., which is known after a push or a pull
  docker image inspect --format '{{range .RepoDigests}}{{println .}}{{end}}' "$1" | grep "^${1%:*}@" | head -n 1
}

write_digest() { # write_digest NAME_WITH_DIGEST
  local file=docker/$generation/image.digest
  printf '%s\n' "$1" > "$file"
  own "$file"
  say "$file names it: commit that file, and other machines take the image instead of building it"
}

pull_if_current() { # pull_if_current NAME; sets the caller's not_pulled if the image is not of this checkout
  local text
  hash_checkout
  choose_attention
  # The labels first: nobody wants to download gigabytes of an image that does not match. In the foreground, or Ctrl-C
  # would not reach it.
  if ! text=$(timeout --foreground 30 docker buildx imagetools inspect --format '{{json .Image}}' "$1" 2>&1); then
    not_pulled="the registry does not show $1 (${text##*$'\n'})"
  elif ! [[ $text == *'"tunebook.lock-sha256":'*"$lock_sha256"* \
    && $text == *'"tunebook.attention":'*"\"$attention\""* \
    && $text == *'"tunebook.sources-sha256":'*"$sources_sha256"* ]]; then
    not_pulled="$1 is of other sources, another lock or another attention package than asked for"
  else
    say "pulling $1"
    with_registry pull "$1"
  fi
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
  if [[ $name != *@* ]]; then name=$(digest_of "$name"); fi
  if [ "$name" != "$(published_image)" ]; then write_digest "$name"; fi
  choose_image
  write_settings
  if [ "$image" = "$name" ]; then
    say "it is used from now on"
  else
    say "it is of other sources, another lock or another attention package than asked for, so it is not used:" \
      "make image builds one that is"
  fi
}
