# shellcheck shell=bash
# A command of tunebook in a container: its exit code comes back unchanged, a request to stop reaches it once, and no
# container stays behind.
#
# Ctrl-C reaches every process of a terminal's foreground group, `timeout` signals make and then its group, and make
# forwards SIGTERM. A command that received all of these would take one request for several, and a run takes a second
# request as "do not save". `docker compose run` itself forwards a signal twice or not at all. So run_stoppable starts a
# command in a session of its own, which only this script reaches, and forwards each request once.

stop_requests=0 stopped_by="" stoppable_pid="" early_request=""
last_request_s=0
same_request_s=1 # a signal within this, or up to a second more, is the same request

# Bash ends on Ctrl-C only if the program that it waits for dies of it. Docker and nvidia-smi may catch it and end with
# a code, like any failure. Call this once all scripts are read: bash 5.2 that gets a signal while it parses a $() takes
# the trap for a part of it.
end_when_interrupted() { trap 'exit 130' INT; }

run_stoppable() { # run_stoppable STOP COMMAND [ARGUMENT...]; STOP is called with a signal's name
  local stop=$1 code=0 seen again name
  shift
  stop_requests=0 stoppable_pid="" early_request=""
  for name in INT TERM HUP; do # before the start, or a request in between would end this script alone
    # shellcheck disable=SC2064  # these values, now
    trap "request_stop $stop $name" "$name"
  done
  setsid "$@" <&0 &
  stoppable_pid=$!
  if [ -n "$early_request" ]; then "$stop" "$early_request"; fi
  while true; do
    seen=$stop_requests
    wait "$stoppable_pid" && again=0 || again=$?
    # 127: it was waited for already; -1: bash 5.2 lost its status while a trap ran, and the signal's stays.
    if ((again >= 0 && again != 127)); then code=$again; fi
    if [ "$stop_requests" = "$seen" ] && ! kill -0 "$stoppable_pid" 2> /dev/null; then break; fi
  done
  trap - TERM HUP
  end_when_interrupted
  return "$code"
}

# In a trap a bare `return` gives the status from before the trap, which `set -e` takes for a failure. And every program
# is in a condition: a signal to the whole group ends it, which `set -e` takes for a failure, too.
request_stop() { # request_stop STOP SIGNAL
  local now
  printf -v now '%(%s)T' -1
  stop_requests=$((stop_requests + 1))
  if ((now - last_request_s <= same_request_s)); then return 0; fi
  last_request_s=$now
  stopped_by=${stopped_by:-$2}
  if [ -n "$stoppable_pid" ]; then "$1" "$2"; else early_request=$2; fi
}

end_command() { # end_command SIGNAL; a STOP for what has nothing to save
  kill -TERM "$stoppable_pid" 2> /dev/null || true
}

exit_if_stopped() { # exit_if_stopped MESSAGE; after run_stoppable
  if [ -z "$stopped_by" ]; then return; fi
  say "$1"
  exit $((128 + $(kill -l "$stopped_by")))
}

container="" was_removed=false

run_in_container() { # run_in_container COMMAND [ARGUMENT...]
  require_engine
  if uses_gpus "$1"; then require_gpu_access; fi
  require_writable_outputs
  require_image
  write_settings
  say "in a container, image $image: $place_why"
  container=tunebook-$1-$(date +%Y%m%d-%H%M%S)-$$
  local code=0 service=$1 compose=(docker compose) words
  # A command that needs no GPU also runs where there is none, in any image.
  if [ "$generation" != cpu ] && [ "$gpu_state" != found ]; then
    compose+=(-f compose.yaml -f docker/cpu/compose.yaml)
  fi
  words=("${compose[@]}" run --rm --name "$container")
  # An image that was built here has no digest in a registry. Its id identifies it as exactly, and `docker load` keeps it.
  # It is asked for now, because .env would name the one before after a build by hand.
  if [[ $image != *@* ]]; then
    words+=(--env "TUNEBOOK_IMAGE_DIGEST=$(docker image inspect --format '{{.Id}}' "$image")")
  fi
  if [ ! -t 1 ]; then words+=(-T); fi
  # Without standard input the terminal stays as it is, so that Ctrl-C in it makes a signal.
  if [ "$1" != chat ]; then words+=(--interactive=false); fi
  case $1 in
    train | eval | sweep | plan | chat) ;;
    *) service=plan words+=(--entrypoint "/opt/tunebook/entrypoint.sh $1") ;;
  esac
  words+=("$service" "${@:2}")
  if needs_sandbox "$@"; then start_sandbox; fi
  if [ "$1" = chat ] && [ -t 0 ]; then
    # The terminal belongs to the conversation: keys, Ctrl-C among them, go to the container as they are.
    "${words[@]}" || code=$?
  else
    run_stoppable forward "${words[@]}" || code=$?
    if [ "$code" != 0 ]; then await_container; fi
    if $was_removed; then exit_if_stopped "stopped before the container ran"; fi
  fi
  exit "$code"
}

needs_sandbox() { # needs_sandbox COMMAND [ARGUMENT...]; whether the arguments ask for programs that a model writes
  local found=1 word
  case $1 in train | eval | sweep) ;; *) return 1 ;; esac
  for word in "${@:2}"; do
    if [ "$word" = --dry-run ]; then return 1; fi
    if [[ $word =~ ^(suite|evaluation)=code|^(evaluation\.)?tasks?=.*(humaneval|mbpp|small_python) ]]; then found=0; fi
  done
  return "$found"
}

start_sandbox() { # if this fails, the evaluation says what is missing
  say "the sandbox executes what the model writes; it stays up until: docker compose stop sandbox"
  local code=0
  run_stoppable end_command "${compose[@]}" up --detach --build sandbox >&2 || code=$?
  exit_if_stopped "stopped before the container ran"
  if [ "$code" != 0 ]; then say "the sandbox could not be started; the reason is above"; fi
}

forward() { # forward SIGNAL; tried again where a signal to this script's whole group ended `docker` itself
  while true; do
    case $(setsid docker container inspect --format '{{.State.Status}}' "$container" 2> /dev/null) in
      created) # there is nothing to save
        setsid docker rm --force "$container" > /dev/null 2>&1 || true
        was_removed=true
        return 0 ;;
      running)
        until sleep 0.3; do :; done # in its first milliseconds, before tini starts it, the entry point gets no signal
        if setsid docker kill --signal "$1" "$container" > /dev/null 2>&1; then return 0; fi ;;
    esac
    if ! kill -0 "$stoppable_pid" 2> /dev/null; then return 0; fi # it has ended
    sleep 0.2 || true
  done
}

await_container() { # compose ends first if the terminal that it writes to is closed: then the run is asked to save
  local answer
  if ! docker container inspect "$container" > /dev/null 2>&1; then return; fi
  if [ -z "$stopped_by" ]; then
    stopped_by=HUP
    docker kill --signal HUP "$container" > /dev/null 2>&1 || true
  fi
  answer=$(mktemp)
  run_stoppable forward docker wait "$container" > "$answer" 2> /dev/null || true
  if [[ $(cat "$answer") =~ ^[0-9]+$ ]]; then code=${BASH_REMATCH[0]}; fi
  rm -f "$answer"
  docker rm --force "$container" > /dev/null 2>&1 || true
}
