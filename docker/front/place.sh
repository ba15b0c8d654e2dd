# shellcheck shell=bash
# Where a command runs, in a container or in .venv, and running it in .venv.

place="" place_why=""
ready_stamp=.venv/.ready-run # the Makefile's

uses_gpus() { # uses_gpus COMMAND
  case $1 in train | eval | sweep | chat | doctor) ;; *) return 1 ;; esac
}

is_about_what_is_there() { # is_about_what_is_there COMMAND; it asks neither for GPUs nor for what fits them
  case $1 in list | explain | report | verify | diff | export | data) ;; *) return 1 ;; esac
}

takes_any_packages() { # takes_any_packages COMMAND [ARGUMENT...]; so that no .venv is made anew for it
  local word
  if is_about_what_is_there "$1"; then return; fi
  case $1 in plan | fetch | doctor) return ;; esac
  for word in "$@"; do
    if [ "$word" = --dry-run ]; then return; fi
  done
  return 1
}

choose_place() { # choose_place COMMAND; sets place and place_why
  local known="auto container local"
  case ${WHERE:-auto} in
    container | local) place=$WHERE ;;
    auto) choose_place_by_itself "$1" ;;
    *)
      local close
      # shellcheck disable=SC2086  # words
      close=$(nearest "$WHERE" $known)
      refuse "WHERE=$WHERE is unknown.${close:+ Did you mean WHERE=$close?}" "Choose one of: $known" ;;
  esac
  choose_generation
  place_why=${place_why:-${WHERE:+WHERE=$WHERE and }$generation_why}
}

choose_place_by_itself() { # choose_place_by_itself COMMAND
  if [ "${GPU:-auto}" != auto ]; then
    place=container
    return
  fi
  if is_about_what_is_there "$1" && take_what_is_there; then return; fi
  choose_generation
  if [ "$gpu_state" != found ]; then
    place=local
    return
  fi
  look_at_engine
  if [ -z "$engine_problem" ]; then
    place=container
  else
    place=local place_why="$generation_why, but no container: ${engine_problem%.} (WHERE=container says what to do)"
  fi
}

take_what_is_there() { # these need no GPU, so they run in what is set up already
  if [ -e "$ready_stamp" ]; then
    generation=$(packages_there)
    place=local place_why="that is set up already"
    generation_why=$place_why
    return
  fi
  local there
  there=$(read_setting TUNEBOOK_GENERATION)
  if [ -n "${floor_of[$there]+known}" ] && docker image inspect "$(read_setting TUNEBOOK_IMAGE)" > /dev/null 2>&1; then
    generation=$there place=container place_why="that is set up already"
    generation_why=$place_why
    return
  fi
  return 1
}

choose_packages() { # choose_packages COMMAND [ARGUMENT...]; which of what is wanted and what .venv has
  if [ ! -e "$ready_stamp" ] || [ "$(packages_there)" = "$generation" ]; then return; fi
  if takes_any_packages "$@"; then
    # A plan for the GPUs here wants their packages, by which a training picks what it does; but not under a command.
    if [ "$generation" = cpu ] || is_about_what_is_there "$1"; then
      place_why="that is set up already"
    elif venv_is_in_use; then
      place_why="a command is running from it, so it is not made anew for $generation"
    else
      return 0
    fi
    generation=$(packages_there)
  elif [ "$generation" = cpu ] && [ "${GPU:-auto}" = auto ]; then
    # On a disk that machines share the other one's lock may not be seen here.
    refuse ".venv has the packages of docker/$(packages_there), for GPUs, and here: $gpu_note. It is not made anew" \
      "for cpu by itself, since a command on another machine may be running from it." \
      "To make it anew for a CPU: WHERE=local GPU=cpu make $1 ..." \
      "To use it as it is, to submit a job for instance: .venv/bin/tunebook$(printf ' %q' "$@")"
  fi
}

set_up_venv() { # set_up_venv COMMAND [ARGUMENT...]
  # Not a part of the make that called this: its options, such as -n or -j, are not meant for setting up.
  local words=(env -u MAKEFLAGS -u MAKELEVEL -u MFLAGS make --silent PYTHON="${PYTHON:-python3}")
  words+=(VENV_GENERATION="$generation" "$ready_stamp")
  if [ "$(packages_there)" != "$generation" ]; then words+=(--assume-new=pyproject.toml); fi # set up for other GPUs
  if [ -e "$ready_stamp" ] && takes_any_packages "$@" && ! "${words[@]}" --question > /dev/null 2>&1 \
    && venv_is_in_use; then
    say "the packages are older than the locks; they stay as they are while a command is running from .venv"
    return
  fi
  "${words[@]}" 1>&2
}

hold_venv() { # until the command has ended, which inherits it
  # Twice: another's look whether it is in use takes a moment.
  if ! lock_venv -s && sleep 0.5 && ! lock_venv -s; then
    refuse "another command is setting up .venv." "Wait until it is done, then type the same again."
  fi
  # Another command may have come between setting up and this.
  if [ -e "$ready_stamp" ] && [ ! -e .venv/.unfinished ] && [ "$(packages_there)" = "$generation" ]; then return; fi
  refuse "another command has just changed .venv, or removed it." "Type the same again."
}

run_in_venv() { # run_in_venv COMMAND [ARGUMENT...]
  choose_packages "$@"
  say "in .venv with the packages of docker/$generation: $place_why"
  set_up_venv "$@"
  hold_venv
  if [ "$gpu_count" != all ]; then
    CUDA_VISIBLE_DEVICES=$(seq -s , 0 $((gpu_count - 1)))
    export CUDA_VISIBLE_DEVICES
  fi
  exec .venv/bin/tunebook "$@"
}
