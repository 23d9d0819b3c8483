"""Horovod's interfaces over unisono; :mod:`unisono.horovod.torch` is the one for PyTorch."""
