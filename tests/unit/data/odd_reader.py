"""A `Processor` for tests, in a module of its own, so that processes that get one start fast."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class OddReader:
    """`does`: its behaviour, if not to return the process's id."""

    does: str = ""

    def tokenize(self, record: Any) -> Any:
        """The process's id, or an array with the record's index, or an error."""
        if self.does == "exit":
            os._exit(3)
        if self.does == "sleep":
            time.sleep(60)
        if self.does == "wrong":
            raise ZeroDivisionError("of our own")
        if self.does == "number":
            return np.full((record.index, 1000), record.index, np.float32)
        return os.getpid()
