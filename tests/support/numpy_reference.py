"""The expected results of collectives, computed by NumPy from the inputs of all ranks.

Every rank computes the inputs of every rank from their numbers alone, so nothing is exchanged to
check a result. Values are chosen so that no integer sum overflows, and sums of halves are exact in
float32: then they have one right answer, whatever the order.
"""

from __future__ import annotations

from functools import cache

import ml_dtypes
import numpy as np

FLOATS = ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"]
INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
DTYPES = [*FLOATS, *INTEGERS, "bool", "complex64", "complex128"]
OPS = [
    "sum",
    "avg",
    "prod",
    "min",
    "max",
    "band",
    "bor",
    "bxor",
    "land",
    "lor",
    "lxor",
    "premul_sum",
]
POOL = 4096


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def is_half(name: str) -> bool:
    """Whether the type accumulates in float32 and is rounded once."""
    return name in FLOATS and dtype_of(name).itemsize < 4


def has_meaning(op: str, name: str) -> bool:
    if name.startswith("complex"):
        return op in ("sum", "avg", "prod", "premul_sum")
    if op in ("band", "bor", "bxor"):
        return name not in FLOATS
    if op == "avg":
        return name != "bool"
    return name in FLOATS or op != "premul_sum"


@cache
def _pool(name: str, rank: int) -> np.ndarray:
    random = np.random.default_rng([rank, DTYPES.index(name)])
    dtype = dtype_of(name)
    if name == "bool":
        return random.integers(0, 2, POOL).astype(dtype)
    if name in INTEGERS:
        return random.integers(0 if name[0] == "u" else -7, 8, POOL).astype(dtype)
    sign = random.choice([-1.0, 1.0], POOL)
    values = sign * random.uniform(0.5, 1.5, POOL)
    if name.startswith("complex"):
        return (values + 1j * np.roll(values, 1)).astype(dtype)
    values[::7] = 0
    return values.astype(dtype)


def contribution(name: str, rank: int, count: int, salt: int = 0) -> np.ndarray:
    """The input of `rank`: `count` elements, others for another `salt`."""
    pool = _pool(name, rank)
    if count <= POOL // 2:
        start = salt * 37 % (POOL // 2)
        return pool[start : start + count].copy()
    return np.resize(pool, count)


def factor(name: str, rank: int) -> float:
    """The factor of premul_sum: the product is exact in every type that has one."""
    return 2.0 ** (rank % 3 - 1)


def reduced(op: str, name: str, inputs: list[np.ndarray]) -> np.ndarray:
    """The reduction of `inputs`, of ranks 0, 1 and so on, in the type of the result."""
    dtype = inputs[0].dtype
    stack = np.stack(inputs)
    if op in ("land", "lor", "lxor"):
        truth = stack != np.zeros((), dtype)
        fold = {"land": np.logical_and, "lor": np.logical_or, "lxor": np.logical_xor}[op]
        return fold.reduce(truth, axis=0).astype(dtype)
    if name == "bool":
        ufunc = {
            "sum": np.logical_or,
            "max": np.logical_or,
            "bor": np.logical_or,
            "prod": np.logical_and,
            "min": np.logical_and,
            "band": np.logical_and,
            "bxor": np.logical_xor,
        }[op]
        return ufunc.reduce(stack, axis=0)
    if op in ("band", "bor", "bxor"):
        fold = {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}[op]
        return fold.reduce(stack, axis=0)
    if name in INTEGERS:
        return _reduced_integers(op, stack)
    wide = stack.astype(np.complex128 if name.startswith("complex") else np.float64)
    with np.errstate(all="ignore"):
        return _reduced_floats(op, name, wide).astype(dtype)


def _reduced_integers(op: str, stack: np.ndarray) -> np.ndarray:
    dtype = stack.dtype
    if op in ("min", "max"):
        return getattr(np, op)(stack, axis=0)
    if op == "prod":
        return np.multiply.reduce(stack, axis=0, dtype=dtype)
    if op == "avg":
        # Python's numbers have as many digits as they need; theirs are cut toward zero.
        total = stack.astype(object).sum(axis=0)
        return (np.sign(total) * (abs(total) // len(stack))).astype(dtype)
    return np.add.reduce(stack, axis=0, dtype=dtype)


def _reduced_floats(op: str, name: str, wide: np.ndarray) -> np.ndarray:
    if op in ("min", "max"):
        return getattr(np, op)(wide, axis=0)
    if op == "prod":
        return wide.prod(axis=0)
    if op == "premul_sum":
        factors = np.array([factor(name, rank) for rank in range(len(wide))])
        return (wide * factors[:, None]).sum(axis=0)
    return wide.sum(axis=0) / (len(wide) if op == "avg" else 1)


def check(result: np.ndarray, expected: np.ndarray, op: str, name: str) -> None:
    """Compare a reduction with what it must be.

    Exactly for integers, and for halves where float32 holds the sum exactly; within one unit in the
    last place for halves otherwise; within a few roundings for wider floats.
    """
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    if is_half(name):
        distance = np.abs(_ordered(result) - _ordered(expected))
        limit = 0 if op in ("sum", "premul_sum", "min", "max") else 1
        assert distance.max(initial=0) <= limit, f"{distance.max()} units in the last place"
    elif name in FLOATS or name.startswith("complex"):
        tolerance = 1e-5 if name in ("float32", "complex64") else 1e-13
        np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance)
    else:
        np.testing.assert_array_equal(result, expected)


def _ordered(values: np.ndarray) -> np.ndarray:
    """Whole numbers in the order of the floats, one apart from the next; both zeros are 0."""
    bits = values.view(f"i{values.itemsize}").astype(np.int64)
    limit = 1 << (8 * values.itemsize - 1)
    return np.where(bits < 0, -(bits + limit), bits)
