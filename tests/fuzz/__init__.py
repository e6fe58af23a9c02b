"""Bad input of every kind, for a fixed time: `make fuzz`, or `python -m tests.fuzz`.

A case is a good command line, file or folder with something wrong in it, given to the program. It is taken, or refused
with one sentence. Anything else is a finding: a traceback, 60 s without an end, a process started, a connection made, a
file written elsewhere, a message that a terminal would not show as it is.

A case is named by its target and its number, `--replay layouts 17`: with the same seed it is the same case.

`targets`: what is mutated, and what is run on it. `guards`: what the process may not do meanwhile. `worker`: runs the
cases of one target. `__main__`: starts a worker for each target and prints their reports.
"""
