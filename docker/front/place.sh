# shellcheck shell=bash
# Where a command runs, in a container or in .venv, and running it in .venv.

place="" place_why=""
ready_stamp=.venv/.ready-run # the Makefile's

uses_gpus() { # uses_gpus COMMAND
  case $1 in train | eval | sweep | chat | doctor) ;; *) return 1 ;; esac
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
  case $1 in
    list | explain | report | export | data) if take_what_is_there; then return; fi ;;
  esac
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
    generation=$(cat .venv/.generation 2> /dev/null || echo cpu)
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

run_in_venv() { # run_in_venv COMMAND [ARGUMENT...]
  say "in .venv with the packages of docker/$generation: $place_why"
  if [ "$(cat .venv/.generation 2> /dev/null || echo cpu)" != "$generation" ]; then
    rm -f .venv/.ready-run .venv/.ready-dev # set up for other GPUs
  fi
  # Not a part of the make that called this: its options, such as -n or -j, are not meant for setting up.
  env -u MAKEFLAGS -u MAKELEVEL -u MFLAGS make --silent PYTHON="${PYTHON:-python3}" VENV_GENERATION="$generation" \
    "$ready_stamp" 1>&2
  if [ "$gpu_count" != all ]; then
    CUDA_VISIBLE_DEVICES=$(seq -s , 0 $((gpu_count - 1)))
    export CUDA_VISIBLE_DEVICES
  fi
  exec .venv/bin/tunebook "$@"
}
