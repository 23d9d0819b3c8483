"""Runs a program with the same random numbers each time: `seeded.py SCRIPT ARGUMENTS...`.

Data from ``numpy.random.default_rng()`` differ from run to run. A program that compares a sum over
such data with the same sum in another order fails in some runs, over any backend: beside a sum
close to zero the rounding is large. Here the number of the call and the rank are the seed of each
call without one.
"""

from __future__ import annotations

import itertools
import os
import runpy
import sys

import numpy as np

if __name__ == "__main__":
    generator, calls = np.random.default_rng, itertools.count()
    rank = int(os.environ.get("RANK", "0"))
    np.random.default_rng = lambda seed=None: generator(
        [next(calls), rank] if seed is None else seed
    )
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
