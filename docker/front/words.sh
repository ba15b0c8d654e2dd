# shellcheck shell=bash
# How the front door speaks: what it picked, why it stops, and what a misspelt name may have meant.

say() { printf 'tunebook: %s\n' "$*" >&2; }

end_with() { # end_with EXIT_CODE WHAT_IS_WRONG [WHAT_TO_TYPE_NEXT...]
  printf 'error: %s\n' "$2" >&2
  if [ $# -gt 2 ]; then printf '%s\n' "${@:3}" >&2; fi
  exit "$1"
}

refuse() { end_with 2 "$@"; } # the request is wrong, or cannot be served on this machine

does_not_fit() { end_with 3 "$@"; } # no room

edit_distance() { # prints how many letters have to change to make one word of the other
  local one=$1 other=$2 i j best
  local -a above=() row=()
  for ((j = 0; j <= ${#other}; j++)); do above[j]=$j; done
  for ((i = 1; i <= ${#one}; i++)); do
    row=("$i")
    for ((j = 1; j <= ${#other}; j++)); do
      best=${above[j - 1]}
      if [[ ${one:i-1:1} != "${other:j-1:1}" ]]; then best=$((best + 1)); fi
      if ((above[j] + 1 < best)); then best=$((above[j] + 1)); fi
      if ((row[j - 1] + 1 < best)); then best=$((row[j - 1] + 1)); fi
      row[j]=$best
    done
    above=("${row[@]}")
  done
  printf '%s' "${above[${#other}]}"
}

nearest() { # nearest WORD KNOWN...; prints the known word that is close, or nothing
  local word=${1,,} known closest="" distance least=3 # three or more letters off is another word
  for known in "${@:2}"; do
    distance=$(edit_distance "$word" "$known")
    if ((distance < least)); then
      least=$distance
      closest=$known
    fi
  done
  printf '%s' "$closest"
}
