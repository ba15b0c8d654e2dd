# shellcheck shell=bash
# Which image serves which GPU, read from docker/<generation>/generation.env. choose_generation sets generation and, for
# people, generation_why.

declare -A capabilities_of=() floor_of=() torch_of=() cuda_of=() attention_of=() disk_gib_of=()
# Generations that another one's image serves; tests hold this against src/tunebook/facts/generations.py.
declare -A served_by=([turing]=volta [ada]=ampere)
# The image for drivers too old for CUDA 13: its torch has code for every generation.
older_driver_image=volta

generation="" generation_why=""

load_generations() {
  local file
  for file in docker/*/generation.env; do load_generation "$file"; done
}

load_generation() { # load_generation FILE
  # shellcheck disable=SC2034  # the file sets more than is used here
  local GENERATION TORCH CUDA MIN_DRIVER COMPUTE_CAPABILITIES TORCH_CUDA_ARCH_LIST ATTENTION FLASH_ATTN_CUDA_ARCHS
  local IMAGE_GIB
  # shellcheck source=/dev/null
  . "$1"
  capabilities_of[$GENERATION]=$COMPUTE_CAPABILITIES floor_of[$GENERATION]=$MIN_DRIVER
  torch_of[$GENERATION]=$TORCH cuda_of[$GENERATION]=$CUDA
  attention_of[$GENERATION]=$ATTENTION disk_gib_of[$GENERATION]=$IMAGE_GIB
}

generation_names() { # sorted, on one line
  printf '%s\n' "${!floor_of[@]}" | LC_ALL=C sort | paste -sd ' '
}

choose_generation() {
  if [ -n "$generation" ]; then return; fi
  require_gpu_number
  case ${GPU:-auto} in
    auto) choose_for_gpus ;;
    *) choose_named "$GPU" ;;
  esac
}

choose_named() { # choose_named NAME
  local asked=${1,,} name known close
  name=${served_by[$asked]:-$asked}
  if [ -z "${floor_of[$name]+known}" ]; then
    known="auto $(generation_names) ${!served_by[*]}"
    # The comments of generation.env name models: GPU=h100 is told that it is hopper.
    close=$(grep -liwF -- "$asked" docker/*/generation.env | head -n 1 | cut -d / -f 2) || true
    # shellcheck disable=SC2086  # words
    close=${close:-$(nearest "$asked" $known)}
    refuse "GPU=$1 is unknown.${close:+ Did you mean GPU=$close?}" "Choose one of: $known"
  fi
  generation=$name generation_why="GPU=$1"
  if [ "$generation" = cpu ]; then
    if [ "${GPUS:-all}" != all ]; then
      refuse "GPUS=$GPUS counts GPUs, and GPU=cpu uses none." \
        "For several ranks on the CPU: ARGS=hardware.gpus_per_node=$GPUS"
    fi
  else
    find_gpus # not judged yet: a build may be for GPUs that are elsewhere
  fi
}

choose_for_gpus() {
  find_gpus
  case $gpu_state in
    unclear)
      refuse "$gpu_note" "${gpu_advice[@]}" \
        "Or say what to use: GPU=cpu, or the generation of the GPUs: GPU=hopper and so on" ;;
    none)
      if [ "${GPUS:-all}" != all ]; then refuse "GPUS=$GPUS, but there is $gpu_note."; fi
      generation=cpu generation_why=$gpu_note ;;
    found)
      generation=$(one_generation)
      generation_why=$(describe_gpus)
      fit_driver ;;
  esac
}

rank() { # rank CAPABILITY; prints a number that grows with it: 8.6 is 806
  printf '%d' $((10#${1%.*} * 100 + 10#${1#*.}))
}

generation_of() { # generation_of CAPABILITY; one that no file names counts as the newest that is not newer than it
  local wanted name capability found="" newest=-1 order
  wanted=$(rank "$1")
  for name in "${!capabilities_of[@]}"; do
    for capability in ${capabilities_of[$name]}; do
      order=$(rank "$capability")
      if ((order <= wanted && order > newest)); then
        newest=$order
        found=$name
      fi
    done
  done
  printf '%s' "$found"
}

one_generation() { # prints the generation of all GPUs here
  local place name
  local -A ids_of=() model_of=()
  for place in "${!gpu_names[@]}"; do
    name=$(generation_of "${gpu_capabilities[place]}")
    if [ -z "$name" ]; then
      refuse "${gpu_names[place]} (compute capability ${gpu_capabilities[place]}) is older than any that torch has" \
        "code for. Without it: GPU=cpu"
    fi
    ids_of[$name]+=",${gpu_ids[place]}" model_of[$name]=${gpu_names[place]}
  done
  if [ ${#ids_of[@]} -gt 1 ]; then
    local listed=() # by id, because CUDA may count in another order than nvidia-smi
    for name in "${!ids_of[@]}"; do
      listed+=("    CUDA_VISIBLE_DEVICES=${ids_of[$name]#,}    # ${model_of[$name]}: $name")
    done
    refuse "The GPUs here are of different generations, and one run uses one image. Type those of one before make:" \
      "${listed[@]}"
  fi
  printf '%s' "${!ids_of[@]}"
}

driver_reaches() { # driver_reaches GENERATION
  local major=${driver%%.*}
  [[ ! $major =~ ^[0-9]+$ ]] || [ -z "${floor_of[$1]}" ] || [ "$major" -ge "${floor_of[$1]}" ]
}

fit_driver() { # where the driver is too old for the GPUs' own image, take the one built with an older CUDA
  if driver_reaches "$generation"; then return; fi
  if ! driver_reaches "$older_driver_image"; then
    refuse "The NVIDIA driver $driver is too old: the $generation image needs ${floor_of[$generation]} or newer," \
      "and the oldest that any image runs on is ${floor_of[$older_driver_image]}. Update it; until then: GPU=cpu"
  fi
  local own=$generation
  generation=$older_driver_image
  say "driver $driver is older than ${floor_of[$own]}, which the $own image (CUDA ${cuda_of[$own]}) needs, so it is" \
    "the $generation image: torch ${torch_of[$generation]} with CUDA ${cuda_of[$generation]}$(lost_attention "$own")"
}

lost_attention() { # lost_attention GENERATION
  if [ "${attention_of[$1]}" != "${attention_of[$generation]}" ]; then
    printf ', and attention by sdpa instead of %s' "${attention_of[$1]}"
  fi
}

serves() { # serves GENERATION CAPABILITY
  local capability
  for capability in ${capabilities_of[$1]}; do
    if [ "$capability" = "$2" ]; then return; fi
  done
  [ "$(generation_of "$2")" = "$1" ] || { [ "$1" = "$older_driver_image" ] && [ -n "$(generation_of "$2")" ]; }
}

require_fitting_gpus() { # before a run; a build may be for another machine
  if [ "$generation" = cpu ]; then return; fi
  if [ "$gpu_state" = unclear ]; then refuse "$gpu_note" "${gpu_advice[@]}" "Without a GPU: GPU=cpu"; fi
  if [ "$gpu_state" != found ]; then
    refuse "GPU=$GPU needs such GPUs, and there is $gpu_note." \
      "Its image can be built here (make image GPU=$GPU), but to run something: GPU=cpu, or leave GPU out"
  fi
  local place
  for place in "${!gpu_names[@]}"; do
    if ! serves "$generation" "${gpu_capabilities[place]}"; then refuse_wrong_image "$place"; fi
  done
  if ! driver_reaches "$generation"; then
    refuse "The NVIDIA driver $driver is too old for GPU=$GPU, which needs ${floor_of[$generation]} or newer." \
      "Update the driver, or leave GPU out: the newest image that it can run is picked by itself."
  fi
}

refuse_wrong_image() { # refuse_wrong_image PLACE
  local own
  own=$(generation_of "${gpu_capabilities[$1]}")
  refuse "GPU=$GPU is for compute capability ${capabilities_of[$generation]// /, }, but ${gpu_names[$1]} has" \
    "${gpu_capabilities[$1]}. Type GPU=${own:-cpu}, or leave GPU out"
}
