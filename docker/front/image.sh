# shellcheck shell=bash
# Which image, whether it is current, and building it. An image is current where its labels name the lock and the
# sources of this checkout. docker/<generation>/image.digest, where it is there, names one in a registry to use instead.

image=""

built_image() { printf 'tunebook:%s' "$generation"; } # what a build here is called

is_digest() { [[ $1 == *@sha256:* ]]; }

published_image() { # prints what image.digest names, if it is there
  local file=docker/$generation/image.digest name
  if [ ! -f "$file" ]; then return; fi
  name=$(grep -v '^#' "$file" | tr -d '[:space:]')
  if ! [[ $name =~ ^[^@]+@sha256:[0-9a-f]{64}$ ]]; then
    refuse "$file holds no image with its digest, as in REGISTRY/tunebook@sha256:..., but: ${name:-nothing}" \
      "Take it anew: make pull GPU=$generation REGISTRY=host/path. Or build here: rm $file"
  fi
  printf '%s' "$name"
}

labels_of() { # prints the lock and the sources that an image was built from; fails where the image is not here
  local lock='{{index .Config.Labels "tunebook.lock-sha256"}}'
  local sources='{{index .Config.Labels "tunebook.sources-sha256"}}'
  docker image inspect --format "$lock $sources" "$1" 2> /dev/null
}

is_current() { # is_current IMAGE
  hash_checkout
  [ "$(labels_of "$1")" = "$lock_sha256 $sources_sha256" ]
}

is_usable() { # is_usable IMAGE
  # Who asks for the image's own code and recipes is not held to the checkout's.
  if [ "${TUNEBOOK_USE_IMAGE_SOURCES:-}" = 1 ]; then labels_of "$1" > /dev/null; else is_current "$1"; fi
}

choose_image() { # sets image: the published one if it is here and current, else what is, or is to be, built here
  local published
  image=$(built_image)
  published=$(published_image)
  if [ -n "$published" ] && is_usable "$published"; then image=$published; fi
}

require_image() { # has the chosen image here and current: as it is, pulled or built
  choose_image
  if is_usable "$image"; then return; fi
  local published
  published=$(published_image)
  if [ -n "$published" ]; then
    if pull_current "$published"; then
      choose_image
      return
    fi
    say "docker/$generation/image.digest is not used: $not_pulled. Building instead."
  fi
  if labels_of "$image" > /dev/null; then
    say "$image was built from other sources or another lock: bringing it up to date"
  fi
  require_buildx
  write_settings
  build_image
}

require_room() { # before everything is built
  local needed=${disk_gib_of[$generation]} free
  if [ ! -d "$engine_root" ] || labels_of "$image" > /dev/null; then return; fi
  free=$(($(df -Pk -- "$engine_root" | awk 'NR == 2 { print $4 }') / 1024 / 1024))
  if [ "$free" -ge "$needed" ]; then return; fi
  does_not_fit "Building $image takes $needed GiB, and $free GiB are left in $engine_root, where Docker keeps all." \
    "${disk_advice[@]}" "Or give Docker another disk: \"data-root\" in /etc/docker/daemon.json"
}

build_image() {
  require_room
  local log=.cache/build-$generation.log code=0 start=$SECONDS follower before
  before=$(docker image inspect --format '{{.Id}}' "$image" 2> /dev/null) || true
  : > "$log"
  rm -f "$log.end" # of a build that was killed: to who follows, this one would have ended before it began
  own "$log"
  say "building $image$(build_choices); all of the output is in $log"
  follow_build "$log" &
  follower=$!
  # To a file compose writes BuildKit's output as plain lines.
  run_stoppable end_command docker compose build train > "$log" 2>&1 || code=$?
  touch "$log.end"
  wait "$follower" || true
  rm -f "$log.end"
  exit_if_stopped "building was stopped; what is finished is kept, and the same command goes on from there"
  if [ "$code" != 0 ]; then explain_failed_build "$log"; fi
  remove_nameless "$before"
  say "$image is ready after $((SECONDS - start)) s"
}

remove_nameless() { # remove_nameless ID; what a build left without a name, which would fill the disk edit by edit
  if [ "$(docker image inspect --format '{{len .RepoTags}}{{len .RepoDigests}}' "$1" 2> /dev/null)" = 00 ]; then
    docker image rm "$1" > /dev/null 2>&1 || true # a container may still use it
  fi
}

build_choices() { # what of .env shapes the build
  local name text=""
  for name in BASE_IMAGE BUILD_NETWORK CA_FILE PIP_CONF APT_CONF; do
    case ${settings[TUNEBOOK_$name]:-} in
      "" | /dev/null) ;;
      *) text+=", ${name%_FILE}=${settings[TUNEBOOK_$name]}" ;;
    esac
  done
  if [ "${settings[TUNEBOOK_WHEELS]}" != "$root/.cache/wheels" ]; then text+=", WHEELS=${settings[TUNEBOOK_WHEELS]}"; fi
  if [ -n "$text" ]; then printf ' (%s)' "${text#, }"; fi
}

explain_failed_build() { # explain_failed_build LOG
  find_reason "$(tail -n 200 "$1")"
  grep -v '^ *$' "$1" | tail -n 20 | cut -c 1-300 >&2
  end_with "$reason_code" "building $image failed: ${reason:-see above}. All of the output is in $1" \
    "${reason_advice[@]}"
}

follow_build() { # follow_build LOG; shows the steps as they begin, and in long ones a sign of life every minute
  local line="" partial="" last="" has_ended shown=$SECONDS file
  exec {file}< "$1"
  while kill -0 "$$" 2> /dev/null; do
    has_ended=false
    if [ -e "$1.end" ]; then has_ended=true; fi
    if IFS= read -r -u "$file" line; then
      last=$partial$line partial=""
      if [[ $last =~ ^#[0-9]+\ \[.*[0-9]+/[0-9]+\]\ [A-Z] ]]; then
        show_step "${last#* }"
        shown=$SECONDS
      fi
      continue
    fi
    partial+=$line
    if $has_ended; then break; fi
    if ((SECONDS - shown >= 60)); then
      printf '  ... %.110s\n' "$last" >&2
      shown=$SECONDS
    fi
    sleep 0.3
  done
}

show_step() { # show_step TEXT; without what its RUN mounts
  local word words=() text
  read -ra words <<< "$1"
  for word in "${words[@]}"; do
    if [[ $word != --mount=* ]]; then text+=" $word"; fi
  done
  printf ' %.110s\n' "$text" >&2
}
