"""A finding of the doctor: a topic, a state, a line in plain words, and what mends it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# A job runs; it runs, and something could be better; it does not run.
OK, ADVICE, BROKEN = "ok", "advice", "broken"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    topic: str
    state: str
    line: str
    # A command, or a setting. Where there are several ways, each has a line.
    mend: str = ""
    # It holds for every process of the host, and one of them has looked.
    of_host: bool = False

    def text(self) -> list[str]:
        """Return its lines, for a terminal."""
        lines = [f"  {self.state:<7} {self.topic:<11} {self.line}"]
        return lines + [f"{'':22}-> {line}" for line in self.mend.splitlines()]


def in_words(seconds: float) -> str:
    """Return a short time, with three digits."""
    if seconds >= 1:
        return f"{seconds:,.1f} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"


def run_module(
    name: str, arguments: Sequence[str], variables: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start a module of this package, in a Python that imports what this one would."""
    here = [str(Path(entry).absolute()) for entry in sys.path if entry]
    environment = os.environ if variables is None else variables
    return subprocess.Popen(
        [sys.executable, "-m", name, *arguments],
        cwd="/",
        env={**environment, "PYTHONPATH": os.pathsep.join(here)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
