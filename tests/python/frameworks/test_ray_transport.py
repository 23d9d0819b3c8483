"""unisono as a tensor transport of Ray, with the real Ray."""

from __future__ import annotations

import importlib.util
import re
import tempfile
from pathlib import Path

import pytest
from launching import run_python

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed (pip install ray)", allow_module_level=True)
if importlib.util.find_spec("ray.experimental.rdt") is None:
    pytest.skip("this version of ray has no tensor transports", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[3]


def run(script: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    # A short path, for Ray puts Unix sockets deep under it.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("HOME", folder)  # Ray leaves a token there
        monkeypatch.setenv("RAY_TMPDIR", folder)
        return run_python(script, timeout=180).splitlines()


def test_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = run(ROOT / "examples" / "frameworks" / "ray_transport.py", monkeypatch)
    for server in (0, 1):
        assert f"server {server}: step 7: 1000000, bias [0.0, 1.0, 2.0]" in lines, lines
    assert "batch: 499999500000 and (0, 3)" in lines, lines
    assert "driver: 1000000, in the heap: True" in lines, lines


def test_memory_of_receivers_and_sources_that_die(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = run(Path(__file__).with_name("ray_transport_actors.py"), monkeypatch)
    assert "into memory of the receiver" in lines, lines
    assert "from the driver" in lines, lines
    assert "offers end with their objects" in lines, lines
    assert any(line.startswith("a source that dies: ") for line in lines), lines
    (lost,) = (line for line in lines if line.startswith("unisono.errors.PeerLostError: "))
    assert re.search(r"read of a peer's memory, \d+ bytes: the peer has .* or has ended", lost)
