"""The rank functions of `test_lightgbm.py`."""

from __future__ import annotations

import os
from typing import Any

import lightgbm as lgb
import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.model_selection import train_test_split

import unisono
import unisono.lightgbm

PARAMETERS = {
    "objective": "binary",
    "num_leaves": 15,
    "learning_rate": 0.1,
    "min_data_in_leaf": 10,
    "num_threads": 1,
    "verbosity": -1,
    "deterministic": True,
}
ROUNDS = 30


def halves() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    return train_test_split(
        *load_breast_cancer(return_X_y=True), test_size=0.25, random_state=1
    )  # fmt: skip


def train(parameters: dict[str, Any], features: np.ndarray, labels: np.ndarray) -> lgb.Booster:
    data = lgb.Dataset(features, labels, params=parameters)
    return lgb.train(parameters, data, num_boost_round=ROUNDS)


def alone() -> list[float]:
    features, held_out, labels, _ = halves()
    return train(PARAMETERS, features, labels).predict(held_out).tolist()


def over_sockets(learner: str, ports: list[int]) -> str:
    """Train over LightGBM's own network, and return the trees."""
    features, _, labels, _ = halves()
    rank = int(os.environ["RANK"])
    share = slice(rank, None, len(ports))
    network = {
        "machines": ",".join(f"127.0.0.1:{port}" for port in ports),
        "local_listen_port": ports[rank],
        "num_machines": len(ports),
        "tree_learner": learner,
        "pre_partition": True,
    }
    return trees(train({**PARAMETERS, **network}, features[share], labels[share]))


def trees(booster: lgb.Booster) -> str:
    """The model without the parameters, which say how it was trained."""
    return booster.model_to_string().split("parameters:")[0]


def together(learner: str) -> tuple[list[float], str]:
    features, held_out, labels, _ = halves()
    added = unisono.lightgbm.init(tree_learner=learner)
    comm = unisono.lightgbm.communicator()
    assert added["num_machines"] == comm.size
    share = slice(comm.rank, None, comm.size)
    booster = train({**PARAMETERS, **added}, features[share], labels[share])
    with pytest.raises(RuntimeError, match="runs already"):
        unisono.lightgbm.init()
    unisono.lightgbm.shutdown()
    return booster.predict(held_out).tolist(), trees(booster)


def multiclass() -> float:
    """Scikit-learn's interface, with a group of the caller's own."""
    images, held_out, labels, expected = train_test_split(
        *load_digits(return_X_y=True), test_size=0.2, random_state=1
    )
    with unisono.init() as comm:
        added = unisono.lightgbm.init(comm)
        share = slice(comm.rank, None, comm.size)
        model = lgb.LGBMClassifier(
            n_estimators=20, num_leaves=15, n_jobs=1, verbosity=-1, **added
        )  # fmt: skip
        model.fit(images[share], labels[share])
        unisono.lightgbm.shutdown()
        comm.barrier()
    return float((model.predict(held_out) == expected).mean())


def one_dies() -> str:
    features, _, labels, _ = halves()
    added = unisono.lightgbm.init()
    comm = unisono.lightgbm.communicator()
    share = slice(comm.rank, None, comm.size)

    def end(env: Any) -> None:
        if env.iteration == 2 and comm.rank == 1:
            os._exit(0)

    parameters = {**PARAMETERS, **added}
    data = lgb.Dataset(features[share], labels[share], params=parameters)
    try:
        lgb.train(parameters, data, num_boost_round=10_000, callbacks=[end])
    except unisono.Error as error:
        return f"{type(error).__name__} {error}"
    return "trained"
