"""Slurm on this machine: a controller and two nodes of four CPUs, each a network namespace.

Nothing of it touches the machine's own Slurm, if there is one: configuration, keys, state and
sockets lie in a folder of their own. The daemons stay children of this process, and end with it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from launching import Done
from namespaces import Hosts, hosts, why_not
from ranks import PATIENCE

PROGRAMS = ["munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "sinfo"]
NODES = ["node1", "node2"]
START = 30.0 * PATIENCE

CONFIGURATION = """
ClusterName=unisono
SlurmctldHost=node1({controller})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
MailProg=/bin/true
# No control groups: they would be those of the machine.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# Nodes with other CPUs than the machine has.
SlurmdParameters=config_overrides
ReturnToService=2
PropagateResourceLimits=NONE
KillWait=2
{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why there is no Slurm here, if there is none."""
    absent = [program for program in PROGRAMS if which(program) is None]
    if absent:
        return f"{', '.join(absent)}: not installed (on Debian: apt-get install slurm-wlm munge)"
    return why_not()


def which(program: str) -> str | None:
    return shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def version() -> tuple[int, int]:
    said = subprocess.run([which("slurmd"), "-V"], check=True, capture_output=True, text=True)
    return tuple(map(int, re.search(r"(\d+)\.(\d+)", said.stdout).groups()))


class Slurm:
    """A running cluster. Commands run on its first node, as on a node for logging in."""

    def __init__(self, folder: Path, net: Hosts) -> None:
        self.folder = folder
        self.net = net
        self.daemons: list[tuple[str, subprocess.Popen]] = []

    def configure(self) -> None:
        addresses = dict(zip(NODES, map(self.net.address, range(len(NODES))), strict=True))
        for host in range(len(NODES)):
            self.net.name_hosts(host, addresses)
        nodes = [f"NodeName={name} NodeAddr={at} CPUs=4" for name, at in addresses.items()]
        text = CONFIGURATION.format(
            controller=self.net.address(0),
            folder=self.folder,
            nodes="\n".join(nodes),
            names=",".join(NODES),
        )
        (self.folder / "slurm.conf").write_text(text)
        plugin = "disabled" if version() >= (23, 11) else "cgroup/v1"
        (self.folder / "cgroup.conf").write_text(f"CgroupPlugin={plugin}\n")
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)

    def start(self) -> None:
        folder = self.folder
        files = [f"--{kind}-file={folder}/munge.{kind}" for kind in ("key", "pid", "log", "seed")]
        self.daemon("munged", [], "--foreground", f"--socket={folder}/munge.socket", *files)
        wait_until((folder / "munge.socket").exists, "munged", self)
        self.daemon("slurmctld", self.enter(0), "-D", "-i", "-f", f"{folder}/slurm.conf")
        for host, node in enumerate(NODES):
            (folder / f"spool-{node}").mkdir()
            arguments = ["-D", "-N", node, "-f", f"{folder}/slurm.conf"]
            self.daemon("slurmd", self.enter(host), *arguments)
        wait_until(self.is_ready, "both nodes to be idle", self)

    def enter(self, host: int) -> list[str]:
        """The command that becomes the one after it, on a node that also has a name of its own."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', NODES[host]]
        return [*self.net.enter(host), *named]

    def daemon(self, program: str, prefix: list[str], *arguments: str) -> None:
        name = f"{program}-{len(self.daemons)}"
        # Each command becomes the next, and so stays the child that ends with this process.
        command = ["setpriv", "--pdeathsig", "KILL", *prefix, which(program), *arguments]
        with (self.folder / f"{name}.out").open("wb") as output:
            process = subprocess.Popen(
                command,
                env=self.environment({}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.daemons.append((name, process))

    def environment(self, more: Mapping[str, str]) -> dict[str, str]:
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("SLURM")
        }
        return {
            **inherited,
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": f"{inherited.get('PATH', '')}:/usr/sbin:/sbin",
            "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
            # A rank that gets SIGABRT says what it was in.
            "PYTHONFAULTHANDLER": "1",
            "UNISONO_JOIN_TIMEOUT": "30",
            "UNISONO_TIMEOUT": "30",
            **more,
        }

    def is_ready(self) -> bool:
        said = self.call("sinfo", "--noheader", "--Node", "--format=%T")
        return said.code == 0 and said.out == ["idle"] * len(NODES)

    def call(self, *command: str) -> Done:
        """A command that ends at once."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                [*self.enter(0), *command],
                env=self.environment({}),
                capture_output=True,
                text=True,
                timeout=15,
                check=False,
            )
            return Done(done.returncode, done.stdout.splitlines(), done.stderr.splitlines())
        return Done(-1, [], ["timeout"])

    def run(
        self, *command: str, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 60
    ) -> Done:
        """Run a command that starts a job and ends with it; past the limit, say where it was."""
        process = subprocess.Popen(
            [*self.enter(0), *command],
            cwd=cwd,
            env=self.environment(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=timeout * PATIENCE)
        except subprocess.TimeoutExpired:
            self.call("scancel", "--signal=ABRT", "--user=root")
            time.sleep(2)
            process.kill()
            out, err = process.communicate()
            files = "\n".join(path.read_text() for path in sorted(cwd.glob("*.out")))
            said = f"{out}\nerrors, stacks last:\n{err}\n{files}\n{self.logs()}"
            pytest.fail(f"{command} outlived {timeout} s\n{said}")
        return Done(process.returncode, out.splitlines(), err.splitlines())

    def logs(self) -> str:
        """The last lines of all daemons."""
        parts = []
        for path in sorted(self.folder.glob("*.out")):
            tail = path.read_text(errors="replace").splitlines()[-25:]
            parts.append("\n".join([f"{path.name}:", *tail]))
        return "\n".join(parts)

    def end(self) -> None:
        """End all jobs, then the daemons. The remains of a job go with the namespaces."""
        if len(self.daemons) > 1 and self.call("squeue", "--noheader").out:
            self.call("scancel", "--full", "--signal=KILL", "--user=root")
            time.sleep(1)
        for _, process in reversed(self.daemons):
            process.terminate()
        for _, process in reversed(self.daemons):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()


def wait_until(holds, what: str, slurm: Slurm) -> None:
    deadline = time.monotonic() + START
    while not holds():
        ended = [name for name, process in slurm.daemons if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            pytest.fail(f"waited for {what}; ended by then: {ended}\n{slurm.logs()}")
        time.sleep(0.1)


@contextlib.contextmanager
def cluster() -> Iterator[Slurm]:
    """Start a cluster, and end it whatever happens."""
    folder = Path(tempfile.mkdtemp(prefix="unisono-slurm-"))
    # munged wants its socket where every user can get to it.
    folder.chmod(0o755)
    try:
        with hosts(len(NODES)) as net:
            slurm = Slurm(folder, net)
            try:
                slurm.configure()
                slurm.start()
                yield slurm
            finally:
                slurm.end()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
