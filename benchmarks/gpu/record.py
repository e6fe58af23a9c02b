"""What a section finds: numbers, and checks with their bounds, in a file that is whole at any time."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Check:
    """A number that must be at most `bound`."""

    what: str
    found: float
    bound: float

    @property
    def passed(self) -> bool:
        """Whether it is. NaN is not."""
        return self.found <= self.bound

    @classmethod
    def equal(cls, what: str, found: object, expected: object) -> Check:
        """That two things are equal: 0 where they are, 1 where they are not."""
        return cls(f"{what}: {expected!r} expected, {found!r} found", float(found != expected), 0.0)


@dataclass
class Record:
    """The results of a section. Written after every change, so that what was found before a section is stopped stays.

    `numbers`: anything that JSON has.
    """

    file: Path
    numbers: dict[str, Any] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)

    def put(self, name: str, value: Any) -> None:
        """Keep a number, or several under one name."""
        self.numbers[name] = value
        self._write()

    def check(self, what: str, found: float, bound: float) -> None:
        """Keep a check."""
        self.add(Check(what, found, bound))

    def add(self, check: Check) -> None:
        """Keep a check that is made."""
        self.checks.append(check)
        self._write()

    def _write(self) -> None:
        checks = [asdict(check) | {"passed": check.passed} for check in self.checks]
        beside = self.file.with_suffix(".new")
        beside.write_text(json.dumps({"numbers": self.numbers, "checks": checks}), encoding="utf-8")
        os.replace(beside, self.file)  # noqa: PTH105 (by name)


def read(file: Path) -> dict[str, Any]:
    """What a section has written: `numbers` and `checks`, empty where it came to nothing."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"numbers": {}, "checks": []}
