"""Execute model-written programs and judge them by tests that they cannot reach.

The evaluation imports `client`, which finds or starts a runner and sends it each program over a Unix socket
(`protocol`). The `runner` keeps a few workers. Each worker judges one program at a time (`judge`) in two processes
(`child`). The runner's modules import only the standard library, because the sandbox image holds nothing else.

Defenses:

- Program and test run in two processes, joined by two pipes that carry plain data (`child`). A program that exits
  early, prints a pass mark, patches builtins, searches its memory or returns an object that equals everything changes
  only its own process. The test's process compares values. The verdict needs a pipe and a nonce that the program never
  had. A single process, or pickled values, would put the verdict within the program's reach.
- Each process has a fresh uid or its own namespaces (`walls`). It cannot signal, trace or read another process, nor
  read the user's files, the test, the judge or the socket. The worker finds leftovers by uid and removes them.
- The container or bubblewrap has no network, one small writable folder, and none of the user's files.
- Limits (`limits`) on memory, processes, disk, open files and CPU time apply to the process before the program starts.
  The judge adds limits on wall-clock time, output, and the total memory of all processes.
- A system call filter (`limits`) refuses sockets, tracing, uncounted memory and namespaces.
"""
