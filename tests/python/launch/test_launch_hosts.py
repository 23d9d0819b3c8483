"""``unisono launch --hosts``: over OpenSSH, and over a stand-in that does what ssh may do."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from launching import LIMIT, SUM, alive, finish, pids, run, script, shell, started, until
from namespaces import hosts, why_not
from ranks import free_port

# Runs a command line as ssh has a host run it: in another folder, and after a greeting.
STAND_IN = """#!/bin/sh
cd /
echo "Welcome to $1"
case $1 in
  unknown) exit 255;;
  silent) : > "$0.started"; exec sleep 1000;;
  menu) exit 0;;
esac
printf "$1> "
exec sh -c "$2"
"""


@pytest.fixture
def near(launch: list[str], tmp_path: Path) -> list[str]:
    """The launcher, with all hosts on this one."""
    stand_in = tmp_path / "stand-in"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    return [*launch, "--ssh", str(stand_in), "--master-addr", "127.0.0.1", "--hosts"]


def said(lines: list[str], *parts: str) -> bool:
    """Whether one of the lines has all these parts."""
    return any(all(part in line for part in parts) for line in lines)


def test_every_rank_knows_its_place(near, tmp_path):
    tell = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR $PWD $ASKED; wc -c"
    command = [*near, "a:2,b:1", "--env", "ASKED=yes", *shell(tell)]
    done = run(command, "not for the ranks", cwd=tmp_path)
    assert done.code == 0
    places = ["0/3 0/2", "1/3 1/2", "2/3 0/1"]
    expected = [f"[{rank}] {place} 127.0.0.1 {tmp_path} yes" for rank, place in enumerate(places)]
    expected += [f"[{rank}] 0" for rank in range(3)]
    assert sorted(done.out) == sorted(expected)
    # Lines that hosts print at a login are not the ranks'.
    assert sorted(done.err) == ["Welcome to a", "Welcome to b", "a> ", "b> "]


def test_ranks_of_hosts_meet(near, tmp_path):
    done = run([*near, "a,b", "-n", "2", str(script(tmp_path, SUM))])
    assert done.code == 0, done
    for rank in range(4):
        assert f"[{rank}] rank {rank} of 4 has 10.0" in done.out


def test_the_secret_is_on_no_command_line(near, tmp_path):
    # On no command line of its own either: printf is the shell's.
    look = (
        'printf "%s\\n" "$UNISONO_LAUNCH_SECRET" > $RANK.secret; wc -c < $RANK.secret;'
        " cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' | grep -c -f $RANK.secret; true"
    )
    done = run([*near, "a:1,b:1", *shell(look)], cwd=tmp_path)
    assert done.code == 0, done
    expected = ["[0] 0", "[0] 65", "[1] 0", "[1] 65"]
    assert sorted(line for line in done.out if line[0] == "[") == expected


def test_a_failure_ends_all_hosts(near, tmp_path):
    body = "echo $$ > $RANK.pid; sleep 100 & echo $! > $RANK-left.pid; [ $RANK = 2 ] || wait;"
    body += "until [ $(cat *.pid | wc -l) = 6 ]; do sleep 0.05; done; exit 7"
    with started([*near, "a:2,b:1", *shell(body)], cwd=tmp_path) as process:
        done = finish(process)
    assert done.code == 7
    assert said(done.err, "unisono launch on b: rank 2 of 3 failed first", "exit code 7")
    assert said(done.err, "unisono launch: b (rank 2) failed first", "exit code 7")
    assert not any(alive(pid) for pid in pids(tmp_path, 6))


def test_a_host_that_is_not_reached(near, tmp_path):
    done = run([*near, "a:2,unknown:2", "sleep", "100"], cwd=tmp_path)
    assert done.code == 255
    assert said(done.err, "unknown (ranks 2-3) failed first", "not reached", "ssh unknown true")
    first = run([*near, "unknown:2,a:2", "sleep", "100"], cwd=tmp_path)
    assert first.code == 255
    assert said(first.err, "unknown (ranks 0-1) failed first")


def test_what_a_host_lacks_is_said(near, tmp_path):
    done = run([*near, "a:1,b:1", "./no-such-program"], cwd=tmp_path)
    assert done.code == 127
    assert said(done.err, "unisono launch on ", ": cannot start ./no-such-program")
    elsewhere = tmp_path / "gone"
    elsewhere.mkdir()
    # The folder is gone by the time the first host looks for it.
    stand_in = tmp_path / "stand-in"
    stand_in.write_text(STAND_IN.replace("cd /", f"cd /; rmdir '{elsewhere}' 2>/dev/null"))
    done = run([*near, "a:1", "true"], cwd=elsewhere)
    assert done.code == 1
    assert said(done.err, "unisono launch on a: cannot start ranks on this host: no folder")


def test_no_host_without_numbers(launch):
    done = run([*launch, "--hosts", "a,b:2", "true"])
    assert done.code == 2
    assert said(done.err, "how many ranks a gets is not said")
    done = run([*launch, "--hosts", "localhost:1,b:1", "true"])
    assert done.code == 2
    assert said(done.err, "b does not reach localhost by that name", "--master-addr")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_all_hosts(near, sent, tmp_path):
    body = f"trap 'echo caught; exit 0' {sent.name[3:]}; echo $$ > $RANK.pid"
    body += "; while :; do sleep 0.05; done"
    with started([*near, "a:2,b:1", *shell(body)], cwd=tmp_path) as process:
        pids(tmp_path, 3)
        process.send_signal(sent)
        done = finish(process)
    assert done.code == 0
    assert [line for line in sorted(done.out) if "caught" in line] == [
        f"[{rank}] caught" for rank in range(3)
    ]


def test_nothing_outlives_a_launcher_that_is_killed(near, tmp_path):
    # SIGTERM is not enough for them.
    body = "trap '' TERM; echo $$ > $RANK.pid; while :; do sleep 0.05; done"
    command = [*near, "a:2,b:1", "--grace", "0.5", *shell(body)]
    with started(command, cwd=tmp_path) as process:
        ranks = pids(tmp_path, 3)
        process.kill()
        process.wait()
        until(lambda: not any(alive(pid) for pid in ranks), "the end of the ranks")


def test_a_host_that_does_not_answer_is_given_up(near, tmp_path):
    begun = time.monotonic()
    done = run([*near, "a:1,silent:1", "--grace", "0.1", *shell("exit 5")])
    assert done.code == 5
    assert said(done.err, "silent did not answer: its ranks may run on")
    assert time.monotonic() - begun < LIMIT / 2


@pytest.mark.parametrize("where", ["silent:1,a:1", "a:1,silent:1"])
def test_silent_hosts_can_be_interrupted(near, where, tmp_path):
    # An order that is longer than what a pipe holds.
    long = [word for name in "ABC" for word in ("--env", f"{name}=" + "x" * 60_000)]
    with started([*near, where, *long, "sleep", "1000"], cwd=tmp_path) as process:
        until((tmp_path / "stand-in.started").exists, "the silent host")
        deadline = time.monotonic() + LIMIT
        while process.poll() is None and time.monotonic() < deadline:
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)
        done = finish(process)
    assert done.code == 128 + signal.SIGINT
    assert said(done.err, "silent did not answer")


def test_a_host_that_runs_something_else_has_failed(near, tmp_path):
    for where in ("menu:1,a:1", "a:1,menu:1"):
        done = run([*near, where, "sleep", "1000"], cwd=tmp_path)
        assert done.code == 1, done
        assert said(done.err, "menu (rank ", "before it said that it starts them")


def test_a_failure_after_a_signal_that_was_survived(near, tmp_path):
    body = "trap '' HUP; echo $$ > $RANK.pid; [ $RANK = 1 ] && exec sleep 1000;"
    body += "until [ -e go ]; do sleep 0.05; done; exit 7"
    with started([*near, "a:1,b:1", *shell(body)], cwd=tmp_path) as process:
        pids(tmp_path, 2)
        process.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        (tmp_path / "go").touch()
        done = finish(process)
    assert done.code == 7, done
    assert said(done.err, "on a: rank 0 of 2 failed first")
    assert said(done.err, "a (rank 0) failed first", "exit code 7")


def test_a_crash_is_told_from_what_follows_from_it(near, tmp_path):
    """The host of the rank that crashed waits for its slow rank, so the other one ends first."""
    body = (
        "case $RANK in 2) until [ -e slow ]; do sleep 0.05; done; : >crashed; kill -SEGV $$;;"
        " 3) trap 'sleep 2; exit' TERM; : >slow;;"
        " *) until [ -e crashed ]; do sleep 0.05; done; sleep 1; exit 1;; esac"
    )
    done = run([*near, "a:2,b:2", *shell(body + "; while :; do sleep 0.05; done")], cwd=tmp_path)
    assert done.code == 128 + signal.SIGSEGV
    assert said(done.err, "on b: rank 2 of 4 failed first", "SIGSEGV")


def test_a_slow_reader_gets_every_line(near, tmp_path):
    lines = 20_000
    body = f"seq 1 {lines}; [ $RANK = 1 ] && exec sleep 1000; echo because >&2; exit 7"
    command = [*near, "a:1,b:1", "--grace", "0.5", *shell(body)]
    with started(command, cwd=tmp_path) as process:
        # Longer than the time for which hosts that were to end are waited for.
        time.sleep(12)
        done = finish(process)
    assert done.code == 7
    assert "[0] because" in done.err
    assert [line for line in done.out if line.startswith("[0]")] == [
        f"[0] {number}" for number in range(1, lines + 1)
    ]
    assert not said(done.err, "did not answer")


def test_plain_output_is_passed_on_as_it_is(near, tmp_path):
    body = "printf 'no end %s\\r' $RANK; printf \"\\n\\n\" >&2"
    done = run([*near, "a:1,b:1", "--output", "plain", *shell(body)], cwd=tmp_path)
    assert done.code == 0
    assert sorted("\n".join(done.out).split("\n")) == ["no end 0", "no end 1"]
    assert done.err.count("") == 4


def keys(folder: Path) -> None:
    for name in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True, timeout=LIMIT)


@contextmanager
def sshd(folder: Path, address: str, port: int, inside: list[str]) -> Iterator[None]:
    """OpenSSH's server for the key ``user`` of ``folder``, run by the command ``inside``."""
    config = folder / f"sshd-{address}"
    config.write_text(
        f"ListenAddress {address}\nPort {port}\nHostKey {folder / 'host'}\n"
        f"AuthorizedKeysFile {folder / 'user.pub'}\nStrictModes no\nUsePAM no\nPidFile none\n"
    )
    program = shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if program is None:
        pytest.skip("sshd is not installed (on Debian: apt-get install openssh-server)")
    # Where sshd confines itself, if it can.
    made = Path("/run/sshd")
    if os.geteuid() == 0 and not made.exists():
        made.mkdir(mode=0o755)
    else:
        made = None
    server = subprocess.Popen(
        [*inside, program, "-D", "-e", "-f", str(config)],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield
    finally:
        server.terminate()
        server.communicate(timeout=LIMIT)
        if made is not None:
            made.rmdir()


def client(folder: Path, port: int) -> str:
    config = folder / "ssh"
    config.write_text(
        f"Port {port}\nIdentityFile {folder / 'user'}\nIdentitiesOnly yes\nBatchMode yes\n"
        f"StrictHostKeyChecking no\nUserKnownHostsFile {folder / 'known'}\nLogLevel ERROR\n"
        "ConnectionAttempts 20\n"
    )
    return f"ssh -F {config} -T"


def test_over_ssh(launch, tmp_path):
    if shutil.which("ssh-keygen") is None:
        pytest.skip("OpenSSH is not installed (on Debian: apt-get install openssh-server)")
    keys(tmp_path)
    port = free_port()
    with ExitStack() as servers:
        for address in ("127.0.0.1", "127.0.0.2"):
            servers.enter_context(sshd(tmp_path, address, port, []))
        command = [*launch, "--ssh", client(tmp_path, port), "--hosts", "127.0.0.1:2,127.0.0.2:1"]
        done = run([*command, str(script(tmp_path, SUM))], cwd=tmp_path)
        assert done.code == 0, done
        assert [f"[{rank}] rank {rank} of 3 has 6.0" for rank in range(3)] == sorted(done.out)
        # The connection is lost, and not only the launcher.
        body = "echo $$ > $RANK.pid; exec sleep 100"
        with started([*command, *shell(body)], cwd=tmp_path) as process:
            ranks = pids(tmp_path, 3)
            process.kill()
            process.wait()
            until(lambda: not any(alive(pid) for pid in ranks), "the end of the ranks")


def test_over_ssh_between_hosts(launch, tmp_path):
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    if shutil.which("ssh-keygen") is None:
        pytest.skip("OpenSSH is not installed (on Debian: apt-get install openssh-server)")
    keys(tmp_path)
    with hosts(2) as pair, ExitStack() as servers:
        addresses = [pair.address(host) for host in range(2)]
        for host, address in enumerate(addresses):
            servers.enter_context(sshd(tmp_path, address, 2222, pair.enter(host)))
        command = [*pair.enter(0), *launch, "--ssh", client(tmp_path, 2222), "--hosts"]
        done = run([*command, ",".join(addresses), "-n", "2", str(script(tmp_path, SUM))])
        assert done.code == 0, done
        assert [f"[{rank}] rank {rank} of 4 has 10.0" for rank in range(4)] == sorted(done.out)
