# shellcheck shell=bash
# The image: .env, by which compose knows it, building it, and the registry that it is published in.
# An image is current if its labels name the lock and the sources of this checkout. docker/<generation>/image.digest, if
# it exists, names one in a registry; `make pull` takes that instead of building.

image="" lock="" sources="" attention=""

choose_image() { # the published image if it is here and current, else the one to build here
  local published
  choose_generation
  case $(kept ATTENTION TUNEBOOK_ATTENTION_CHOICE) in
    "") attention=$(fact "$generation" ATTENTION) ;;
    none) attention=none ;; # which saves hours of compiling
    *) refuse "ATTENTION can only be none, for an image without flash-attn 2." "Forget it: ATTENTION=" ;;
  esac
  lock=$(sha256sum < "docker/$generation/requirements.lock" | cut -d ' ' -f 1)
  sources=$(docker/sources_hash.sh .)
  published=$(published_image)
  image=tunebook:$generation
  if [ -n "$published" ] && is_usable "$published"; then image=$published; fi
}

published_image() { cat "docker/$generation/image.digest" 2> /dev/null || true; }

is_current() { # is_current IMAGE; it is here, and built from this checkout
  local label='index .Config.Labels "tunebook'
  [ "$lock $attention $sources" = "$(docker image inspect --format \
    "{{$label.lock-sha256\"}} {{$label.attention\"}} {{$label.sources-sha256\"}}" "$1" 2> /dev/null)" ]
}

is_here() { docker image inspect "$1" > /dev/null 2>&1; }

is_usable() { # is_usable IMAGE; current, or here at all if the image's own code and recipes are asked for
  is_current "$1" || { [ "${TUNEBOOK_USE_IMAGE_SOURCES:-}" = 1 ] && is_here "$1"; }
}

require_image() { # builds the image if it is missing or out of date
  if is_usable "$image"; then return; fi
  if [ -n "$(published_image)" ] && ! is_here "$(published_image)"; then
    say "docker/$generation/image.digest names a published image: make pull takes it, if it is of this checkout"
  fi
  build_image
}

build_image() {
  local start=$SECONDS
  say "building $image with the settings in .env"
  # What the builder prints goes to standard error, as all that is not the command's own output.
  if ! docker compose build train >&2; then
    say "building $image failed, see above. Behind a site's own network (certificates, mirrors): docker/README.md"
    exit 1
  fi
  say "$image is ready after $((SECONDS - start)) s"
}

# --- .env: lines of the user's own in it are kept; nothing secret is written

settings_note="# By make env; the lines from here on are written again by every make target that uses a container."
settings=""

setting() { # setting NAME VALUE; also exported, because compose prefers the environment to .env
  settings+="$1='$2'"$'\n' # compose takes what is between single quotes as it is
  export "$1=$2"
}

read_setting() { # read_setting NAME; prints the value in .env
  if [ -f .env ]; then sed -n "s/^$1='\(.*\)'$/\1/p" .env | tail -n 1; fi
}

kept() { # kept VARIABLE SETTING; prints the value typed now, even an empty one, else that of .env
  if [ -n "${!1+set}" ]; then printf '%s' "${!1}"; else read_setting "$2"; fi
}

kept_path() { # kept_path VARIABLE SETTING; prints an absolute path
  local path
  path=$(kept "$1" "$2")
  if [ -z "$path" ]; then return; fi
  realpath -e -- "$path" || refuse "$1=$path cannot be used." "Forget it: $1="
}

write_settings() {
  local name user=${SUDO_UID:-$(id -u)} group=${SUDO_GID:-$(id -g)} files=compose.yaml commit="" difference="" text
  for name in outputs .cache .cache/wheels ${HF_HOME:+"$HF_HOME"}; do # the engine would make them as root
    if [ -d "$name" ]; then continue; fi
    mkdir -p -- "$name"
    own "$name"
  done
  # In rootless Docker the container's root is the user outside, and every other uid owns nothing.
  if [[ $engine_info == *name=rootless* ]]; then user=0 group=0; fi
  # A repository of its own, and not part of somebody's.
  if [ "$(git_here rev-parse --show-toplevel)" = "$root" ] && commit=$(git_here rev-parse --verify --quiet HEAD); then
    difference=$(hash_difference)
  fi
  # Naming the files keeps compose from adding compose.override.yaml, which is for those who have no .env yet.
  if [ "$generation" = cpu ]; then
    files+=:docker/cpu/compose.yaml
  elif [ "$(gpu_access)" = cdi ]; then
    files+=:docker/cdi/compose.yaml
  fi
  settings=""
  setting COMPOSE_FILE "$files"
  setting TUNEBOOK_IMAGE "$image"
  setting TUNEBOOK_IMAGE_DIGEST "$(if [[ $image == *@* ]]; then echo "${image##*@}"; fi)"
  setting TUNEBOOK_TARGET image
  setting TUNEBOOK_UID "$user"
  setting TUNEBOOK_GID "$group"
  setting TUNEBOOK_CHECKOUT "$root"
  setting TUNEBOOK_HF_HOME "${HF_HOME:+$(realpath -- "$HF_HOME")}"
  setting TUNEBOOK_ATTENTION "$attention"
  setting TUNEBOOK_ATTENTION_CHOICE "$(kept ATTENTION TUNEBOOK_ATTENTION_CHOICE)"
  for name in GENERATION TORCH MIN_DRIVER; do setting "TUNEBOOK_$name" "$(fact "$generation" "$name")"; done
  setting TUNEBOOK_LOCK_SHA256 "$lock"
  setting TUNEBOOK_SOURCES_SHA256 "$sources"
  setting TUNEBOOK_GIT_COMMIT "$commit"
  setting TUNEBOOK_GIT_DIFF_SHA256 "$difference"
  setting TUNEBOOK_BASE_IMAGE "$(kept BASE_IMAGE TUNEBOOK_BASE_IMAGE)"
  setting TUNEBOOK_BUILD_NETWORK "$(kept NETWORK TUNEBOOK_BUILD_NETWORK)"
  for name in CA PIP_CONF APT_CONF WHEELS DATA; do
    text=$(kept_path "$name" "TUNEBOOK_$name")
    if [ "$name" = WHEELS ]; then text=${text:-$root/.cache/wheels}; fi
    setting "TUNEBOOK_$name" "$text"
  done
  text=$(sed "/^$settings_note$/,\$d" .env 2> /dev/null || true)
  text=${text:+$text$'\n'}$settings_note$'\n'${settings%$'\n'}
  if [ "$text" = "$(cat .env 2> /dev/null)" ]; then return; fi
  printf '%s\n' "$text" > .env
  own .env
}

own() { # own FILE; gives what root made under sudo to the user
  if [ -n "${SUDO_UID:-}" ]; then chown "$SUDO_UID:$SUDO_GID" -- "$1"; fi
}

git_here() { git -c safe.directory="$root" "$@" 2> /dev/null; } # git refuses a checkout of another user's, as under sudo

hash_difference() { # what was changed or added since the commit, as src/tunebook/record/provenance.py hashes it
  {
    git_here diff HEAD --binary --no-ext-diff --no-textconv --no-color
    git_here ls-files --others --exclude-standard -z -- src hydra_configs recipes docker | LC_ALL=C sort -z \
      | while IFS= read -r -d '' name; do
        if [ -f "$name" ]; then hash=$(sha256sum < "$name" | cut -d ' ' -f 1); else hash="not a file"; fi
        printf '\0%s\0%s' "$name" "$hash"
      done
  } | sha256sum | cut -d ' ' -f 1 | grep -v "^$(sha256sum < /dev/null | cut -d ' ' -f 1)$" || true
}

# --- registries

push_image() {
  require_registry push
  require_engine
  choose_image
  local name=$REGISTRY/tunebook:$generation
  image=tunebook:$generation
  if ! is_current "$image"; then
    refuse "$image is not built, or not from this checkout." "Build it: make image GPU=$generation"
  fi
  docker tag "$image" "$name"
  docker push "$name" >&2
  record_digest "$(digest_of "$name")"
}

pull_image() {
  local name
  require_engine
  choose_generation
  if [ -n "${REGISTRY:-}" ]; then
    docker pull "$REGISTRY/tunebook:$generation" >&2
    record_digest "$(digest_of "$REGISTRY/tunebook:$generation")"
  else
    name=$(published_image)
    if [ -z "$name" ]; then
      refuse "There is no docker/$generation/image.digest." "Name a registry: make pull REGISTRY=host/path"
    fi
    docker pull "$name" >&2
  fi
  choose_image
  write_settings
  if [[ $image == *@* ]]; then
    say "it is used from now on"
  else
    say "it is not of this checkout, or of another attention package, so it is not used: make image builds one that is"
  fi
}

# Builds an image and pushes it with an SBOM, the list of its packages, and provenance, how it was built. The engine's own
# image store cannot hold these, so the image goes to the registry and not to the engine. The build is compose.yaml's.
publish_image() {
  require_registry publish
  require_engine
  choose_image
  image=tunebook:$generation
  write_settings
  local facts=.cache/published-$generation.json bake=(docker buildx bake)
  # Bake has to be allowed the host's network, and files outside the checkout, which the secrets may be.
  export BUILDX_BAKE_ENTITLEMENTS_FS=0
  if [ "$(read_setting TUNEBOOK_BUILD_NETWORK)" = host ]; then bake+=(--allow network.host); fi
  bake+=(--file compose.yaml --set "train.tags=$REGISTRY/$image" --set "train.attest=type=provenance,mode=max"
    --set "train.attest=type=sbom${SBOM_GENERATOR:+,generator=$SBOM_GENERATOR}" --metadata-file "$facts" --push train)
  "${bake[@]}" >&2
  record_digest "$REGISTRY/tunebook@$(sed -n 's/.*"containerimage.digest": "\(sha256:[0-9a-f]*\)".*/\1/p' "$facts")"
}

require_registry() { # require_registry TARGET
  if [ -z "${REGISTRY:-}" ]; then refuse "$1 needs a registry." "Name it: make $1 REGISTRY=host/path"; fi
}

digest_of() { # digest_of NAME; prints REGISTRY/tunebook@sha256:..., which is known after a push or a pull
  docker image inspect --format '{{range .RepoDigests}}{{println .}}{{end}}' "$1" | grep -m 1 "^${1%:*}@"
}

record_digest() { # record_digest NAME_WITH_DIGEST
  local file=docker/$generation/image.digest
  printf '%s\n' "$1" > "$file"
  own "$file"
  printf '%s\n' "$1"
  say "$file names it: commit that file, and other machines can pull the image instead of building it"
}
