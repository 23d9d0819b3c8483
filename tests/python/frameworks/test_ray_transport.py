"""unisono as a tensor transport of Ray, with the real Ray."""

from __future__ import annotations

import functools
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

import torch

import unisono

ROOT = Path(__file__).resolve().parents[3]


def test_a_transfer_that_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from unisono._ray_transports import TensorTransport

    transport = TensorTransport()
    nothing = transport.get_communicator_metadata(None, None)
    tensor = torch.arange(1000.0)
    meta = transport.extract_tensor_transport_metadata("a", [tensor])
    receive = functools.partial(transport.recv_multiple_tensors, "a", meta, nothing)
    # Ray's call may come before that of the transfer.
    transport.abort_transport("a", nothing)
    with pytest.raises(unisono.AbortedError, match="given up the transfer of object a"):
        receive()
    (found,) = receive()
    assert torch.equal(found, tensor)
    # And while it waits, or too late.
    fetch = transport.fetch_multiple_tensors("a", meta, nothing)
    monkeypatch.setattr(fetch.transfers, "wait", lambda *_: transport.abort_transport("a", nothing))
    transport.wait_fetch_complete(fetch)
    with pytest.raises(ValueError, match="an array of 8 bytes"):
        receive([torch.ones(2)])
    assert not transport._aborted
    transport.garbage_collect("a", meta, [tensor])
    with pytest.raises(unisono.InvalidArgumentError, match="no such memory registered"):
        receive()


def run(script: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    # A short path, for Ray puts Unix sockets deep under it.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("HOME", folder)  # Ray leaves a token there
        monkeypatch.setenv("RAY_TMPDIR", folder)
        return run_python(script, timeout=180).splitlines()


@pytest.mark.usefixtures("alone_with_ray")
def test_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = run(ROOT / "examples" / "frameworks" / "ray_transport.py", monkeypatch)
    for server in (0, 1):
        assert f"server {server}: step 7: 1000000, bias [0.0, 1.0, 2.0]" in lines, lines
    assert "batch: 499999500000 and (0, 3)" in lines, lines
    assert "driver: 1000000, in the heap: True" in lines, lines


@pytest.mark.usefixtures("alone_with_ray")
def test_memory_of_receivers_and_sources_that_die(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = run(Path(__file__).with_name("ray_transport_actors.py"), monkeypatch)
    assert "into memory of the receiver" in lines, lines
    assert "from the driver" in lines, lines
    assert "offers end with their objects" in lines, lines
    assert any(line.startswith("a source that dies: ") for line in lines), lines
    (lost,) = (line for line in lines if line.startswith("unisono.errors.PeerLostError: "))
    assert re.search(r"read of a peer's memory, \d+ bytes: the peer has .* or has ended", lost)
