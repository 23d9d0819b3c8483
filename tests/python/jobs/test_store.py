"""Which processes can join over the built-in store, and how long it is there."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import numpy as np
import own_threads
import psutil
import pytest
from launching import doors, finish, run, started
from ranks import free_port, run_ranks, run_torchrun

import unisono

LIMIT = 20.0
MEET = """
import os, sys, numpy as np, unisono
if os.environ["RANK"] in sys.argv[2:]:
    del os.environ["UNISONO_LAUNCH_SECRET"]
    # The first to give up: the launcher then ends the others.
    os.environ["UNISONO_JOIN_TIMEOUT"] = "4"
assert "UNISONO_LAUNCH_SECRET" not in repr(unisono.Options())
try:
    comm = unisono.init()
except unisono.Error as error:
    sys.exit(f"{type(error).__name__}: {error}")
jobs = comm.all_gather(np.array([int(sys.argv[1])]))
print(f"rank {comm.rank} among {sorted({int(job) for job in jobs.flat})}\\n", end="")
"""


def store_is_open() -> bool:
    """Whether this process serves the store: its thread and its listening socket."""
    port = int(os.environ["MASTER_PORT"])
    with socket.socket() as probe:
        answers = probe.connect_ex(("127.0.0.1", port)) == 0
    return "unisono-store" in own_threads.names() or answers


def join_and_look(slow: bool) -> tuple[bool, bool]:
    """Whether the store closed, and whether all that needs no store works after it."""
    if slow and os.environ["RANK"] == "1":
        time.sleep(0.5)
    comm = unisono.init()
    deadline = time.monotonic() + LIMIT
    while store_is_open() and time.monotonic() < deadline:
        time.sleep(0.01)
    closed = not store_is_open()
    comm.barrier()
    part = comm.split(comm.rank % 2, -comm.rank)
    array = np.full(8, comm.rank)
    part.all_reduce(array)
    part.close()
    works = array[0] == sum(range(comm.rank % 2, comm.size, 2))
    comm.barrier()
    comm.close()
    return closed, bool(works)


def test_the_store_closes_when_all_have_joined():
    results = run_ranks(4, "test_store:join_and_look", True, timeout=60)
    assert [result.value for result in results] == [(True, True)] * 4


def join_and_sum() -> float:
    comm = unisono.init()
    total = comm.all_reduce(np.array([comm.rank + 1.0]))
    comm.barrier()
    return total.item()


def descendants_after_a_fork() -> int:
    """The exit status of a child that ends in the ordinary way, with what rank 0 served."""
    comm = unisono.init()
    child = os.fork()
    if child == 0:
        del comm
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    comm.barrier()
    comm.close()
    return status


def test_a_forked_child_leaves_the_store_alone():
    results = run_ranks(2, "test_store:descendants_after_a_fork", timeout=60)
    assert [result.value for result in results] == [0, 0]


def test_two_launches_at_one_port_do_not_mix(tmp_path):
    program = tmp_path / "meet.py"
    program.write_text(MEET)
    port = str(free_port())
    jobs = []
    for job in ("1", "2"):
        # The program is not the launcher's child, but a shell's.
        python = f'python="$1"; shift; "$python" {program} {job}; exit $?'
        launch = [*doors()["python"], "-n", "3", "--port", port]
        jobs.append([*launch, "sh", "-c", python, "sh", *doors()["python"][:1]])
    with started(jobs[0]) as one, started(jobs[1]) as other:
        for job, done in enumerate((finish(one), finish(other)), 1):
            assert done.code == 0, done
            assert sorted(done.out) == [f"[{r}] rank {r} among [{job}]" for r in range(3)]


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["silent", "HTTP"])
def test_ranks_meet_beside_another_program_at_their_port(says):
    """As where a port that was found free is lost before rank 0 comes."""

    def answer() -> None:
        while True:
            try:
                visitor, _ = stranger.accept()
            except OSError:
                return
            # One that has given up may have gone.
            with visitor, contextlib.suppress(OSError):
                visitor.sendall(says)

    with socket.create_server(("127.0.0.1", 0)) as stranger:
        if says:
            threading.Thread(target=answer, daemon=True).start()
        port = {"MASTER_PORT": str(stranger.getsockname()[1])}
        try:
            # A port that accepts and stays silent costs some seconds.
            found = run_ranks(2, "test_store:join_and_sum", timeout=40, env=port)
        finally:
            stranger.shutdown(socket.SHUT_RDWR)
    assert [result.value for result in found] == [3, 3]


LOSE_THE_PORT = """
import os, socket
import numpy as np, unisono
if os.environ["RANK"] == "0":
    taken = socket.create_server(("", int(os.environ["MASTER_PORT"])))
comm = unisono.init()
print(f"rank {comm.rank} has {comm.all_reduce(np.ones(3))[0]}\\n", end="")
comm.barrier()
"""


def test_a_port_that_torchrun_has_lost(tmp_path):
    """Where its agent keeps no store, MASTER_PORT is a port that it has found free before."""
    pytest.importorskip("torch")
    program = tmp_path / "lose.py"
    program.write_text(LOSE_THE_PORT)
    printed = run_torchrun(program, 2, env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    assert {f"rank {rank} has 2.0" for rank in range(2)} <= set(printed.splitlines()), printed


def test_a_process_without_the_secret_of_a_launch_is_kept_out(tmp_path):
    program = tmp_path / "meet.py"
    program.write_text(MEET)
    launch = [*doors()["python"], "-n", "2", str(program), "1", "1"]
    done = run(launch, env={"UNISONO_JOIN_TIMEOUT": "30"})
    assert done.code != 0
    errors = "\n".join(done.err)
    assert "rank 0 has not come" in errors, errors
    assert "another secret" in errors, errors


MEET_IN_TORCH = """
import os, sys
from datetime import timedelta
import torch.distributed as dist
if os.environ["RANK"] in sys.argv[1:]:
    del os.environ["UNISONO_LAUNCH_SECRET"]
dist.init_process_group("unisono", timeout=timedelta(seconds=20))
# Rank 0 has torch's store, which the other still reads.
dist.barrier()
dist.destroy_process_group()
"""


def test_a_group_of_torch_takes_the_secret_of_a_launch(tmp_path):
    pytest.importorskip("torch")
    program = tmp_path / "meet_in_torch.py"
    program.write_text(MEET_IN_TORCH)
    launch = [*doors()["python"], "-n", "2", str(program)]
    assert (done := run(launch)).code == 0, done
    done = run([*launch, "1"])
    assert done.code != 0
    errors = "\n".join(done.err)
    assert "rank 0 has a secret" in errors, errors
    assert "rank 1 has none" in errors, errors


def test_the_secret_of_a_launch_is_not_shown(tmp_path):
    program = tmp_path / "show.py"
    program.write_text(
        "import os, unisono\n"
        "secret = os.environ['UNISONO_LAUNCH_SECRET']\n"
        "comm = unisono.init()\n"
        "comm.barrier()\n"
        "assert secret not in '\\n'.join(comm.recent_operations())\n"
        "print('secret', secret)\n"
    )
    done = run([*doors()["python"], "-n", "2", str(program)], env={"UNISONO_LOG": "debug"})
    assert done.code == 0, done
    secrets = {line.split()[-1] for line in done.out}
    assert len(secrets) == 1
    assert len(secret := secrets.pop()) == 64
    assert done.err, "the log is on"
    assert secret not in "\n".join(done.err)


def refusal() -> str:
    try:
        unisono.init()
    except unisono.InvalidArgumentError as error:
        return str(error)
    return "joined"


def test_a_secret_file_that_others_can_read_is_refused_at_once(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef")
    secret.chmod(0o644)
    env = {"UNISONO_SECRET_FILE": str(secret)}
    for result in run_ranks(2, "test_store:refusal", timeout=40, env=env):
        assert f"chmod 600 {secret}" in result.value
    secret.chmod(0o600)
    assert [r.value for r in run_ranks(2, "test_store:refusal", timeout=40, env=env)] == [
        "joined",
        "joined",
    ]


def join_with_a_flood() -> int:
    """Joins while silent connections are made to the store; how many there were."""
    flood = []
    if os.environ["RANK"] == "1":
        end = time.monotonic() + LIMIT
        while len(flood) < 600 and time.monotonic() < end:
            stranger = socket.socket()
            if stranger.connect_ex(("127.0.0.1", int(os.environ["MASTER_PORT"]))) == 0:
                flood.append(stranger)
            else:
                stranger.close()
                time.sleep(0.01)
    comm = unisono.init()
    comm.barrier()
    part = comm.split(0)
    part.barrier()
    descriptors = psutil.Process().num_fds() - len(flood)
    for stranger in flood:
        stranger.close()
    comm.barrier()
    return descriptors


def with_few_descriptors(_rank: int) -> list[str]:
    return ["prlimit", "--nofile=1024:1024"]


def test_a_group_forms_beside_silent_strangers():
    results = run_ranks(2, "test_store:join_with_a_flood", timeout=60, prefix=with_few_descriptors)
    # The rest of the flood is in the kernel's queue, not in the process.
    assert all(result.value < 400 for result in results), results
