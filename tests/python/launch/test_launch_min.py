"""``unisono launch --min``: a job that goes on when a rank fails, and starts it again."""

from __future__ import annotations

import signal

import pytest
from launching import ROOT, doors, run, script

EXAMPLE = ROOT / "examples" / "numpy" / "elastic.py"
# Each step a sum of all ranks; a rank that fails is waited for.
STEPS = """
import numpy as np, random, unisono
with open(__file__ + os.environ["RANK"], "a") as file:
    life = file.write("x") and file.tell()
comm, step = unisono.init(), np.zeros(1)

def die(*steps):
    if step[0] in steps:
        os.kill(os.getpid(), signal.SIGKILL)

def heal(comm):
    left = comm.{left}()
    comm.close()
    try:
        whole = left.grow(timeout=50)
    except unisono.Error:
        return heal(left)
    left.close()
    return whole

is_shared = False
while step[0] < 30:
    try:
        if not is_shared:
            step[0] = comm.all_gather(step).max()
            is_shared = True
        if len(comm.newcomers) == comm.size:
            {first}
        {always}
        total = np.full(1000, comm.rank + 1.0)
        comm.all_reduce(total)
        assert (total == comm.size * (comm.size + 1) / 2).all(), total
        step += 1
    except unisono.Error as error:
        comm, is_shared = heal(comm), False
print(f"rank {{comm.rank}} of {{comm.size}}")
"""


def steps(tmp_path, first="pass", always="pass", left="shrink"):
    return str(script(tmp_path, STEPS.format(first=first, always=always, left=left)))


def all_of(world):
    return [f"[{rank}] rank {rank} of {world}" for rank in range(world)]


def test_the_example(launch):
    done = run([*launch, "-n", "4", "--min", "3", str(EXAMPLE)])
    line = "[0] rank 0: 4 ranks have trained as one would; came later: [1]"
    assert (done.code, done.out) == (0, [line]), done
    assert len(done.err) == 1, done.err
    assert done.err[0].startswith("unisono launch: rank 1 of 4 failed after "), done.err
    assert done.err[0].endswith(": killed by SIGKILL; started again (1 of 3)"), done.err


@pytest.mark.parametrize(
    "first",
    ["comm.rank == 0 and die(7)", "comm.rank in (0, 3) and die(7)", "comm.rank == 1 and die(0)"],
    ids=["rank 0, which served the store", "two at once", "before the first call"],
)
def test_ranks_are_replaced(first, tmp_path):
    command = [*doors()["python"], "-n", "4", "--min", "2", steps(tmp_path, first)]
    done = run(command)
    assert (done.code, sorted(done.out)) == (0, all_of(4)), done
    assert done.err
    assert all("started again (1 of 3)" in line for line in done.err), done.err


@pytest.mark.parametrize("seed", range(3))
def test_deaths_one_after_the_other(seed, tmp_path):
    # Each of three ranks is killed in each of its lives but the last, when it likes.
    likes = f"random.Random(f'{seed} {{os.getpid()}} {{step}}').random() < 0.2"
    always = f"comm.rank and life < 3 and {likes} and die(*range(25))"
    program = steps(tmp_path, always=always, left="mask" if seed else "shrink")
    done = run([*doors()["python"], "-n", "4", "--min", "1", "--restarts", "2", program])
    assert (done.code, sorted(done.out)) == (0, all_of(4)), done
    assert sum("started again" in line for line in done.err) > 1, done.err


def test_fewer_than_the_least_end_the_job(launch, tmp_path):
    program = steps(tmp_path, "comm.rank == 1 and die(5)")
    done = run([*launch, "-n", "3", "--min", "3", program])
    assert done.code == 128 + signal.SIGKILL, done
    assert "failed first" in done.err[0], done.err


def test_a_rank_that_fails_again_and_again_is_given_up(launch, tmp_path):
    # Those that are left do not wait for it, once it has begun for the last time.
    text = """
lives = __file__ + ".lives"
with open(lives, "a") as file:
    if os.environ["RANK"] == "2":
        file.write("x")
        file.flush()
        sys.exit(3)
while os.path.getsize(lives) < 2:
    time.sleep(0.05)
time.sleep(2)
"""
    command = [*launch, "-n", "3", "--min", "2", "--restarts", "1"]
    done = run([*command, "--output", str(tmp_path / "logs"), str(script(tmp_path, text))])
    assert done.code == 0, done
    assert [line.partition(": exit code 3; ")[2] for line in done.err] == [
        "started again (1 of 1)",
        "the others go on",
    ], done.err


def test_output_of_all_lives(launch, tmp_path):
    text = """
print("here", flush=True)
if os.environ["RANK"] == "1" and not os.path.exists("x"):
    open("x", "w")
    os.abort()
if os.environ["RANK"] == "1":
    open("y", "w")
while not os.path.exists("y"):
    time.sleep(0.05)
"""
    program = str(script(tmp_path, text))
    command = [*launch, "-n", "2", "--min", "1"]
    done = run([*command, program], cwd=tmp_path)
    assert (done.code, sorted(done.out)) == (0, ["[0] here", "[1] here", "[1] here"]), done
    for name in "xy":
        (tmp_path / name).unlink()
    done = run([*command, "--output", str(tmp_path / "logs"), program], cwd=tmp_path)
    assert (tmp_path / "logs" / "rank-1.out").read_text() == "here\nhere\n", done


def test_a_rank_that_is_killed_while_it_joins(tmp_path):
    """Another process has its number then, and its entry in the store."""
    text = """
import numpy as np, threading, unisono
rank, mark = int(os.environ["RANK"]), __file__ + ".killed"
if rank == 2 and not os.path.exists(mark):
    open(mark, "w").close()
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
elif rank == 1:
    while not os.path.exists(mark):
        time.sleep(0.01)
    time.sleep(2.5)
comm = unisono.init()
assert comm.all_reduce(np.ones(1))[0] == 3
print(rank)
"""
    command = [*doors()["python"], "-n", "3", "--min", "2", str(script(tmp_path, text))]
    done = run(command)
    assert (done.code, sorted(done.out)) == (0, ["[0] 0", "[1] 1", "[2] 2"]), done


def test_the_next_grow_after_one_in_vain(tmp_path):
    """Ranks 0 and 3 are gone, and the second of them comes late."""
    text = """
import numpy as np, unisono
rank, folder = int(os.environ["RANK"]), os.path.dirname(__file__)
life = os.path.join(folder, f"life-{rank}")
is_first = not os.path.exists(life)
open(life, "a").close()
if rank == 3 and not is_first:
    time.sleep(4)
comm = unisono.init()
if is_first and rank in (0, 3):
    comm.barrier()
    os.kill(os.getpid(), signal.SIGKILL)
if is_first:
    comm.barrier()
    try:
        comm.barrier()
    except unisono.Error:
        left, vain = comm.shrink(), 0
    while left.size < 4:
        try:
            comm = left = left.grow(timeout=2)
        except unisono.Error as error:
            vain += 1
            assert left.all_reduce(np.ones(1))[0] == 2
    assert vain > 0
assert comm.all_reduce(np.ones(1))[0] == 4
print(rank)
"""
    # A meeting in vain ends those that had come, too.
    command = [*doors()["python"], "-n", "4", "--min", "2", "--restarts", "9"]
    done = run([*command, str(script(tmp_path, text))])
    assert (done.code, sorted(done.out)) == (0, [f"[{r}] {r}" for r in range(4)]), done


@pytest.fixture
def near(launch: list[str], tmp_path) -> list[str]:
    """The launcher, with all hosts on this one."""
    stand_in = tmp_path / "stand-in"
    stand_in.write_text('#!/bin/sh\nexec sh -c "$2"\n')
    stand_in.chmod(0o755)
    return [*launch, "--ssh", str(stand_in), "--master-addr", "127.0.0.1", "--hosts"]


def test_ranks_of_hosts_are_replaced(near, tmp_path):
    program = steps(tmp_path, "comm.rank in (0, 3) and die(7)")
    done = run([*near, "a:2,b:2", "--min", "3", program])
    assert (done.code, sorted(done.out)) == (0, all_of(4)), done
    assert len(done.err) == 2, done.err
    for host in "ab":
        assert any(line.startswith(f"unisono launch on {host}: rank ") for line in done.err), done
    assert all(line.endswith("; started again (1 of 3)") for line in done.err), done.err


FEWER = """
import numpy as np, unisono
comm, step = unisono.init(), 0
while step < 20:
    if step == 5 and comm.size == 4 and comm.rank in {dies}:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        comm.all_reduce(np.ones(10))
        step += 1
    except unisono.Error:
        before, comm = comm, comm.shrink()
        before.close()
print(f"rank {{comm.rank}} of {{comm.size}}")
"""


def test_a_host_whose_ranks_have_all_failed_is_let_go(near, tmp_path):
    program = str(script(tmp_path, FEWER.format(dies=(2, 3))))
    done = run([*near, "a:2,b:2", "--min", "2", "--restarts", "0", program])
    left = ["[0] rank 0 of 2", "[1] rank 1 of 2"]
    assert (done.code, sorted(done.out)) == (0, left), done
    assert any("unisono launch: b (ranks 2-3) failed, after" in line for line in done.err), done
    assert done.err[-1].endswith("the others go on"), done


def test_fewer_than_the_least_on_all_hosts_end_the_job(near, tmp_path):
    program = str(script(tmp_path, FEWER.format(dies=(2, 3))))
    done = run([*near, "a:2,b:2", "--min", "3", "--restarts", "0", program])
    assert done.code == 128 + signal.SIGKILL, done
    assert any("b (ranks 2-3) failed first" in line for line in done.err), done
