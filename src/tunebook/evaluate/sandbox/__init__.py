"""Execute programs that a model wrote, and judge them by tests that they cannot reach.

The evaluation imports `client`: it finds or starts a runner and sends each program over a Unix socket (`protocol`). The
`runner` keeps a few workers; each judges one program at a time (`judge`) in two processes (`child`). The runner's side
imports only the standard library, because the sandbox's image holds nothing else.

What stops which attack, and why:

- Program and test run in two processes, joined by two pipes that carry plain data (`child`). A program that exits
  early, prints a pass mark, patches builtins, searches its memory or returns an object that equals everything changes
  only its own process. The test's process compares values. The verdict needs a pipe and a nonce that the program never
  had. One process for both, or pickled values, would put the verdict in the program's reach.
- Each process has a fresh uid, or namespaces of its own (`walls`): it can neither signal, trace nor read another
  process, nor read the user's files, the test, the judge or the socket. Its leftovers are found by uid and removed.
- The container or bubblewrap has no network, one small writable folder, and none of the user's files.
- Limits (`limits`) on memory, processes, disk, open files and CPU time bind the process before the program starts. The
  judge adds limits on wall-clock time, output, and the memory of all processes together.
- A system call filter (`limits`) refuses sockets, tracing, uncounted memory and namespaces.
"""
