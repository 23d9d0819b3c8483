"""PyTorch's own tests of RPC and of DDP beside RPC, as torch's test_tensorpipe_agent.py makes them.

The suites come with torch as bases without an agent. Every one of them meets through a gloo group
that torch's RPC constructs, and those of DDP train over gloo. Of RpcTest, whose 200 tests are of
RPC itself, there are those that make or end groups. ``behind_gloo.py`` runs this file.
"""

from __future__ import annotations

import re

import torch
from torch.testing._internal.distributed import rpc_utils
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (
    TensorPipeRpcAgentTestFixture,
)

LEFT_OUT = {"RpcTest", "DistAutogradTest", "JitRpcTest"}
OF_GROUPS = re.compile(r"test_(.*_pg_?|pg_|deadlock|.*init_rpc|.*shutdown|.*world_size|.*barrier)")

torch.manual_seed(1)


class RpcOfGroupsTest(rpc_utils.RpcTest):
    """The tests of RpcTest that make or end groups."""


for _name in dir(rpc_utils.RpcTest):
    if _name.startswith("test_") and not OF_GROUPS.match(_name):
        setattr(RpcOfGroupsTest, _name, None)

_suites = [each for each in rpc_utils.GENERIC_TESTS if each.__name__ not in LEFT_OUT]
globals().update(
    rpc_utils.generate_tests(
        "TensorPipe", TensorPipeRpcAgentTestFixture, [*_suites, RpcOfGroupsTest], __name__
    )
)
# Without an agent they are bases.
del RpcOfGroupsTest
