"""The rank functions of `test_torchrec.py`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan, ShardingType

TABLES, BATCH = 3, 6
RATE = 0.1


def rows(table: int) -> int:
    return 50 + 7 * table


def tables(device: str) -> EmbeddingBagCollection:
    torch.manual_seed(1)
    configs = [
        EmbeddingBagConfig(
            name=f"t{table}",
            embedding_dim=8,
            num_embeddings=rows(table),
            feature_names=[f"f{table}"],
        )
        for table in range(TABLES)
    ]
    return EmbeddingBagCollection(device=torch.device(device), tables=configs)


def batch(seed: int) -> KeyedJaggedTensor:
    """Some bags of some rows of every table, a few of them empty."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (TABLES * BATCH,), generator=random)
    limits = torch.tensor([rows(table) for table in range(TABLES)]).repeat_interleave(BATCH)
    limits = limits.repeat_interleave(lengths)
    values = (torch.rand(len(limits), generator=random) * limits).long()
    keys = [f"f{table}" for table in range(TABLES)]
    return KeyedJaggedTensor.from_lengths_sync(keys=keys, values=values, lengths=lengths)


class Sharder(EmbeddingBagCollectionSharder):
    """Cuts tables into rows also on the CPU, where TorchRec's own planner does not."""

    def sharding_types(self, _device: str) -> list[str]:
        return [kind.value for kind in ShardingType]


def trains_tables_in_rows() -> None:
    dist.init_process_group("unisono")
    rank, world = dist.get_rank(), dist.get_world_size()
    alone, meta = tables("cpu"), tables("meta")
    how = {f"t{table}": row_wise() for table in range(TABLES)}
    sharder = Sharder()
    module = construct_module_sharding_plan(
        meta, how, sharder=sharder, local_size=world, world_size=world, device_type="cpu"
    )
    model = DistributedModelParallel(
        meta,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"": module}),
        sharders=[sharder],
    )
    for name, parts in model.state_dict().items():
        whole = alone.state_dict()[name]
        for part in parts.local_shards():
            first, _ = part.metadata.shard_offsets
            part.tensor.copy_(whole[first : first + len(part.tensor)])
    # Of rows in plain tensors, as on the CPU, the gradient is the mean over the ranks.
    optimizers = [torch.optim.SGD(each.parameters(), RATE) for each in (model, alone)]
    for step in range(3):
        found = model(batch(10 * step + rank)).values()
        expected = [alone(batch(10 * step + each)).values() for each in range(world)]
        torch.testing.assert_close(found, expected[rank])
        for optimizer in optimizers:
            optimizer.zero_grad()
        (found**2).sum().backward()
        (torch.cat(expected) ** 2).sum().div(world).backward()
        for optimizer in optimizers:
            optimizer.step()
    dist.destroy_process_group()
