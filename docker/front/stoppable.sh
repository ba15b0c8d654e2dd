# shellcheck shell=bash
# Commands that take long and can be asked to stop. Ctrl-C reaches every process of a terminal's foreground group at
# once, `timeout` signals make and then its group, and make hands SIGTERM on: a command that heard all of that would
# take one request for several, and a run takes a second one as "do not save". `docker compose run` itself hands a
# signal on twice or not at all. So it is started in a session of its own, where only this script reaches it, and each
# request is handed on once.

stop_requests=0 stopped_by="" stoppable_pid="" early_request=""
last_request_s=0
same_request_s=1 # what arrives within this, or up to a second more, is the same request, come another way

# Bash itself ends of Ctrl-C only where what it waits for dies of it. Docker and nvidia-smi may catch it and end with a
# code, like any failure, and what stands after `||` or an `if !` would follow. Called once all scripts are read: bash
# 5.2 that gets a signal while it reads a $() mistakes the trap for a part of it.
end_when_interrupted() { trap 'exit 130' INT; }

run_stoppable() { # run_stoppable STOP COMMAND [ARGUMENT...]; STOP is called with a signal's name
  local stop=$1 code=0 seen again name
  shift
  stop_requests=0 stoppable_pid="" early_request=""
  for name in INT TERM HUP; do # before it starts, or a request in between would end this script and leave it alone
    # shellcheck disable=SC2064  # these values, now
    trap "request_stop $stop $name" "$name"
  done
  setsid "$@" <&0 &
  stoppable_pid=$!
  if [ -n "$early_request" ]; then "$stop" "$early_request"; fi
  while true; do
    seen=$stop_requests
    wait "$stoppable_pid" && again=0 || again=$?
    if [ "$again" != 127 ]; then code=$again; fi # 127: it was waited for already
    if [ "$stop_requests" = "$seen" ] && ! kill -0 "$stoppable_pid" 2> /dev/null; then break; fi
  done
  trap - TERM HUP
  end_when_interrupted
  return "$code"
}

end_command() { # end_command SIGNAL; a STOP for what has nothing to save
  kill -TERM "$stoppable_pid" 2> /dev/null || true
}

exit_if_stopped() { # exit_if_stopped MESSAGE; after what run_stoppable ran
  if [ -z "$stopped_by" ]; then return; fi
  say "$1"
  exit $((128 + $(kill -l "$stopped_by")))
}

# In what a trap runs a bare `return` gives the status from before the trap, which `set -e` takes for a failure. And no
# program but in a condition: a signal to the whole group ends that program, which `set -e` takes for a failure, too.
request_stop() { # request_stop STOP SIGNAL
  local now
  printf -v now '%(%s)T' -1
  stop_requests=$((stop_requests + 1))
  if ((now - last_request_s <= same_request_s)); then return 0; fi
  last_request_s=$now
  stopped_by=${stopped_by:-$2}
  if [ -n "$stoppable_pid" ]; then "$1" "$2"; else early_request=$2; fi
}
