"""Where programs that a model wrote are executed, and judged by tests that they cannot reach.

On the evaluation's side, `client` hands programs over and collects what became of them, and `pass_at_k` counts. On the
other side `runner` serves a hand-over folder with a few `worker`s; each judges one program at a time (`judge`) in two
processes of their own: `solution` executes the program, `checker` the test, which reaches the program only through a
pipe. What a program is kept in by: `walls`, `limits`, `seccomp`, `cleaning`.

The runner's side imports the standard library only, because the sandbox's image holds nothing else.
"""
