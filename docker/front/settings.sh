# shellcheck shell=bash
# .env, by which compose knows what front.sh chose. Lines of the user's own in it are kept; nothing secret is written.

settings_note="# By make env; the lines from here on are written again by every make target that uses a container."

user_id() { echo "${SUDO_UID:-$(id -u)}"; } # who owns the files, also under sudo

group_id() { echo "${SUDO_GID:-$(id -g)}"; }

read_setting() { # read_setting NAME; prints the value in .env
  if [ -f .env ]; then sed -n "s/^$1=//p" .env | tail -n 1 | sed "s/^'\(.*\)'$/\1/"; fi
}

kept() { # kept VARIABLE SETTING; prints the value typed now, even an empty one, else that of .env
  if [ -n "${!1+set}" ]; then printf '%s' "${!1}"; else read_setting "$2"; fi
}

kept_path() { # kept_path VARIABLE SETTING KIND; prints an absolute path; KIND is file or folder
  local path option=-f
  path=$(kept "$1" "$2")
  if [ -z "$path" ] || [ "$path" = /dev/null ]; then return; fi
  if [ "$3" = folder ]; then option=-d; fi
  if [ ! -e "$path" ]; then refuse "$1=$path: there is no such $3." "Name one that exists, or forget it: $1="; fi
  if [ ! -r "$path" ] || ! test "$option" "$path"; then
    refuse "$1=$path is no $3 that can be read." "Name a $3 that can, or forget it: $1="
  fi
  realpath -- "$path"
}

settings="" # lines of .env

setting() { # setting NAME VALUE; compose takes what is between single quotes as it is
  case $2 in
    *[\'[:cntrl:]]*)
      refuse "$1: compose cannot read a name with a quote or a line break in it: $2" "Use another folder." ;;
    *[!A-Za-z0-9_./:@+,-]*) settings+="$1='$2'"$'\n' ;;
    *) settings+="$1=$2"$'\n' ;;
  esac
}

collect_settings() {
  local name path user group commit="" difference="" files=compose.yaml
  user=$(user_id) group=$(group_id) settings=""
  # In rootless Docker the container's root is the user outside, and every other uid owns nothing.
  if [[ $engine_info == *name=rootless* ]]; then user=0 group=0; fi
  # A repository of its own, and not part of somebody's.
  if [ "$(git_here rev-parse --show-toplevel)" = "$root" ] && commit=$(git_here rev-parse --verify --quiet HEAD); then
    difference=$(hash_difference)
  fi
  # Naming the files keeps compose from adding compose.override.yaml, which is for those who have no .env yet.
  if [ "$generation" = cpu ]; then
    files+=:docker/cpu/compose.yaml
  else
    find_gpu_access
    if [ "$gpu_access" = cdi ]; then files+=:docker/cdi/compose.yaml; fi
  fi
  setting COMPOSE_FILE "$files"
  setting TUNEBOOK_IMAGE "$image"
  setting TUNEBOOK_IMAGE_DIGEST "$(if [[ $image == *@* ]]; then echo "${image##*@}"; fi)"
  setting TUNEBOOK_TARGET image
  setting TUNEBOOK_GPUS "$gpu_count"
  setting TUNEBOOK_UID "$user"
  setting TUNEBOOK_GID "$group"
  setting TUNEBOOK_CHECKOUT "$root"
  setting TUNEBOOK_HF_HOME "${HF_HOME:+$(realpath -- "$HF_HOME")}"
  choose_attention
  setting TUNEBOOK_ATTENTION "$attention"
  setting TUNEBOOK_ATTENTION_CHOICE "$(kept ATTENTION TUNEBOOK_ATTENTION_CHOICE)"
  for name in GENERATION TORCH MIN_DRIVER; do setting "TUNEBOOK_$name" "$(fact "$generation" "$name")"; done
  setting TUNEBOOK_LOCK_SHA256 "$lock_sha256"
  setting TUNEBOOK_SOURCES_SHA256 "$sources_sha256"
  setting TUNEBOOK_GIT_COMMIT "$commit"
  setting TUNEBOOK_GIT_DIFF_SHA256 "$difference"
  setting TUNEBOOK_BASE_IMAGE "$(kept BASE_IMAGE TUNEBOOK_BASE_IMAGE)"
  setting TUNEBOOK_BUILD_NETWORK "$(kept NETWORK TUNEBOOK_BUILD_NETWORK)"
  for name in CA_FILE PIP_CONF APT_CONF; do
    path=$(kept_path "${name%_FILE}" "TUNEBOOK_$name" file)
    setting "TUNEBOOK_$name" "$path"
  done
  path=$(kept_path WHEELS TUNEBOOK_WHEELS folder)
  setting TUNEBOOK_WHEELS "${path:-$root/.cache/wheels}"
  path=$(kept_path DATA TUNEBOOK_DATA folder)
  setting TUNEBOOK_DATA "$path"
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

make_folder() { # make_folder FOLDER; as the user, also under sudo
  if [ -d "$1" ]; then return; fi
  local parent
  parent=$(dirname -- "$1")
  make_folder "$parent"
  if ! mkdir -- "$1" 2> /dev/null; then
    refuse_unowned "$(realpath -m -- "$1") cannot be made: $(realpath -m -- "$parent") belongs to" "$parent"
  fi
  own "$1"
}

own() { # own FILE; gives what root made under sudo to the user
  if [ "$(id -u)" = 0 ] && [ -n "${SUDO_UID:-}" ]; then chown -h "$(user_id):$(group_id)" -- "$1"; fi
}

refuse_unowned() { # refuse_unowned PROBLEM FILE [FOLDER]; PROBLEM ends before the name of FILE's owner
  refuse "$1 $(stat -c %U -- "$2")." "Make it yours:" \
    "    sudo chown -R $(user_id):$(group_id) $(printf '%q' "$(realpath -m -- "${3:-$2}")")"
}

require_writable_outputs() {
  local closed is_closed=(! -writable)
  make_folder outputs
  if [ "$(user_id)" = 0 ]; then return; fi
  if [ "$(id -u)" = 0 ]; then is_closed=(! -uid "$(user_id)"); fi
  closed=$(find -H outputs -maxdepth 1 -type d "${is_closed[@]}" -print -quit)
  if [ -n "$closed" ]; then
    refuse_unowned "$root/$closed is closed to you, so no run can write there: it belongs to" "$closed" outputs
  fi
}

write_settings() { # into .env, only if something changed, and in one step: nobody reads half a file
  local folder file names text
  for folder in outputs .cache/wheels ${HF_HOME:+"$HF_HOME"}; do make_folder "$folder"; done # the engine would as root
  hash_checkout
  collect_settings
  names=$(cut -d = -f 1 <<< "${settings%$'\n'}" | paste -sd '|')
  # shellcheck disable=SC2086  # names
  unset ${names//|/ } # in compose's eyes the environment, which may be another checkout's, wins over .env
  text=$(grep -vE "^($names)=" .env 2> /dev/null | grep -vxF -- "$settings_note" || true)
  text=${text:+$text$'\n'}$settings_note$'\n'${settings%$'\n'}
  file=$(realpath -m -- .env) # it may be a link
  if [ -f "$file" ] && [ "$text" = "$(cat "$file")" ]; then return; fi
  if ! (umask 022 && printf '%s\n' "$text" > "$file.part") 2> /dev/null; then
    refuse_unowned "$file cannot be written: the disk is full (df -h .), or the checkout belongs to" . "$root"
  fi
  if [ -f "$file" ]; then chmod --reference="$file" "$file.part"; fi
  own "$file.part"
  mv -f "$file.part" "$file"
}
