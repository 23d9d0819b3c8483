"""Training that goes on after a failure, within the processes that are there.

``run`` puts back the state of the last ``commit`` when an operation fails, forms the job anew of
the ranks that are left and calls the training function again. ``unisono launch --min 2 -n 4`` lets
them go on and starts a process in the place of each that failed; that one gets the state of the
rank that has come furthest. If none comes within ``HOROVOD_ELASTIC_TIMEOUT`` seconds (30), the job
goes on with fewer ranks. torchrun and mpirun end all ranks when one fails. Further hosts need the
launcher to start the job anew.
"""

from __future__ import annotations

import copy
import functools
import os
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import unisono
from unisono.horovod.torch import _world
from unisono.horovod.torch._call import HorovodInternalError
from unisono.horovod.torch._exchanges import allgather
from unisono.horovod.torch._objects import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]

# Failures that a job survives: everything that says that the group, and not the call, is at fault.
_FAILURES = (HorovodInternalError, unisono.Error, dist.DistError)
# How often a rank tries to meet the others again where torch's group was there before, and how long
# it waits between two tries.
_ATTEMPTS = 5
_PAUSE = 1.0
# How many seconds a process may take that comes in the place of one that is gone.
_PATIENCE = 30.0


class State:
    """The state that training goes on from; see :class:`ObjectState` and :class:`TorchState`."""

    def __init__(self) -> None:
        # How often it was committed, by this rank or the one whose state it has taken.
        self._commits = 0
        self._callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Have `callbacks` called after each restart, before training goes on."""
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call what is to be called after a restart."""
        self.reset()
        for callback in self._callbacks:
            callback()

    def commit(self) -> None:
        """Keep the state as it is now, to come back to it."""
        self._commits = _commits(self) + 1
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Do nothing: the hosts of a job stay the same."""

    def save(self) -> None:
        """Keep the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Put back what ``save`` has kept."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give every rank the state of the one that has come furthest, and keep that."""
        raise NotImplementedError

    def reset(self) -> None:
        """Do what a subclass has to do after a restart."""


class ObjectState(State):
    """Values that pickle, as attributes.

    Parameters
    ----------
    **kwargs
        The names and first values of the attributes.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self._kept = dict(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)

    def save(self) -> None:
        """Keep copies of the attributes in memory."""
        self._kept = {name: copy.deepcopy(getattr(self, name)) for name in self._kept}

    def restore(self) -> None:
        """Put back what ``save`` has kept."""
        for name, value in self._kept.items():
            setattr(self, name, copy.deepcopy(value))

    def sync(self) -> None:
        """Give every rank the attributes of the one that has come furthest, and keep them."""
        current = {name: getattr(self, name) for name in self._kept}
        for name, value in broadcast_object(current, _world.world().root).items():
            setattr(self, name, value)
        self.save()


class TorchState(ObjectState):
    """A model, an optimizer and samplers, beside values that pickle.

    Parameters
    ----------
    model
        A module, or None.
    optimizer
        An optimizer of torch or a ``DistributedOptimizer``, or None.
    **kwargs
        Further modules, optimizers and samplers (all that has ``state_dict`` and
        ``load_state_dict``), and values that pickle. Each becomes an attribute.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        given = {"model": model, "optimizer": optimizer, **kwargs}
        self._stateful = {name: one for name, one in given.items() if _has_state(one)}
        plain = {name: one for name, one in given.items() if name not in self._stateful}
        super().__init__(**{name: one for name, one in plain.items() if one is not None})
        for name, one in self._stateful.items():
            setattr(self, name, one)
        self._states: dict[str, Any] = {}
        self.save()

    def save(self) -> None:
        """Keep copies of all states in memory."""
        current = {name: getattr(self, name).state_dict() for name in self._stateful}
        self._states = {name: copy.deepcopy(state) for name, state in current.items()}
        super().save()

    def restore(self) -> None:
        """Put back what ``save`` has kept."""
        for name, state in self._states.items():
            getattr(self, name).load_state_dict(copy.deepcopy(state))
        super().restore()

    def sync(self) -> None:
        """Give every rank the states of the one that has come furthest, and keep them."""
        root = _world.world().root
        for name in self._stateful:
            one = getattr(self, name)
            if isinstance(one, torch.nn.Module):
                broadcast_parameters(one.state_dict(), root)
            elif isinstance(one, torch.optim.Optimizer):
                broadcast_optimizer_state(one, root)
            elif isinstance(one, ElasticSampler):
                one.merge()
            else:
                one.load_state_dict(broadcast_object(one.state_dict(), root))
        super().sync()

    def reset(self) -> None:
        """Divide what the samplers have left among the ranks."""
        for name in self._stateful:
            one = getattr(self, name)
            if isinstance(one, ElasticSampler):
                one.divide()


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


class ElasticSampler(torch.utils.data.Sampler):  # type: ignore[misc]
    """Divides a data set among the ranks, and goes on where an epoch was left.

    Parameters
    ----------
    dataset
        Anything with a length.
    shuffle
        Whether the order changes with each epoch.
    seed
        What the order follows from; the same on every rank.
    """

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed: set[int] = set()
        self.divide()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, with nothing processed yet."""
        self.epoch = epoch
        self.processed = set()
        self.divide()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that this rank has processed its batch number `batch_idx`."""
        self.record_indices(self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size])

    def record_indices(self, indices: Sequence[int]) -> None:
        """Note that these items are processed."""
        self.processed.update(indices)

    def divide(self) -> None:
        """Divide what is not processed; every rank gets the same number of items."""
        left = [item for item in range(len(self.dataset)) if item not in self.processed]
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            left = [left[place] for place in torch.randperm(len(left), generator=generator)]
        here = _world.world()
        missing = -len(left) % here.size
        left += (left * here.size)[:missing]
        self.indices = left[here.rank :: here.size]

    def merge(self) -> None:
        """Take together what all ranks have processed, and divide the rest."""
        from unisono.horovod.torch._objects import allgather_object

        self.epoch = broadcast_object(self.epoch, _world.world().root)
        self.processed = set().union(*allgather_object(self.processed))
        self.divide()

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and what is processed of it."""
        return {"epoch": self.epoch, "processed": set(self.processed)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over an epoch and what is processed of it."""
        self.epoch = state_dict["epoch"]
        self.processed = set(state_dict["processed"])
        self.divide()

    def __iter__(self) -> Any:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make a training function go on after failures, from the last ``commit``.

    Parameters
    ----------
    func
        Takes a :class:`State` as its first argument, and begins with what that holds.

    Returns
    -------
    callable
        Takes the same arguments. It gives every rank the state of the one that has come furthest,
        of rank 0 at first, and calls `func`. When an operation fails it restores the state, forms
        the job anew of the ranks that are there and begins again.

    Raises
    ------
    unisono.Error
        A rank that lives did not come back, or too many went.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        while True:
            try:
                _find_root(state)
                state.sync()
                return func(state, *args, **kwargs)
            except _FAILURES as failure:
                # Not from within the handler: its traceback holds tensors and works of the group.
                print(f"unisono.horovod: rank {_world.rank()} restarts: {failure}", flush=True)
            state.restore()
            _rejoin()
            state.on_reset()

    return wrapper


def _commits(state: State) -> int:
    # A state of the program's own may not have called State's.
    return getattr(state, "_commits", 0)


def _find_root(state: State) -> None:
    """Take the rank that has come furthest for the one whose state counts."""
    here = _world.world()
    # An operation of its own: what is kept may differ.
    commits = allgather(torch.tensor([_commits(state)]))
    here.root = int(torch.argmax(commits))
    state._commits = int(commits[here.root])


def _rejoin() -> None:
    if _world.world().comm is not None:
        _world.recover(float(os.environ.get("HOROVOD_ELASTIC_TIMEOUT", _PATIENCE)))
        return
    # torch's group was there before: all of its ranks have to come back.
    sets = [one for number, one in sorted(_world.world().sets.items()) if number]
    _world.shutdown(aborts=True)
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            _world.init(process_sets=sets)
            return
        except _FAILURES:  # noqa: PERF203 -- each attempt waits for the other ranks
            if attempt == _ATTEMPTS:
                raise
            _world.shutdown(aborts=True)
            time.sleep(_PAUSE)
