"""The parts of a job that others on the host and the network can reach, and those they cannot."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
import time
from pathlib import Path

import numpy as np
import pytest
from ranks import run_ranks

OURS = "test_security"
LOOPBACK = "0100007F"
LISTENING = "0A"
STANDARD_STREAMS = 3


def own_sockets() -> set[str]:
    """The inodes of this process's sockets."""
    own = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        if found := re.fullmatch(r"socket:\[(\d+)\]", target):
            own.add(found[1])
    return own


def listening() -> set[str]:
    """The addresses that sockets of this process listen at, as /proc/net/tcp shows them."""
    own = own_sockets()
    lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    rows = [line.split() for line in lines]
    return {row[1].split(":")[0] for row in rows if row[3] == LISTENING and row[9] in own}


def listens_in_torch(method: str | None) -> set[str]:
    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # A rank 0 that serves torch's own store listens with that everywhere; its port is given here.
    before = listening()
    dist.init_process_group("unisono", method, rank=rank, world_size=world)
    dist.barrier()
    return listening() if rank else listening() - before


def listens_in_numpy() -> set[str]:
    import unisono

    comm = unisono.init()
    comm.barrier()
    return listening()


def without_local_ranks(rank: int) -> dict[str, str]:
    # Nothing but the address of the master says that all ranks are here.
    return {"LOCAL_WORLD_SIZE": "", "LOCAL_RANK": ""}


@pytest.mark.parametrize("launched", [True, False])
def test_a_torch_job_of_one_host_listens_on_loopback_alone(launched: bool) -> None:
    pytest.importorskip("torch.distributed")
    env = None if launched else without_local_ranks
    results = run_ranks(3, f"{OURS}:listens_in_torch", None, torch=True, env=env)
    for result in results[1:]:
        assert result.value == {LOOPBACK}, result.report()


def test_a_job_of_one_host_listens_on_loopback_alone() -> None:
    for result in run_ranks(2, f"{OURS}:listens_in_numpy"):
        assert result.value == {LOOPBACK}, result.report()


def listens_after_meeting(url: str) -> set[str]:
    """Where this process listens after the ranks have met, once what is closed then is closed."""
    import time

    import unisono

    comm = unisono.init(url, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    comm.barrier()
    until = time.monotonic() + 10
    while listening() != {LOOPBACK} and time.monotonic() < until:
        time.sleep(0.01)
    return listening()


def test_ranks_that_turn_out_to_be_on_one_host_listen_on_loopback_alone(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    results = run_ranks(2, f"{OURS}:listens_after_meeting", url, env=without_local_ranks)
    for result in results:
        assert result.value == {LOOPBACK}, result.report()


def sums_as_users(encrypt: bool) -> tuple[float, list[str]]:
    """A sum of ranks where rank 1 has another user, and the memory that this rank has mapped."""
    import unisono

    rank = int(os.environ["RANK"])
    if rank == 1:
        os.seteuid(65534)
    options = unisono.Options(timeout=30, encrypt="on" if encrypt else "off")
    comm = unisono.init(options=options)
    array = np.full(1 << 20, comm.rank + 1.0, np.float32)
    comm.all_reduce(array)
    comm.barrier()
    os.seteuid(0)
    maps = Path("/proc/self/maps").read_text().splitlines()
    inodes = {line.split()[4] for line in maps if "memfd:unisono" in line}
    return float(array[-1]), sorted(inodes)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize("encrypt", [False, True])
def test_a_rank_of_another_user_takes_part_over_tcp(encrypt: bool) -> None:
    results = run_ranks(3, f"{OURS}:sums_as_users", encrypt, timeout=90)
    for result in results:
        assert result.value[0] == 6.0
        warnings = [line for line in result.output.splitlines() if "WARN" in line]
        # There is no secret here, which each rank says once where it matters.
        assert len(warnings) == encrypt, result.report()
        assert all("encryption without a secret" in line for line in warnings)
    # Its own heap at most: neither rings nor the heap of another user's rank.
    assert len(results[1].value[1]) <= 1, results[1].value[1]


def joins_again(rounds: int) -> list[float]:
    """The sums of groups that this process joins in one store, one after the other."""
    import torch
    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, world, rank == 0)
    sums = []
    for turn in range(rounds):
        dist.init_process_group("unisono", store=store, rank=rank, world_size=world)
        tensor = torch.full((10,), float(rank + turn))
        dist.all_reduce(tensor)
        sums.append(tensor[0].item())
        dist.destroy_process_group()
    # The store is rank 0's, which goes last.
    store.set(f"done {rank}", "")
    if rank == 0:
        store.wait([f"done {other}" for other in range(world)])
    return sums


def test_one_store_serves_group_after_group() -> None:
    pytest.importorskip("torch.distributed")
    for result in run_ranks(3, f"{OURS}:joins_again", 5, torch=True):
        assert result.value == [3.0 + 3 * turn for turn in range(5)]


def sums_encrypted(count: int) -> tuple[bool, list[str]]:
    import unisono

    comm = unisono.init(options=unisono.Options(timeout=60, transport="tcp", encrypt="on"))
    rng = np.random.default_rng(comm.rank)
    array = rng.integers(0, 100, count).astype(np.int64)
    gathered = comm.all_gather(array)
    expected = gathered.sum(axis=0)
    comm.all_reduce(array)
    right = bool((array == expected).all())
    other = (comm.rank + 1) % comm.size
    echo = np.empty_like(array)
    comm.sendrecv(array, other, echo, (comm.rank - 1) % comm.size)
    return right and bool((echo == array).all()), []


@pytest.mark.parametrize("count", [1, 1000, 300_000])
def test_encrypted_ranks_agree(count: int) -> None:
    for result in run_ranks(4, f"{OURS}:sums_encrypted", count, timeout=120):
        assert result.value[0], result.report()


def joins_with(value: str) -> str:
    import unisono

    try:
        encrypt = value if os.environ["RANK"] == "0" else False
        unisono.init(options=unisono.Options(join_timeout=20, encrypt=encrypt))
    except unisono.Error as error:
        return str(error)
    return "joined"


def test_ranks_that_disagree_on_encryption_are_told() -> None:
    for result in run_ranks(2, f"{OURS}:joins_with", "on"):
        assert "setting encrypt must be the same on all ranks" in result.value


def flood(name: str, seconds: float) -> int:
    """The pid of a process, another user's if that can be, that connects to a socket of this one.

    It says nothing or nonsense, and holds the connections that it has. It is forked: another user
    may not be able to start this interpreter.
    """
    pid = os.fork()
    if pid != 0:
        return pid
    status = 1
    try:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
        family = socket.AF_INET if name.isdigit() else socket.AF_UNIX
        target = ("127.0.0.1", int(name)) if name.isdigit() else "\0" + name
        held, until = [], time.monotonic() + seconds
        while time.monotonic() < until:
            stranger = socket.socket(family)
            stranger.setblocking(False)
            with contextlib.suppress(OSError):
                stranger.connect(target)
            with contextlib.suppress(OSError):
                stranger.send(b"x" if len(held) % 2 else b"unisono\n" + bytes(90))
            held.append(stranger)
            if len(held) > 800:
                held.pop(0).close()
        status = 0
    finally:
        os._exit(status)


def where_it_listens(kind: str) -> str:
    """The port or the name in the abstract namespace at which this rank's endpoint listens."""
    own = own_sockets()
    if kind == "unix":
        rows = [line.split() for line in Path("/proc/self/net/unix").read_text().splitlines()[1:]]
        names = [row[7] for row in rows if len(row) > 7 and row[6] in own]
        return next(name[1:] for name in names if name.startswith("@unisono-"))
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    ports = [row[1].split(":")[1] for row in rows if row[3] == LISTENING and row[9] in own]
    return str(int(ports[0], 16))


def counts_under_a_flood(kind: str, seconds: float) -> tuple[int, int, int]:
    """The threads and descriptors that a flood costs rank 0, and the groups formed meanwhile."""
    import unisono

    comm = unisono.init()
    comm.barrier()
    floods = []

    def count() -> tuple[int, int]:
        return len(list(Path("/proc/self/task").iterdir())), len(
            list(Path("/proc/self/fd").iterdir())
        )

    usual, most = count(), (0, 0)
    if comm.rank == 0:
        floods = [flood(where_it_listens(kind), seconds) for _ in range(3)]
    links, go_on = 0, np.ones(1)
    until = time.monotonic() + seconds
    while True:
        go_on[0] = time.monotonic() < until
        comm.broadcast(go_on)
        if not go_on[0]:
            break
        part = comm.split(0)
        part.barrier()
        most = tuple(map(max, most, count()))
        part.close()
        links += 1
    for pid in floods:
        assert os.waitpid(pid, 0)[1] == 0
    comm.barrier()
    return most[0] - usual[0], most[1] - usual[1], links


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_flood_before_the_handshake_costs_no_threads(kind: str) -> None:
    if kind == "unix" and os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    env = {"UNISONO_TRANSPORT": "shm" if kind == "unix" else "tcp"}
    target = f"{OURS}:counts_under_a_flood"
    threads, descriptors, links = run_ranks(2, target, kind, 1.5, env=env)[0].value
    # Those on which the links of the new groups are made, and the connections that have a place.
    assert threads <= 24, f"{threads} threads"
    assert descriptors <= 64 + 24, f"{descriptors} descriptors"
    assert links > 0


def sends_without_descriptors() -> str:
    """The outcome of a first message when its sender, rank 0, has no descriptor left for it."""
    import unisono

    comm = unisono.init()
    comm.barrier()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if comm.rank == 0:
        # Files that fill the table would not do: whatever another thread closes leaves room again.
        resource.setrlimit(resource.RLIMIT_NOFILE, (STANDARD_STREAMS, before[1]))
    # The receive opens the link from its side at once, and rank 0 could accept that before.
    comm.barrier()
    try:
        if comm.rank == 0:
            comm.send(np.ones(1), 1)
        else:
            comm.recv(np.empty(1), 0)
    except unisono.Error as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    return "sent"


def test_a_rank_without_descriptors_does_not_blame_its_peer() -> None:
    results = run_ranks(2, f"{OURS}:sends_without_descriptors")
    said = [result.value for result in results]
    assert "this process has no more" in said[0]
    assert "told by rank 0" in said[1]
