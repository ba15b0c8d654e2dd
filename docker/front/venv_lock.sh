# shellcheck shell=bash
# Who uses .venv. A command of tunebook holds .venv.lock together with others; what sets .venv up or removes it holds it
# alone. A process holds it by having it open, and so does what inherits that: nothing stays locked after a crash, and a
# training holds it on where the script that started it is killed. It lies beside .venv, which is emptied.

venv_lock=.venv.lock

packages_there() { cat .venv/.generation 2> /dev/null || echo cpu; } # the generation whose packages are in .venv

lock_venv() { # lock_venv -s|-x; together or alone, until this process and what it becomes has ended; 1: it is taken
  # Without flock, or on a disk without locks, nobody can be asked: then it counts as free.
  command -v flock > /dev/null && { : >> "$venv_lock"; } 2> /dev/null || return 0
  local file code=0
  exec {file}>> "$venv_lock"
  flock "$1" -n "$file" 2> /dev/null || code=$?
  if [ "$code" = 1 ]; then
    exec {file}>&-
    return 1
  fi
}

venv_is_in_use() { ! (lock_venv -x); } # a look, which holds nothing

processes_in_venv() { # prints the ids of those on this machine that can be seen
  find /proc/[0-9]*/fd -lname "$(realpath "$venv_lock")" 2> /dev/null | cut -d / -f 3 | sort -un | paste -sd ' ' || true
}
