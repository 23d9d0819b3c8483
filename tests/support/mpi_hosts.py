"""MPI's launchers on the hosts of `namespaces`: what stands for ssh, and names for the hosts.

The namespaces have one host name, by which an MPI would take them for one host. So each launcher
and each of its daemons gets a name of its own, in a namespace for names.
"""

from __future__ import annotations

import shlex
import socket
from collections.abc import Sequence
from pathlib import Path

from namespaces import Hosts


def name_of(host: int) -> str:
    """A name for a host."""
    return f"unisono-host-{host}"


def open_mpi(
    net: Hosts, launcher: Path, ranks: Sequence[int], by: str, words: Sequence[str], folder: Path
) -> list[str]:
    """Return the command that starts Open MPI's ranks, ``ranks`` on each host, from the first host.

    ``by`` is ``slot``, which fills host after host, or ``node``, which takes them in turn.
    ``words`` are further options and the program.
    """
    command = [str(launcher), "-n", str(sum(ranks)), "--host", _list(ranks), "--map-by", by]
    command += ["--prtemca", "plm_ssh_agent", str(_agent(net, folder))]
    command += ["--prtemca", "plm_ssh_no_tree_spawn", "1", "--prtemca", "prte_if_include", "eth0"]
    return _on_first(net, [*command, *words])


def mpich(
    net: Hosts, launcher: Path, ranks: Sequence[int], words: Sequence[str], folder: Path
) -> list[str]:
    """Return the command that starts MPICH's ranks, ``ranks`` on each host, from the first host."""
    command = [str(launcher), "-n", str(sum(ranks)), "-hosts", _list(ranks), "-iface", "eth0"]
    command += ["-launcher", "rsh", "-launcher-exec", str(_agent(net, folder))]
    return _on_first(net, [*command, *words])


def _list(ranks: Sequence[int]) -> str:
    return ",".join(f"{name_of(host)}:{count}" for host, count in enumerate(ranks))


def _agent(net: Hosts, folder: Path) -> Path:
    """Write what stands for ssh, and let the hosts know each other by name.

    As over ssh, what it starts has none of the variables here.
    """
    places = range(len(net.names))
    cases = [f"{name_of(host)}) enter='{shlex.join(net.enter(host))}' ;;" for host in places]
    within = """exec $enter env -i PATH="$PATH" HOME="$HOME" unshare --uts """
    within += """sh -c 'hostname "$0"; exec sh -c "$*"' "$host" "$@\""""
    lines = ["#!/bin/sh", "host=$1", "shift", "case $host in", *cases, "esac", within]
    agent = folder / "agent"
    agent.write_text("\n".join(lines) + "\n")
    agent.chmod(0o700)
    names = {name_of(host): net.address(host) for host in places}
    for host in places:
        net.name_hosts(host, {**names, socket.gethostname(): net.address(host)})
    return agent


def _on_first(net: Hosts, command: Sequence[str]) -> list[str]:
    own = ["unshare", "--uts", "sh", "-c", f"hostname {name_of(0)}; exec {shlex.join(command)}"]
    return [*net.enter(0), *own]
