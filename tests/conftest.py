"""What every Python test shares: the header that says what is being tested."""

from __future__ import annotations

import importlib.util
import signal
import sys
from importlib.metadata import version
from pathlib import Path

# pytest has put this folder on the path, where `cuda` and `wheel` would pass for packages.
sys.path.remove(str(Path(__file__).resolve().parent))

PACKAGE = Path(__file__).resolve().parents[1] / "python" / "unisono"


def pytest_report_header() -> list[str]:
    built = sorted(path.name for path in PACKAGE.glob("*.so"))
    torch = version("torch") if importlib.util.find_spec("torch") else "absent"
    python = ".".join(map(str, sys.version_info[:3]))
    return [f"unisono: Python {python}, torch {torch}, built: {', '.join(built) or 'nothing'}"]


def pytest_configure() -> None:
    # What a script starts in the background, or under nohup, ignores signals, and so would all that
    # is started here. A function that does nothing is the same to this process, and ends with it.
    for ignored in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(ignored) is signal.SIG_IGN:
            signal.signal(ignored, lambda *_: None)
