"""Programs that hold a lock until they are killed, and say so on a line."""

from __future__ import annotations

HELD_ELSEWHERE = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("process 1 on elsewhere", file=file, flush=True)
print("held", flush=True)
time.sleep(60)
"""

HOLD = """
import sys, time
from pathlib import Path
from megatron_hetero.base.lock import Lock
held = Lock.take(Path(sys.argv[1]), "", "", mixed="", fix="")
print("held", flush=True)
time.sleep(60)
"""
