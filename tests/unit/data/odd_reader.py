"""A `Reader` that does what it is told. Apart from tests, so that processes that are handed one start fast."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class OddReader:
    """`does`: what instead of telling the process's id."""

    does: str = ""

    def tokenise(self, record: Any) -> Any:
        """The process's id, or what was told."""
        if self.does == "exit":
            os._exit(3)
        if self.does == "sleep":
            time.sleep(60)
        if self.does == "wrong":
            raise ZeroDivisionError("of our own")
        return os.getpid()

    def patches(self, wanted: Any) -> np.ndarray:
        """As many as the number of the item."""
        return np.full((wanted.number, 1000), wanted.number, np.float32)
