"""CUDA tensors between hosts, on a real GPU: run by ``make test-cuda``.

The hosts are labels (``UNISONO_HOST``) for ranks of one machine: ranks of different labels share
neither memory nor the device's, and their tensors go over TCP through memory of the host.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import test_torch_cuda as one_host

pytestmark = one_host.pytestmark

# The label of each rank's host.
HOSTS = ["ab", "aabb", "abab", "aaab", "abcd"]
TARGETS = [
    "rank_reduces",
    "rank_reduces_to_the_same_bits",
    "rank_moves",
    "rank_exchanges_messages",
    "rank_orders_streams",
    "rank_makes_groups",
    "rank_trains_with_ddp",
    "rank_trains_with_fsdp",
]


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("target", TARGETS)
def test_between_hosts(run: Any, target: str, hosts: str) -> None:
    run(len(hosts), f"{__name__}:rank_between_hosts", target, hosts, torch=True, timeout=240)


def rank_between_hosts(target: str, hosts: str) -> None:
    os.environ["UNISONO_HOST"] = hosts[int(os.environ["RANK"])]
    getattr(one_host, target)()
