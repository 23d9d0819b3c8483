"""Train on, though a rank is killed: another process takes its place.

    unisono launch -n 4 --min 3 examples/numpy/elastic.py

Rank 1 kills itself in the middle. The others go on without it until the launcher has started it
again, give it the weights, and take it in. The result is that of an undisturbed run.
"""

import os
import signal

import numpy as np

import unisono

STEPS, RATE = 40, 0.1
random = np.random.default_rng(0)
inputs = random.normal(size=(600, 8))
targets = inputs @ np.arange(8.0) + random.normal(size=600)


def gradient(weights: np.ndarray, rank: int = 0, size: int = 1) -> np.ndarray:
    """A rank's share of the gradient of the mean squared error."""
    mine, wanted = inputs[rank::size], targets[rank::size]
    return mine.T @ (mine @ weights - wanted) / len(inputs)


def heal(comm: unisono.Communicator) -> unisono.Communicator:
    """The group with all its ranks again, or with those that are left if no other comes."""
    left = comm.shrink()
    comm.close()
    try:
        whole = left.grow(timeout=60)
    except unisono.TimeoutError:
        return left
    except unisono.Error:  # one more is gone, or one that came
        return heal(left)
    left.close()
    return whole


def share(comm: unisono.Communicator, state: np.ndarray) -> None:
    """All take the state of the rank that has come furthest."""
    steps = comm.all_gather(state[:1])
    comm.broadcast(state, int(np.argmax(steps)))


def train(comm: unisono.Communicator, state: np.ndarray) -> bool:
    """Train to the end; False if a rank is lost before."""
    try:
        share(comm, state)
        while state[0] < STEPS:
            all_are_new = len(comm.newcomers) == comm.size
            if comm.rank == 1 and state[0] == STEPS // 2 and all_are_new:
                os.kill(os.getpid(), signal.SIGKILL)
            change = gradient(state[1:], comm.rank, comm.size)
            comm.all_reduce(change)
            state[1:] -= RATE * change
            state[0] += 1
    except unisono.Error:
        return False
    return True


comm = unisono.init()
state = np.zeros(1 + 8)  # the number of steps that are done, and the weights
while not train(comm, state):
    comm = heal(comm)

alone = np.zeros(8)
for _ in range(STEPS):
    alone -= RATE * gradient(alone)
assert np.allclose(state[1:], alone)
if comm.rank == 0:
    print(f"rank 0: {comm.size} ranks have trained as one would; came later: {comm.newcomers}")
comm.close()
