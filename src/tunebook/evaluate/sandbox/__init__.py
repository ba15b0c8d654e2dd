"""Where programs that a model wrote are executed, and judged by tests that they cannot reach.

On the evaluation's side `backends` finds or starts a runner, and `client` hands programs over in a folder (`jobs`). On
the other side `runner` keeps a few workers; each judges one program at a time (`judge`) in two processes (`child`). The
runner's side imports the standard library only, because the sandbox's image holds nothing else.

What stops which attack, and why:

- Program and test are two processes, joined by two pipes of plain data (`child`). A program that exits early, prints a
  pass mark, patches builtins, searches its memory or returns an object that is equal to everything changes only its own
  process; whether two values are equal is computed in the test's. The verdict needs a pipe and a nonce that the program
  never had. One process for both, or unpickled values, would put the verdict in the program's reach.
- Each process has a fresh uid, or namespaces of its own (`walls`): it can neither signal, trace nor read another one,
  nor the user's files, the test, the judge or the hand-over folder. What it leaves is found by its uid, and removed.
- The container or bubblewrap has no network, nothing to write to but a small folder, and none of the user's files.
- Limits (`limits`) on memory, processes, disk, open files and CPU time bind the process before the program starts. The
  judge adds the wall clock, the output, and the memory of all processes together.
- A filter of system calls (`limits`) refuses sockets, tracing, uncounted memory and namespaces.
"""
