# shellcheck shell=bash
# What this machine has: its GPUs, the image generation that serves them, and Docker.

# find_gpus sets gpu_state: `found`; `none`; or `unclear` where nvidia-smi fails, so that nobody trains on the CPU of a
# GPU machine unnoticed. gpu_note says why it is not `found`.
gpu_state="" gpu_note="" driver=""
gpus=()       # a GPU is a line of nvidia-smi's: 0, GPU-5f..., 9.0, 580.95.05, NVIDIA H200
gpu_count=all # how many containers get: all, or the first N
nvidia_smi_timeout_s=${TUNEBOOK_NVIDIA_SMI_TIMEOUT_S:-40} # 8 GPUs without persistence mode take 10 s and more
unclear_advice="See nvidia-smi itself; a restart may help. To leave out a GPU: CUDA_VISIBLE_DEVICES=<the others>"

no_gpu() { gpu_state=none gpu_note="no GPU here${1:+ ($1)}"; }

find_gpus() {
  if [ -n "$gpu_state" ]; then return; fi
  if ! command -v nvidia-smi > /dev/null; then
    no_gpu "there is no nvidia-smi"
    return
  fi
  # A GPU that fell off the bus can leave nvidia-smi in a state in which not even SIGKILL ends it. So nothing waits for
  # it: `read` stops at its own time limit, or at the end of the text.
  local text="" code line index capability name
  IFS= read -r -d '' -t "$nvidia_smi_timeout_s" text < <(
    timeout "$nvidia_smi_timeout_s" nvidia-smi --query-gpu=index,uuid,compute_cap,driver_version,name \
      --format=csv,noheader 2>&1
    printf '\nexit %s' "$?"
  ) || true
  code=${text##*$'\nexit '} text=${text%$'\nexit '*}
  if [ "${code:-124}" != 0 ]; then
    explain_nvidia_smi "${code:-124}" "${text//$'\n'/ }"
    return
  fi
  mapfile -t gpus < <(grep . <<< "$text")
  if [ ${#gpus[@]} = 0 ]; then no_gpu "nvidia-smi lists none"; else gpu_state=found; fi
  driver=$(head -n 1 <<< "$text" | cut -d ' ' -f 4 | tr -d ,)
  keep_visible
  keep_first
  for line in "${gpus[@]}"; do
    IFS=, read -r index _ capability _ name <<< "${line//, /,}"
    if ! [[ $capability =~ ^[0-9]+\.[0-9]+$ ]]; then
      gpu_state=unclear gpu_note="nvidia-smi lists GPU $index, but the GPU does not answer: $name, $capability"
    fi
  done
}

explain_nvidia_smi() { # explain_nvidia_smi EXIT_CODE OUTPUT
  local output=$2
  case $output in
    # The second: a machine without a GPU whose driver package is shared with machines that have one.
    *"No devices were found"* | *"couldn't communicate with the NVIDIA driver"*) no_gpu "nvidia-smi: $output" ;;
    *)
      if [ "$1" = 124 ] || [ "$1" = 137 ]; then output="no answer within $nvidia_smi_timeout_s s"; fi
      gpu_state=unclear gpu_note="nvidia-smi fails, so it is not known which GPUs there are: $output" ;;
  esac
}

keep_visible() { # only the GPUs of CUDA_VISIBLE_DEVICES, in its order
  # Its MIG slices are not in this listing: then any GPU may be meant.
  if [[ -z ${CUDA_VISIBLE_DEVICES+set} || $CUDA_VISIBLE_DEVICES == *MIG-* || $gpu_state != found ]]; then return; fi
  local word line kept=() found
  for word in ${CUDA_VISIBLE_DEVICES//,/ }; do
    found=""
    for line in "${gpus[@]}"; do
      if [[ -z $found && ($line == "$word, "* || ($word == GPU-* && ${line#*, } == "$word"*)) ]]; then found=$line; fi
    done
    if [ -z "$found" ]; then break; fi # CUDA ignores the rest after a word that names no GPU
    kept+=("$found")
  done
  gpus=("${kept[@]}")
  if [ ${#gpus[@]} = 0 ]; then no_gpu "CUDA_VISIBLE_DEVICES='$CUDA_VISIBLE_DEVICES' leaves none"; fi
}

keep_first() { # only the first GPUS
  if [ "$gpu_state" != found ] || [ "${GPUS:-all}" = all ]; then return; fi
  local there=${#gpus[@]}
  if [ "$GPUS" -gt "$there" ]; then
    refuse "GPUS=$GPUS, but there are $there here: $(describe_gpus)." "Type GPUS=$there or fewer, or leave it out."
  fi
  if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
    refuse "GPUS=$GPUS and CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES both say which GPUs to use." \
      "Leave GPUS out and name $GPUS of them: CUDA_VISIBLE_DEVICES=0,1,..."
  fi
  gpu_count=$GPUS gpus=("${gpus[@]:0:GPUS}")
}

describe_gpus() { # prints such as: 8 x NVIDIA H200, driver 580.95.05
  local models
  models=$(printf '%s\n' "${gpus[@]#*, *, *, *, }" | LC_ALL=C sort | uniq -c \
    | sed 's/^ *\([0-9]*\) /, \1 x /' | tr -d '\n')
  printf '%s, driver %s' "${models#, }" "$driver"
}

# --- the generation: choose_generation sets generation, the name of a folder of docker/, and for people generation_why

generation="" generation_why=""

fact() { # fact GENERATION KEY; prints a value of its generation.env
  # shellcheck source=/dev/null
  (. "docker/$1/generation.env" && printf '%s' "${!2}")
}

generation_names() { printf '%s\n' docker/*/generation.env | cut -d / -f 2; }

choose_generation() {
  if [ -n "$generation" ]; then return; fi
  if ! [[ ${GPUS:-all} =~ ^(all|[1-9][0-9]{0,3})$ ]]; then
    refuse "GPUS=$GPUS is no number of GPUs." "Type a number from 1 on, or leave it out for all; without a GPU: GPU=cpu"
  fi
  if [ "${GPU:-auto}" = auto ]; then choose_for_gpus; else choose_named "$GPU"; fi
}

choose_named() { # choose_named NAME; of an image, or of a generation that it serves; a GPU's name gets a suggestion
  local name served models known="auto" asked=${1,,} close=""
  for name in $(generation_names); do
    served=$(fact "$name" SERVES) models=$(fact "$name" GPU_MODELS)
    known+=" $served"
    if [[ " $served " == *" $asked "* ]]; then generation=$name; fi
    if [[ ", ${models,,}," == *", $asked,"* ]]; then close=$name; fi
  done
  if [ -z "$generation" ]; then
    refuse "GPU=$1 is unknown.${close:+ Did you mean GPU=$close?}" "Choose one of: $known"
  fi
  generation_why="GPU=$1"
  if [ "$generation" != cpu ]; then
    find_gpus # require_fitting_gpus judges them: an image may be built for GPUs of another machine
  elif [ "${GPUS:-all}" != all ]; then
    refuse "GPUS=$GPUS counts GPUs, and GPU=cpu uses none." \
      "For several ranks on the CPU: ARGS=hardware.gpus_per_node=$GPUS"
  fi
}

choose_for_gpus() {
  find_gpus
  case $gpu_state in
    unclear)
      refuse "$gpu_note" "$unclear_advice" \
        "Or say what to use: GPU=cpu, or the generation of the GPUs: GPU=hopper and so on" ;;
    none)
      if [ "${GPUS:-all}" != all ]; then refuse "GPUS=$GPUS, but there is $gpu_note."; fi
      generation=cpu generation_why=$gpu_note ;;
    found)
      generation=$(common_generation)
      generation_why=$(describe_gpus)
      if ! driver_serves "$generation"; then choose_for_old_driver; fi ;;
  esac
}

generation_of() { # generation_of CAPABILITY; one that no file names counts as the newest known that is older
  local name capability
  for name in $(generation_names); do
    for capability in $(fact "$name" COMPUTE_CAPABILITIES); do echo "$capability $name"; done
  done | awk -v wanted="$1" 'function rank(text, part) { split(text, part, "."); return part[1] * 100 + part[2] }
    rank($1) <= rank(wanted) && rank($1) > newest { newest = rank($1); found = $2 }
    END { printf "%s", found }'
}

common_generation() { # prints the generation of all GPUs here
  local line id capability name own
  local -A ids=() models=()
  for line in "${gpus[@]}"; do
    IFS=, read -r _ id capability _ name <<< "${line//, /,}"
    own=$(generation_of "$capability")
    if [ -z "$own" ]; then
      refuse "$name (compute capability $capability) is older than any that torch has code for. Without it: GPU=cpu"
    fi
    ids[$own]+=",$id" models[$own]=$name
  done
  if [ ${#ids[@]} -gt 1 ]; then
    local listed=() # by id, because CUDA may count in another order than nvidia-smi
    for own in "${!ids[@]}"; do
      listed+=("    CUDA_VISIBLE_DEVICES=${ids[$own]#,}    # ${models[$own]}: $own")
    done
    refuse "The GPUs here are of different generations, and one run uses one image. Type those of one before make:" \
      "${listed[@]}"
  fi
  printf '%s' "${!ids[@]}"
}

driver_serves() { # driver_serves GENERATION; a driver whose version cannot be read counts as new enough
  local oldest
  oldest=$(fact "$1" MIN_DRIVER)
  [[ ! ${driver%%.*} =~ ^[0-9]+$ ]] || [ "${driver%%.*}" -ge "${oldest:-0}" ]
}

choose_for_old_driver() { # the image that was built with an older CUDA
  local own=$generation older
  older=$(fact "$own" OLDER_DRIVER_IMAGE)
  if ! driver_serves "${older:-$own}"; then
    refuse "The NVIDIA driver $driver is too old: the $own image needs $(fact "$own" MIN_DRIVER) or newer, and the" \
      "oldest driver of any image is $(fact "${older:-$own}" MIN_DRIVER). Update it; until then: GPU=cpu"
  fi
  generation=$older
  say "driver $driver is older than $(fact "$own" MIN_DRIVER), which the $own image (CUDA $(fact "$own" CUDA)) needs," \
    "so it is the $older image: torch $(fact "$older" TORCH) with CUDA $(fact "$older" CUDA)," \
    "and attention by sdpa instead of $(fact "$own" ATTENTION)"
}

require_fitting_gpus() { # before a run
  if [ "$generation" = cpu ]; then return; fi
  if [ "$gpu_state" = unclear ]; then refuse "$gpu_note" "$unclear_advice" "Without a GPU: GPU=cpu"; fi
  if [ "$gpu_state" != found ]; then
    refuse "GPU=$GPU needs such GPUs, and there is $gpu_note." \
      "Its image can be built here (make image GPU=$GPU), but to run something: GPU=cpu, or leave GPU out"
  fi
  local line capability name own served
  served=$(fact "$generation" COMPUTE_CAPABILITIES)
  for line in "${gpus[@]}"; do
    IFS=, read -r _ _ capability _ name <<< "${line//, /,}"
    own=$(generation_of "$capability")
    if [ -z "$own" ] || ! [[ $generation == "$own" || $generation == "$(fact "$own" OLDER_DRIVER_IMAGE)" ]]; then
      refuse "GPU=$GPU is for compute capability ${served// /, }, but $name has $capability." \
        "Type GPU=${own:-cpu}, or leave GPU out"
    fi
  done
  if ! driver_serves "$generation"; then
    refuse "The NVIDIA driver $driver is too old for GPU=$GPU, which needs $(fact "$generation" MIN_DRIVER) or newer." \
      "Update the driver, or leave GPU out: the newest image that it can run is picked automatically."
  fi
}

# --- Docker: look_at_engine sets engine_problem (empty: it can be used)

engine_problem=unknown engine_info="" engine_root=""
engine_timeout_s=${TUNEBOOK_ENGINE_TIMEOUT_S:-30}
oldest_compose=2.24.4 # the first with `!override` in docker/cdi/compose.yaml; tried with 2.26.1

look_at_engine() {
  if [ "$engine_problem" != unknown ]; then return; fi
  engine_problem=""
  local text version
  if ! command -v docker > /dev/null; then
    engine_problem="Docker is not installed: there is no command docker."
    return
  fi
  # The exit code says nothing: with --format it is 0 where no daemon answers.
  text=$(timeout "$engine_timeout_s" docker info --format '{{json .}}' 2>&1) || true
  if ! [[ $text =~ \"DockerRootDir\":\"([^\"]+)\" ]]; then
    text=${text##*\"ServerErrors\":}
    engine_problem="docker info fails: ${text:-no answer within $engine_timeout_s s}"
    return
  fi
  engine_info=$text engine_root=${BASH_REMATCH[1]}
  version=$(docker compose version --short 2> /dev/null) || version=none
  if [ "$(printf '%s\n' "$oldest_compose" "${version#v}" | sort -V | head -n 1)" != "$oldest_compose" ] \
    || [ "$version" = none ]; then
    engine_problem="Docker's plugin Compose $oldest_compose or newer is needed, and here it is: $version."
  fi
}

require_engine() {
  look_at_engine
  if [ -n "$engine_problem" ]; then
    refuse "$engine_problem" "Install Docker Engine with its Compose plugin: https://docs.docker.com/engine/install/" \
      "Without Docker, in .venv: WHERE=local"
  fi
}

require_buildx() { # only a build needs it
  if docker buildx version > /dev/null 2>&1; then return; fi
  refuse "Docker is here, but buildx, the plugin that builds images, is not." \
    "Install it: https://docs.docker.com/engine/install/"
}

# --- GPUs in containers: find_gpu_access sets gpu_access to runtime, cdi or nothing, after look_at_engine

gpu_access=""

find_gpu_access() { # the runtime first: it needs no file that is out of date after a driver update
  if [[ $engine_info == *'"nvidia":{'* ]] \
    || command -v nvidia-container-runtime-hook nvidia-container-toolkit > /dev/null; then # a hook is not shown
    gpu_access=runtime
  elif has_cdi_gpus; then
    gpu_access=cdi
  else
    gpu_access=""
  fi
}

has_cdi_gpus() { # Docker 28 lists CDI devices; Docker 25 to 27 names the folders of their files if its feature is on
  if [[ $engine_info == *'"nvidia.com/gpu='* ]]; then return; fi
  local folders folder
  if ! [[ $engine_info =~ \"CDISpecDirs\":\[([^]]*)\] ]]; then return 1; fi
  IFS=, read -r -a folders <<< "${BASH_REMATCH[1]//\"/}"
  for folder in "${folders[@]}"; do
    if grep -qsE "kind\"?: *[\"']?nvidia\.com/gpu" "$folder"/*.yaml "$folder"/*.json; then return; fi
  done
  return 1
}

describe_gpu_access() {
  case $gpu_access in
    runtime) echo "by NVIDIA's runtime" ;;
    cdi) echo "by CDI, docker/cdi/compose.yaml" ;;
    *) echo "not yet: Docker has neither NVIDIA's runtime nor a CDI file of GPUs (make train says what to type)" ;;
  esac
}

require_gpu_access() {
  if [ "$generation" = cpu ]; then return; fi
  find_gpu_access
  if [ -z "$gpu_access" ]; then
    refuse "nvidia-smi finds $(describe_gpus), but Docker cannot give GPUs to containers: it has no NVIDIA runtime, and" \
      "no CDI file of GPUs." "${toolkit_advice[@]}"
  fi
}
