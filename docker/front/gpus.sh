# shellcheck shell=bash
# Which GPUs this machine has, asked of nvidia-smi, of those that CUDA_VISIBLE_DEVICES and GPUS=N leave.
# find_gpus sets gpu_state: `found`; `none`; or `unclear` where nvidia-smi is here but does not answer as it should, so
# that nobody trains on the CPU of a GPU machine without noticing. gpu_note says why it is not `found`, gpu_advice what
# to do about it.

gpu_state="" gpu_note="" driver=""
gpu_advice=() gpu_names=() gpu_capabilities=() gpu_ids=()
gpu_count=all # what containers are given: all, or the first N

nvidia_smi_timeout_s=${TUNEBOOK_NVIDIA_SMI_TIMEOUT_S:-40} # 8 GPUs without persistence mode take 10 s and more

find_gpus() {
  if [ -n "$gpu_state" ]; then return; fi
  if ! command -v nvidia-smi > /dev/null; then
    gpu_state=none gpu_note="no GPU here (there is no nvidia-smi)"
    return
  fi
  local answer="" code=""
  ask_nvidia_smi
  if [ "$code" = 0 ]; then read_gpus "$answer"; else read_failure "$answer"; fi
  if [ "$gpu_state" != found ]; then return; fi
  keep_visible
  keep_first
}

ask_nvidia_smi() { # sets the caller's answer and code
  # A GPU that fell off the bus can leave nvidia-smi in a state in which not even SIGKILL ends it, so it is not waited
  # for: `read` gives up by itself.
  local text="" marker=$'\nexit '
  IFS= read -r -d '' -t "$nvidia_smi_timeout_s" text < <(
    timeout "$nvidia_smi_timeout_s" nvidia-smi --query-gpu=index,uuid,compute_cap,driver_version,name \
      --format=csv,noheader 2>&1
    printf '%s%s' "$marker" "$?"
  ) || true # it ends with the end of the text, or in time
  code=${text##*"$marker"}
  answer=${text%"$marker"*}
  if [ -z "$text" ]; then code=124; fi
}

read_gpus() { # read_gpus LINES, such as: 0, GPU-5f..., 9.0, 580.95.05, NVIDIA H200
  local index id capability version name
  while IFS=, read -r index id capability version name; do
    if [ -z "$name" ]; then continue; fi
    if ! [[ $capability =~ ^\ [0-9]+\.[0-9]+$ ]]; then
      gpu_is_unclear "nvidia-smi lists GPU $index, but the GPU does not answer:$name,$capability" \
        "Leave it out: CUDA_VISIBLE_DEVICES=<the others> in front of make. A restart of the machine may bring it back."
      return
    fi
    gpu_names+=("${name# }") gpu_capabilities+=("${capability# }") gpu_ids+=("${id# }")
    driver=${version# }
  done <<< "$1"
  if [ ${#gpu_names[@]} -gt 0 ]; then
    gpu_state=found
  else
    gpu_state=none gpu_note="no GPU here (nvidia-smi lists none)"
  fi
}

gpu_is_unclear() { # gpu_is_unclear NOTE ADVICE...
  gpu_state=unclear gpu_note=$1
  gpu_advice=("${@:2}")
}

read_failure() { # read_failure WHAT_NVIDIA_SMI_SAID; the caller's code is its exit code
  local said=${1//$'\n'/ }
  case $said in
    *"No devices were found"*) gpu_state=none gpu_note="no GPU here (nvidia-smi: No devices were found)" ;;
    # Machines without a GPU whose users share a driver package with those that have one say this.
    *"couldn't communicate with the NVIDIA driver"*)
      gpu_state=none gpu_note="no GPU here that works (nvidia-smi couldn't communicate with the NVIDIA driver)" ;;
    *"not a valid field to query"*)
      gpu_is_unclear "The NVIDIA driver is older than any image can use: its nvidia-smi does not know compute_cap." \
        "Update it: 580 or newer serves every image, 525 the volta image." ;;
    *"Driver/library version mismatch"*)
      gpu_is_unclear "The NVIDIA driver was updated, and the old one is still loaded (nvidia-smi: $said)." \
        "Restart the machine:" "    sudo reboot" ;;
    *)
      if [ "$code" = 124 ] || [ "$code" = 137 ]; then said="no answer within $nvidia_smi_timeout_s s"; fi
      gpu_is_unclear "nvidia-smi is here but fails, so it is not known which GPUs there are: $said" \
        "See what it says by itself: nvidia-smi. A restart may help; sudo dmesg | grep -i nvrm says more." ;;
  esac
}

keep_visible() { # what CUDA_VISIBLE_DEVICES leaves, in its order
  if [ -z "${CUDA_VISIBLE_DEVICES+set}" ]; then return; fi
  local words word place kept=()
  IFS=, read -ra words <<< "$CUDA_VISIBLE_DEVICES"
  for word in "${words[@]}"; do
    case $word in MIG-*) return ;; esac # slices, which this listing does not show: take all for possible
    place=$(place_of_gpu "$word")
    if [ -z "$place" ]; then break; fi # CUDA ignores everything from the first word that names no GPU
    kept+=("$place")
  done
  if [ ${#kept[@]} -eq 0 ]; then
    gpu_state=none gpu_note="CUDA_VISIBLE_DEVICES='$CUDA_VISIBLE_DEVICES' leaves no GPU"
    return
  fi
  keep_places "${kept[@]}"
}

place_of_gpu() { # place_of_gpu WORD; prints where an index or the start of an id is in the listing
  local place
  for place in "${!gpu_ids[@]}"; do
    if [ "$1" = "$place" ] || [[ $1 == GPU-* && ${gpu_ids[place]} == "$1"* ]]; then
      printf '%s' "$place"
      return
    fi
  done
}

keep_places() { # keep_places PLACE...
  local place names=() capabilities=() ids=()
  for place in "$@"; do
    names+=("${gpu_names[place]}") capabilities+=("${gpu_capabilities[place]}") ids+=("${gpu_ids[place]}")
  done
  gpu_names=("${names[@]}") gpu_capabilities=("${capabilities[@]}") gpu_ids=("${ids[@]}")
}

keep_first() { # the first GPUS
  if [ "$gpu_state" != found ] || [ "${GPUS:-all}" = all ]; then return; fi
  require_gpu_number
  local there=${#gpu_names[@]}
  if [ "$GPUS" -gt "$there" ]; then
    refuse "GPUS=$GPUS, but there are $there here: $(describe_gpus)." "Type GPUS=$there or fewer, or leave it out."
  fi
  if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
    refuse "GPUS=$GPUS and CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES both say which GPUs to use." \
      "Leave GPUS out and name $GPUS of them: CUDA_VISIBLE_DEVICES=0,1,..."
  fi
  gpu_count=$GPUS
  # shellcheck disable=SC2046  # numbers
  keep_places $(seq 0 $((GPUS - 1)))
}

require_gpu_number() {
  if [ "${GPUS:-all}" = all ] || [[ $GPUS =~ ^[1-9][0-9]{0,3}$ ]]; then return; fi
  refuse "GPUS=$GPUS is no number of GPUs." "Type a number from 1 on, or leave it out for all; without a GPU: GPU=cpu"
}

describe_gpus() { # prints such as: 8 x NVIDIA H200, driver 580.95.05
  local counted
  counted=$(printf '%s\n' "${gpu_names[@]}" | LC_ALL=C sort | uniq -c | sed 's/^ *\([0-9]*\) /\1 x /' | paste -sd ';')
  printf '%s, driver %s' "${counted//;/, }" "$driver"
}
