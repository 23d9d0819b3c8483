"""Horovod's interfaces over unisono; :mod:`unisono.horovod.torch` is the one for PyTorch."""

from unisono.horovod._run import run

__all__ = ["run"]
