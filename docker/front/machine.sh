# shellcheck shell=bash
# What this machine has: its GPUs, the image generation that serves them, and Docker.

# --- find_gpus sets gpus, the lines of nvidia-smi for the GPUs to use, and no_gpu, why there is none

gpus=() # such as: 0,GPU-5f...,9.0,580.95.05,NVIDIA H200
no_gpu="" driver=""

find_gpus() {
  if [ ${#gpus[@]} -gt 0 ] || [ -n "$no_gpu" ]; then return; fi
  if ! command -v nvidia-smi > /dev/null; then
    no_gpu="there is no nvidia-smi"
    return
  fi
  local text line index id capability
  if ! text=$(timeout --foreground 60 nvidia-smi --query-gpu=index,uuid,compute_cap,driver_version,name \
    --format=csv,noheader 2>&1); then
    case $text in
      # The second: a machine without a GPU whose driver package is shared with machines that have one.
      *"No devices were found"* | *"couldn't communicate with the NVIDIA driver"*) no_gpu="nvidia-smi: $text" ;;
      # Nobody is to train on the CPU of a GPU machine unnoticed.
      *) refuse "nvidia-smi fails: ${text:-no answer within 60 s}" "A restart may help. Without a GPU: GPU=cpu" ;;
    esac
    return
  fi
  while IFS= read -r line; do
    IFS=, read -r index id capability driver _ <<< "$line"
    if is_visible "$index" "$id"; then
      if ! [[ $capability =~ ^[0-9]+\.[0-9]$ ]]; then
        refuse "GPU $index does not answer nvidia-smi: $line" "To leave it out: CUDA_VISIBLE_DEVICES=<the others>"
      fi
      gpus+=("$line")
    fi
  done < <(grep . <<< "${text//, /,}")
  if [ ${#gpus[@]} = 0 ]; then
    no_gpu="nvidia-smi lists none${CUDA_VISIBLE_DEVICES+ of CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES}"
    if [ -n "$text" ] && [ -n "${CUDA_VISIBLE_DEVICES-}" ]; then refuse "$no_gpu:" "$text"; fi
  elif [ -n "$GPUS" ] && [ "$GPUS" != ${#gpus[@]} ]; then
    refuse "GPUS=$GPUS, but there are ${#gpus[@]} here: $(describe_gpus)."
  fi
}

is_visible() { # is_visible INDEX ID; MIG slices are not in nvidia-smi's list, so they may be of any GPU
  local visible=${CUDA_VISIBLE_DEVICES-$1}
  visible=,${visible// /},
  [[ $visible == *",$1,"* || $visible == *",$2,"* || $visible == *MIG-* ]]
}

take_first_gpus() { # takes GPUS=N as the first N in CUDA_VISIBLE_DEVICES, which also reaches containers
  if [ "${GPUS:-all}" = all ]; then
    GPUS=""
    return
  fi
  if ! [[ $GPUS =~ ^[1-9][0-9]*$ ]]; then refuse "GPUS=$GPUS is no number of GPUs."; fi
  if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
    refuse "GPUS=$GPUS and CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES both name GPUs." "Leave GPUS out."
  fi
  CUDA_VISIBLE_DEVICES=$(seq -s , 0 $((GPUS - 1)))
  export CUDA_VISIBLE_DEVICES
}

describe_gpus() { # prints such as: 8 x NVIDIA H200, driver 580.95.05
  printf '%s\n' "${gpus[@]}" | cut -d , -f 5 | sort | uniq -c | sed 's/^ *\([0-9]*\) /\1 x /; s/$/, /' | tr -d '\n'
  printf 'driver %s' "$driver"
}

# --- choose_generation sets generation, the name of a folder of docker/, and for people generation_why

generation="" generation_why=""

fact() { # fact GENERATION KEY; prints a value of its generation.env
  # shellcheck source=/dev/null
  (. "docker/$1/generation.env" && printf '%s' "${!2}")
}

generation_names() { printf '%s\n' docker/*/generation.env | cut -d / -f 2; }

choose_generation() {
  local name known="auto"
  if [ -n "$generation" ]; then return; fi
  take_first_gpus
  if [ "${GPU:-auto}" = auto ]; then
    find_gpus
    choose_for_gpus
  else
    for name in $(generation_names); do
      known+=" $(fact "$name" SERVES)"
      if [[ " $(fact "$name" SERVES) " == *" $GPU "* ]]; then generation=$name generation_why="GPU=$GPU"; fi
    done
    if [ -z "$generation" ]; then refuse "GPU=$GPU is unknown." "Choose one of: $known"; fi
  fi
  if [ "$generation" = cpu ] && [ -n "$GPUS" ]; then
    refuse "GPUS=$GPUS, but no GPU is used: $generation_why." \
      "For several ranks on the CPU: ARGS=hardware.gpus_per_node=$GPUS"
  fi
}

choose_for_gpus() {
  if [ ${#gpus[@]} = 0 ]; then
    generation=cpu generation_why="no GPU here ($no_gpu)"
    return
  fi
  local line capability own older
  for line in "${gpus[@]}"; do
    IFS=, read -r _ _ capability _ <<< "$line"
    own=$(generation_of "$capability")
    if [ -z "$own" ]; then
      refuse "This GPU is older than any that torch has code for: $line" "Without it: GPU=cpu"
    elif [ "${generation:-$own}" != "$own" ]; then
      refuse "The GPUs here are of different generations, and one run uses one image." \
        "Name those of one before make, as in CUDA_VISIBLE_DEVICES=0,1" "${gpus[@]}"
    fi
    generation=$own
  done
  generation_why=$(describe_gpus)
  if serves_driver "$own"; then return; fi
  older=$(fact "$own" OLDER_DRIVER_IMAGE) # it was built with an older CUDA
  if ! serves_driver "${older:-$own}"; then
    refuse "The NVIDIA driver $driver is too old: the ${older:-$own} image needs $(fact "${older:-$own}" MIN_DRIVER)." \
      "Update it; until then: GPU=cpu"
  fi
  generation=$older
  generation_why+=", which is too old for the $own image (it needs $(fact "$own" MIN_DRIVER))"
}

generation_of() { # generation_of CAPABILITY; one that no file names counts as the newest known that is older
  local name known found="" newest=0
  for name in $(generation_names); do
    for known in $(fact "$name" COMPUTE_CAPABILITIES); do
      if ((${known/./} <= ${1/./} && ${known/./} > newest)); then newest=${known/./} found=$name; fi
    done
  done
  printf '%s' "$found"
}

serves_driver() { # serves_driver GENERATION; whether its image runs on the driver here
  [ "${driver%%.*}" -ge "$(fact "$1" MIN_DRIVER)" ]
}

# --- look_at_engine sets engine_info, and engine_problem where Docker cannot be used

engine_info="" engine_problem=""
oldest_compose=2.24.4 # the first with `!override` in docker/cdi/compose.yaml; tried with 2.26.1

look_at_engine() {
  local version
  if [ -n "$engine_info$engine_problem" ]; then return; fi
  if ! command -v docker > /dev/null; then
    engine_problem="There is no command docker."
    return
  fi
  if ! engine_problem=$(docker version 2>&1 > /dev/null); then return; fi
  engine_problem=""
  engine_info=$(docker info --format '{{json .}}')
  version=$(docker compose version --short 2> /dev/null) || version=0
  if ! printf '%s\n' "$oldest_compose" "${version#v}" | sort -VC; then
    engine_problem="Docker's plugin Compose $oldest_compose or newer is needed, and here it is ${version/#0/missing}."
  fi
}

require_engine() {
  look_at_engine
  if [ -n "$engine_problem" ]; then
    refuse "$engine_problem" "To install Docker: https://docs.docker.com/engine/install/. Without it, in .venv: WHERE=local"
  fi
}

gpu_access() { # prints how Docker gives GPUs to containers: runtime, cdi or nothing
  local folders
  # The runtime first: a CDI file can be out of date after a driver update.
  if [[ $engine_info == *'"nvidia":{'* ]] || command -v nvidia-container-runtime-hook > /dev/null; then
    echo runtime
  elif [[ $engine_info =~ \"CDISpecDirs\":\[([^]]+)\] ]]; then
    IFS=, read -r -a folders <<< "${BASH_REMATCH[1]//\"/}"
    if grep -qsr --include='*.json' --include='*.yaml' nvidia.com/gpu "${folders[@]}"; then echo cdi; fi
  fi
}
