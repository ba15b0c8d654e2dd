# shellcheck shell=bash
# .env, by which plain `docker compose` knows what the front door knows. Lines of the user's own in it are kept as they
# are; nothing secret is written. Written only when something changed, and at once: nobody reads half a file.

settings_file=.env
settings_note="# By make env; the lines from here on are written again by every make target that uses a container."
declare -A settings=()
setting_names=(
  COMPOSE_FILE
  TUNEBOOK_GENERATION TUNEBOOK_IMAGE TUNEBOOK_IMAGE_DIGEST TUNEBOOK_TARGET TUNEBOOK_GPUS
  TUNEBOOK_UID TUNEBOOK_GID TUNEBOOK_CHECKOUT TUNEBOOK_OUTPUTS TUNEBOOK_DATA TUNEBOOK_HF_HOME
  TUNEBOOK_TORCH TUNEBOOK_MIN_DRIVER TUNEBOOK_ATTENTION
  TUNEBOOK_LOCK_SHA256 TUNEBOOK_SOURCES_SHA256 TUNEBOOK_GIT_COMMIT TUNEBOOK_GIT_DIFF_SHA256
  TUNEBOOK_BASE_IMAGE TUNEBOOK_BUILD_NETWORK TUNEBOOK_CA_FILE TUNEBOOK_PIP_CONF TUNEBOOK_APT_CONF TUNEBOOK_WHEELS
)
lock_sha256="" sources_sha256=""
# What is in .env counts: in compose's eyes the environment would win, which may be left from another checkout.
unset "${setting_names[@]}"

user_id() { echo "${SUDO_UID:-$(id -u)}"; } # whose files they are, also where sudo is typed in front

group_id() { echo "${SUDO_GID:-$(id -g)}"; }

hash_checkout() { # what an image has to be built from to be current; once
  if [ -n "$sources_sha256" ]; then return; fi
  sources_sha256=$(docker/sources_hash.sh .)
  lock_sha256=$(sha256sum "docker/$generation/requirements.lock")
  lock_sha256=${lock_sha256%% *}
}

read_setting() { # read_setting NAME; prints what .env says, as write_settings quotes it
  local line
  if [ ! -f "$settings_file" ]; then return; fi
  line=$(grep "^$1=" "$settings_file" | tail -n 1) || return 0
  line=${line#*=}
  line=${line#\'}
  printf '%s' "${line%\'}"
}

typed_or_kept() { # typed_or_kept VARIABLE SETTING; what is typed, and be it empty, else what .env has
  if [ -n "${!1+set}" ]; then printf '%s' "${!1}"; else read_setting "$2"; fi
}

existing_path() { # existing_path VARIABLE PATH KIND; prints it as an absolute path; KIND is file or folder
  if [ -z "$2" ]; then return; fi
  if [ ! -e "$2" ]; then refuse "$1=$2: there is no such $3." "Name one that is there, or forget it: $1="; fi
  if { [ "$3" = folder ] && [ ! -d "$2" ]; } || { [ "$3" = file ] && [ -d "$2" ]; } || [ ! -r "$2" ]; then
    refuse "$1=$2 is no $3 that can be read." "Name a $3 that can, or forget it: $1="
  fi
  realpath -- "$2"
}

fill_settings() {
  hash_checkout
  settings=(
    [COMPOSE_FILE]=$(compose_files)
    [TUNEBOOK_GENERATION]=$generation [TUNEBOOK_IMAGE]=$image [TUNEBOOK_TARGET]=image [TUNEBOOK_GPUS]=$gpu_count
    [TUNEBOOK_UID]=$container_user [TUNEBOOK_GID]=$container_group
    [TUNEBOOK_CHECKOUT]=$root [TUNEBOOK_OUTPUTS]=$root/outputs
    [TUNEBOOK_TORCH]=${torch_of[$generation]} [TUNEBOOK_MIN_DRIVER]=${floor_of[$generation]}
    [TUNEBOOK_ATTENTION]=${attention_of[$generation]}
    [TUNEBOOK_LOCK_SHA256]=$lock_sha256 [TUNEBOOK_SOURCES_SHA256]=$sources_sha256
    [TUNEBOOK_BASE_IMAGE]=$(typed_or_kept BASE_IMAGE TUNEBOOK_BASE_IMAGE)
    [TUNEBOOK_BUILD_NETWORK]=$(typed_or_kept NETWORK TUNEBOOK_BUILD_NETWORK)
  )
  if is_git_checkout && settings[TUNEBOOK_GIT_COMMIT]=$(git_here rev-parse --verify --quiet HEAD); then
    settings[TUNEBOOK_GIT_DIFF_SHA256]=$(hash_difference)
  fi
  if is_digest "$image"; then settings[TUNEBOOK_IMAGE_DIGEST]=${image##*@}; fi
  fill_paths
}

fill_paths() {
  local variable path
  local -A kept_as=([CA]=CA_FILE [PIP_CONF]=PIP_CONF [APT_CONF]=APT_CONF)
  for variable in "${!kept_as[@]}"; do
    path=$(typed_or_kept "$variable" "TUNEBOOK_${kept_as[$variable]}")
    if [ "$path" = /dev/null ]; then path=""; fi
    path=$(existing_path "$variable" "$path" file)
    settings[TUNEBOOK_${kept_as[$variable]}]=${path:-/dev/null}
  done
  path=$(typed_or_kept WHEELS TUNEBOOK_WHEELS)
  settings[TUNEBOOK_WHEELS]=$(existing_path WHEELS "${path:-.cache/wheels}" folder)
  path=$(typed_or_kept DATA TUNEBOOK_DATA)
  settings[TUNEBOOK_DATA]=$(existing_path DATA "$path" folder)
  if [ -n "${HF_HOME:-}" ]; then
    make_folder "$HF_HOME" # the engine would make it as root
    settings[TUNEBOOK_HF_HOME]=$(realpath -- "$HF_HOME")
  fi
}

compose_files() {
  # Naming them keeps compose from adding compose.override.yaml, which is for who has no .env yet.
  if [ "$generation" = cpu ]; then echo compose.yaml:docker/cpu/compose.yaml; else echo compose.yaml; fi
}

is_git_checkout() { [ "$(git_here rev-parse --show-toplevel)" = "$root" ]; } # and not part of somebody's own repository

git_here() { # in a checkout of another user's, as under sudo, git wants to be told that this one is meant
  git -c safe.directory="$root" "$@" 2> /dev/null
}

hash_difference() { # what was changed or added since the commit, as src/tunebook/record/provenance.py hashes it
  local changes
  changes=$(mktemp)
  {
    git_here diff HEAD --binary --no-ext-diff --no-textconv --no-color
    added_files
  } > "$changes" || true
  if [ -s "$changes" ]; then sha256sum < "$changes" | cut -d ' ' -f 1; fi
  rm -f "$changes"
}

added_files() { # the name and the hash of each, as bytes that are hashed again
  local name line names=() files=() hashes=() next=0
  while IFS= read -r -d '' name; do
    names+=("$name")
    if [ -f "$name" ]; then files+=("$name"); fi
  done < <(git_here ls-files --others --exclude-standard -z -- src hydra_configs recipes docker | LC_ALL=C sort -z)
  if [ ${#files[@]} -gt 0 ]; then
    while IFS= read -r -d '' line; do hashes+=("${line%% *}"); done \
      < <(printf '%s\0' "${files[@]}" | xargs -0 sha256sum --zero --)
  fi
  for name in "${names[@]}"; do
    line="not a file"
    if [ -f "$name" ]; then line=${hashes[next++]}; fi
    printf '\0%s\0%s' "$name" "$line"
  done
}

choose_user() { # sets container_user and container_group
  container_user=$(user_id) container_group=$(group_id)
  # In rootless Docker the container's root is the user outside, and every other uid is one that owns nothing.
  if [[ $engine_info == *name=rootless* ]]; then container_user=0 container_group=0; fi
}

make_folder() { # make_folder FOLDER; as the user, also under sudo
  if [ -d "$1" ]; then return; fi
  local parent
  parent=$(dirname -- "$1")
  if [ ! -d "$parent" ]; then make_folder "$parent"; fi
  if ! mkdir -- "$1" 2> /dev/null; then
    refuse "$(realpath -m -- "$1") cannot be made: $(realpath -m -- "$parent") belongs to $(stat -c %U -- "$parent")." \
      "Make it yours:" "    sudo chown -R $(user_id):$(group_id) $(printf '%q' "$(realpath -m -- "$parent")")"
  fi
  own "$1"
}

own() { # own FILE; gives what root made under sudo to the user
  if [ "$(id -u)" = 0 ] && [ -n "${SUDO_UID:-}" ]; then chown -h "$(user_id):$(group_id)" -- "$1"; fi
}

require_writable_outputs() {
  local folder=outputs closed
  if [ "$(user_id)" = 0 ]; then return; fi
  if [ "$(id -u)" = 0 ]; then
    closed=$(find -H $folder -maxdepth 1 -type d ! -uid "$(user_id)" -print -quit)
  else
    closed=$(find -H $folder -maxdepth 1 -type d ! -writable -print -quit)
  fi
  if [ -z "$closed" ]; then return; fi
  refuse "$root/$closed belongs to $(stat -c %U -- "$closed") and is closed to you, so no run can write there." \
    "Make it yours:" "    sudo chown -R $(user_id):$(group_id) $(printf '%q' "$root/outputs")"
}

write_settings() {
  make_folder outputs
  make_folder .cache/wheels
  choose_user
  fill_settings
  local file text
  file=$(realpath -m -- "$settings_file") # it may be a link
  text=$(own_lines && print_settings)
  if [ -f "$file" ] && [ "$text" = "$(cat "$file")" ]; then return; fi
  if ! (umask 022 && printf '%s\n' "$text" > "$file.part") 2> /dev/null; then
    refuse "$file cannot be written: the checkout belongs to $(stat -c %U .), or the disk is full (df -h .)." \
      "Make it yours:" "    sudo chown -R $(user_id):$(group_id) $(printf '%q' "$root")"
  fi
  if [ -f "$file" ]; then chmod --reference="$file" "$file.part"; fi
  own "$file.part"
  mv -f "$file.part" "$file"
}

own_lines() { # what the user wrote into .env, which may hold secrets: it goes from file to file and nowhere else
  if [ ! -f "$settings_file" ]; then return; fi
  local names
  names=$(printf '%s|' "${setting_names[@]}")
  grep -vE "^(${names%|})=" "$settings_file" | grep -vxF -- "$settings_note" || true
}

print_settings() {
  local name
  printf '%s\n' "$settings_note"
  for name in "${setting_names[@]}"; do print_setting "$name" "${settings[$name]:-}"; done
}

print_setting() { # print_setting NAME VALUE; compose takes what is between single quotes as it is
  case $2 in
    *[\'[:cntrl:]]*)
      refuse "$1: compose cannot read a name with a quote or a line break in it: $2" "Use another folder."
      ;;
    *[!A-Za-z0-9_./:@+,-]*) printf "%s='%s'\n" "$1" "$2" ;;
    *) printf '%s=%s\n' "$1" "$2" ;;
  esac
}
