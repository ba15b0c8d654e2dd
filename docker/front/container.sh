# shellcheck shell=bash
# A command of tunebook in a container: its exit code comes back unchanged, a request to stop reaches it once, and no
# container stays behind.

container="" was_removed=false

run_in_container() { # run_in_container COMMAND [ARGUMENT...]
  require_engine
  if uses_gpus "$1"; then require_gpu_runtime; fi
  make_folder outputs
  require_writable_outputs
  require_image
  write_settings
  say "in a container, image $image: $place_why"
  container=tunebook-$1-$(date +%Y%m%d-%H%M%S)-$$
  local code=0 compose service words
  compose_words "$@"
  if asks_for_programs "$@"; then start_sandbox; fi
  if [ "$1" = chat ] && [ -t 0 ]; then
    # The terminal belongs to the conversation: keys, Ctrl-C among them, go to the container as they are.
    "${words[@]}" || code=$?
  else
    run_stoppable hand_on "${words[@]}" || code=$?
    if [ "$code" != 0 ]; then await_container; fi
    if $was_removed; then exit_if_stopped "stopped before the container ran"; fi
  fi
  if [ "$code" = 1 ]; then explain_failed_start; fi
  exit "$code"
}

compose_words() { # compose_words COMMAND [ARGUMENT...]; sets the caller's compose, service and words
  compose=(docker compose)
  # What needs no GPU also runs where there is none, in any image.
  if [ "$generation" != cpu ] && [ "$gpu_state" != found ]; then
    compose+=(-f compose.yaml -f docker/cpu/compose.yaml)
  fi
  words=("${compose[@]}" run --rm --name "$container")
  if [ ! -t 1 ]; then words+=(-T); fi
  # Without standard input the terminal stays as it is, so that Ctrl-C in it makes a signal.
  if [ "$1" != chat ]; then words+=(--interactive=false); fi
  case $1 in
    train | eval | sweep | plan | chat) service=$1 ;;
    *)
      service=plan
      words+=(--entrypoint "/opt/tunebook/entrypoint.sh $1") ;;
  esac
  words+=("$service" "${@:2}")
}

asks_for_programs() { # asks_for_programs COMMAND [ARGUMENT...]; whether a model is to write programs, as far as is typed
  local word found=1
  case $1 in train | eval | sweep) ;; *) return 1 ;; esac
  for word in "${@:2}"; do
    case $word in
      --dry-run) return 1 ;;
      suite=code* | evaluation=code*) found=0 ;;
      task=*humaneval* | task=*mbpp* | task=*small_python*) found=0 ;;
      tasks=*humaneval* | tasks=*mbpp* | tasks=*small_python*) found=0 ;;
      evaluation.tasks=*humaneval* | evaluation.tasks=*mbpp* | evaluation.tasks=*small_python*) found=0 ;;
    esac
  done
  return "$found"
}

start_sandbox() { # one command is to be enough; where this fails, the evaluation says what it lacks and what helps
  say "the sandbox executes what the model writes; it stays up until: docker compose stop sandbox"
  local code=0
  run_stoppable end_command "${compose[@]}" up --detach --build sandbox >&2 || code=$?
  exit_if_stopped "stopped before the container ran"
  if [ "$code" != 0 ]; then say "the sandbox could not be started; why is above"; fi
}

hand_on() { # hand_on SIGNAL; asked again where a signal to this script's whole group ended the asking itself
  while true; do
    case $(setsid docker container inspect --format '{{.State.Status}}' "$container" 2> /dev/null) in
      created) # then there is nothing to save
        setsid docker rm --force "$container" > /dev/null 2>&1 || true
        was_removed=true
        return 0 ;;
      running)
        until sleep 0.3; do :; done # in its first milliseconds, before it is tini's child, the entry point hears nothing
        if setsid docker kill --signal "$1" "$container" > /dev/null 2>&1; then return 0; fi ;;
    esac
    if ! kill -0 "$stoppable_pid" 2> /dev/null; then return 0; fi # it has ended by itself
    sleep 0.2 || true
  done
}

await_container() { # compose ends first where the terminal that it writes to is closed: then the run is asked to save
  local answer
  if ! docker container inspect "$container" > /dev/null 2>&1; then return; fi
  if [ -z "$stopped_by" ]; then
    stopped_by=HUP
    docker kill --signal HUP "$container" > /dev/null 2>&1 || true
  fi
  answer=$(mktemp)
  run_stoppable hand_on docker wait "$container" > "$answer" 2> /dev/null || true
  if [[ $(cat "$answer") =~ ^[0-9]+$ ]]; then code=${BASH_REMATCH[0]}; fi
  rm -f "$answer"
  docker rm --force "$container" > /dev/null 2>&1 || true
}

explain_failed_start() { # 1 is also what tunebook returns for what nobody expected: then the service itself does start
  local said
  if said=$("${compose[@]}" run --rm -T --interactive=false --entrypoint true "$service" 2>&1); then return; fi
  find_reason "$said"
  if [ -n "$reason" ]; then
    end_with "$reason_code" "the container could not be started: $reason" "${reason_advice[@]}"
  fi
}
