"""What every Python test shares: the header that says what is being tested."""

from __future__ import annotations

import importlib.util
import sys
from importlib.metadata import version
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "unisono"


def pytest_report_header() -> list[str]:
    built = sorted(path.name for path in PACKAGE.glob("*.so"))
    torch = version("torch") if importlib.util.find_spec("torch") else "absent"
    python = ".".join(map(str, sys.version_info[:3]))
    return [f"unisono: Python {python}, torch {torch}, built: {', '.join(built) or 'nothing'}"]
