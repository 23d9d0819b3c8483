"""A network with a rate, a delay and losses, carried packet by packet in user space.

The kernel's netem does this where it is built in, which is not everywhere. Each host of
`namespaces` gets a TUN device as its interface, and a process of its own, which runs this file,
carries what the hosts send: a packet waits for its sender's link, goes over it at its rate,
travels, and may be lost on the way. A packet that finds the queue of a link full is lost too, as in
a router.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import astuple, dataclass

TUN, SET_INTERFACE = "/dev/net/tun", 0x400454CA
LAYER_3_WITHOUT_HEADER = 0x0001 | 0x1000
# Large, as in data centres: a packet costs the carrier the same whatever its length.
MTU = 9000
# Packets that are taken from one host before it is another one's turn.
TURN = 64
# A host's number is the last byte of its address less one.
DESTINATION = 19


@dataclass(frozen=True)
class Link:
    """The connection of each host to the others, in each direction."""

    rate: float = 0
    """Bits per second; 0 is without limit."""
    delay: float = 0
    """Seconds from one host to another; a packet may take a millisecond more."""
    loss: float = 0
    """The share of packets that is lost, from 0 to 1."""
    queue: int = 4 << 20
    """Bytes that wait for a link at most."""


class Carrier:
    """The process that carries the packets between hosts."""

    def __init__(
        self,
        link: Link,
        hosts: int,
        adopt: Callable[[int, str], None],
    ) -> None:
        """Make an interface for each host, which ``adopt`` moves to the host by its name."""
        with ExitStack() as stack:
            self.devices = []
            for host in range(hosts):
                device = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
                stack.callback(os.close, device)
                self.devices.append(device)
                wanted = struct.pack("16sH22x", b"unisono%d", LAYER_3_WITHOUT_HEADER)
                made = fcntl.ioctl(device, SET_INTERFACE, wanted)
                adopt(host, made[:16].rstrip(b"\0").decode())
            command = [sys.executable, __file__, *map(str, (*astuple(link), *self.devices))]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=self.devices)
            self.close = stack.pop_all().close

    def cut(self) -> None:
        """Take nothing more until `heal`; what is under way arrives."""
        self._say(b"-")

    def heal(self) -> None:
        """Carry again."""
        self._say(b"+")

    def _say(self, word: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word)
        self.process.stdin.flush()

    def end(self) -> None:
        """Stop, and take the interfaces away."""
        self.process.kill()
        with suppress(OSError):
            self.process.communicate()
        self.close()


class Network:
    """The packets that are under way between the hosts."""

    def __init__(self, link: Link, devices: Sequence[int]) -> None:
        self.link = link
        self.devices = devices
        self.is_cut = False
        # When each host's link is free, out and in.
        self.out = [0.0] * len(devices)
        self.into = [0.0] * len(devices)
        self.travelling: list[tuple[float, int, int, bytes]] = []
        self.numbers = itertools.count()

    def seconds(self, packet: bytes) -> float:
        return len(packet) * 8 / self.link.rate if self.link.rate else 0.0

    def take(self, source: int) -> None:
        """Take what a host sends."""
        for _ in range(TURN):
            try:
                packet = os.read(self.devices[source], MTU + 64)
            except BlockingIOError:
                return
            if self.is_for_a_host(packet):
                self.send(source, packet)

    def is_for_a_host(self, packet: bytes) -> bool:
        # IPv4 alone: a host also speaks of itself to neighbours of version 6.
        return packet[0] >> 4 == 4 and 0 < packet[DESTINATION] <= len(self.devices)

    def send(self, source: int, packet: bytes) -> None:
        now, target = time.monotonic(), packet[DESTINATION] - 1
        begun = max(now, self.out[source])
        waiting = (begun - now) * self.link.rate / 8
        if self.is_cut or waiting > self.link.queue or random.random() < self.link.loss:
            return
        self.out[source] = begun + self.seconds(packet)
        arriving = max(self.out[source] + self.link.delay, self.into[target] + self.seconds(packet))
        self.into[target] = arriving
        heapq.heappush(self.travelling, (arriving, next(self.numbers), target, packet))

    def deliver(self) -> float | None:
        """Deliver what has arrived; returns after how many seconds more will have."""
        while self.travelling:
            wait = self.travelling[0][0] - time.monotonic()
            if wait > 0:
                return wait
            _, _, target, packet = heapq.heappop(self.travelling)
            # A host that is full loses it; one whose interface is down takes nothing.
            with suppress(OSError):
                os.write(self.devices[target], packet)
        return None


def carry(link: Link, devices: Sequence[int]) -> None:
    """Carry packets until standard input ends, with the process that started this."""
    network = Network(link, devices)
    poll = select.epoll()
    for device in (sys.stdin.fileno(), *devices):
        poll.register(device, select.EPOLLIN)
    places = {device: host for host, device in enumerate(devices)}
    while True:
        for ready, _ in poll.poll(network.deliver()):
            if ready in places:
                network.take(places[ready])
                continue
            said = os.read(ready, 1)
            if not said:
                return
            network.is_cut = said == b"-"


if __name__ == "__main__":
    rate, delay, loss, queue, *devices = sys.argv[1:]
    carry(Link(float(rate), float(delay), float(loss), int(queue)), list(map(int, devices)))
