"""Train a digit classifier by replicas that torchft manages; one is killed and comes back.

    pip install torchft scikit-learn
    python examples/frameworks/torchft_digits.py

The others go on in the step after, without a restart. The replica is started again, gets the state
from one of them and takes part. All have all of the data here, so the result is that of a run that
nothing disturbed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer
from torchft.coordination import LighthouseServer

from unisono.torchft import ProcessGroupUnisono

REPLICAS, STEPS, DEATH, RATE = 3, 60, 15, 0.5


def classifier() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A model with the same weights everywhere, and the digits."""
    torch.manual_seed(7)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    return nn.Linear(64, 10), images, torch.tensor(digits.target)


def train_replica(number: int, dies: bool) -> None:
    """Train as one of the replicas that the lighthouse knows."""
    module, images, labels = classifier()
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    sgd = torch.optim.SGD(module.parameters(), RATE)

    def load(state: dict) -> None:
        module.load_state_dict(state["model"])
        sgd.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupUnisono(timeout=timedelta(seconds=10)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": module.state_dict(), "optimizer": sgd.state_dict()},
        replica_id=f"replica{number}-",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=20),
        hostname="localhost",
        init_sync=False,  # they begin with the same weights
    )
    model, optimizer = DistributedDataParallel(manager, module), Optimizer(manager, sgd)
    sizes = []
    while manager.current_step() < STEPS:
        if dies and manager.current_step() == DEATH:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        sizes.append(manager.num_participants())
        time.sleep(0.1)  # a step of a larger model
    print(f"replica {number}: {STEPS} steps, {min(sizes)} to {max(sizes)} replicas, {loss:.6f}")
    manager.shutdown(wait=False)


def train_alone() -> float:
    """The loss of an undisturbed run."""
    module, images, labels = classifier()
    optimizer = torch.optim.SGD(module.parameters(), RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(images), labels)
        loss.backward()
        optimizer.step()
    return loss.item()


def start(number: int, lighthouse: str, *more: str) -> subprocess.Popen:
    """Start a replica, which begins when its standard input ends."""
    return subprocess.Popen(
        [sys.executable, __file__, "--replica", str(number), *more],
        env={**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse},
        stdin=subprocess.PIPE,
    )


def main() -> int:
    """Start the lighthouse and the replicas, and another one for the one that is killed."""
    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=REPLICAS - 1, join_timeout_ms=2000, heartbeat_timeout_ms=1000
    )
    address = lighthouse.address()
    last = REPLICAS - 1
    replicas = [start(number, address) for number in range(last)]
    killed, another = start(last, address, "--dies"), start(last, address)
    for replica in [*replicas, killed]:
        replica.stdin.close()
    killed.wait()
    print(f"replica {last} is gone: {signal.Signals(-killed.returncode).name}", flush=True)
    another.stdin.close()
    replicas.append(another)
    failed = sum(replica.wait() != 0 for replica in replicas)
    print(f"undisturbed: {train_alone():.6f}")
    lighthouse.shutdown()
    return failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replica", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--dies", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.replica is None:
        sys.exit(main())
    sys.stdin.read()
    train_replica(arguments.replica, arguments.dies)
