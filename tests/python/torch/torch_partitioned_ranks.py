"""The rank functions of `test_torch_partitioned.py`: models whose data is cut into parts.

Ranks exchange by all_to_all what their parts need of the others: the features of neighbours in a
graph, another number for each pair of ranks, or the other axis of a field on the sphere.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

NODES, FEATURES, EDGES = 61, 8, 240


class Graph:
    """A random graph, the same on all ranks, and the part of it that this rank has."""

    def __init__(self, rank: int, ranks: int) -> None:
        random = torch.Generator().manual_seed(1)
        self.edges = torch.randint(NODES, (2, EDGES), generator=random)
        self.features = torch.randn(NODES, FEATURES, generator=random)
        self.targets = torch.randn(NODES, 3, generator=random)
        # Parts of different sizes, and one of none where there are enough ranks.
        owner = torch.randint(ranks, (NODES,), generator=random)
        if ranks > 3:
            owner[owner == ranks - 1] = 0
        self.mine = (owner == rank).nonzero().flatten()
        into = self.edges[:, owner[self.edges[1]] == rank]
        sources = owner[into[0]]
        self.wanted = [into[0][sources == peer].unique() for peer in range(ranks)]
        # The nodes of this rank that each of the others wants, in the same order.
        self.given = []
        for peer in range(ranks):
            to_peer = self.edges[0][(owner[self.edges[1]] == peer) & (owner[self.edges[0]] == rank)]
            self.given.append(to_peer.unique())
        place = torch.full((NODES,), -1)
        place[torch.cat(self.wanted)] = torch.arange(sum(map(len, self.wanted)))
        self.sources = place[into[0]]
        here = torch.full((NODES,), -1)
        here[self.mine] = torch.arange(len(self.mine))
        self.sinks = here[into[1]]
        self.sent = here[torch.cat(self.given)]

    def neighbours(self, rows: Tensor) -> Tensor:
        """The sum of each node's neighbours, some of them on other ranks."""
        wanted, given = [list(map(len, lists)) for lists in (self.wanted, self.given)]
        halo = all_to_all_single_autograd(rows[self.sent], wanted, given, dist.group.WORLD)
        return torch.zeros_like(rows).index_add(0, self.sinks, halo[self.sources])


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(2 * FEATURES, FEATURES) for _ in range(3))
        self.head = nn.Linear(FEATURES, 3)

    def forward(self, rows: Tensor, neighbours: object) -> Tensor:
        for layer in self.layers:
            rows = layer(torch.cat([rows, neighbours(rows)], dim=1)).tanh()
        return self.head(rows)


def trains_a_graph() -> None:
    """Loss and gradients of a graph in parts are those of the whole graph."""
    dist.init_process_group("unisono")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    graph, whole = Graph(rank, ranks), Graph(0, 1)
    network, alone = Network(), Network()

    def all_neighbours(rows: Tensor) -> Tensor:
        return torch.zeros_like(rows).index_add(0, whole.edges[1], rows[whole.edges[0]])

    for step in range(3):
        got = network(graph.features[graph.mine], graph.neighbours)
        loss = ((got - graph.targets[graph.mine]) ** 2).sum()
        loss.backward()
        expected = ((alone(whole.features, all_neighbours) - whole.targets) ** 2).sum()
        expected.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total, expected.detach(), msg=f"the loss of step {step}")
        for mine, reference in zip(network.parameters(), alone.parameters(), strict=True):
            dist.all_reduce(mine.grad)
            torch.testing.assert_close(mine.grad, reference.grad, rtol=1e-4, atol=1e-4)
            with torch.no_grad():
                # The reference's, so that differences of rounding do not grow.
                mine.sub_(reference.grad, alpha=1e-3)
                reference.sub_(reference.grad, alpha=1e-3)
            mine.grad = None
            reference.grad = None
    dist.destroy_process_group()


def transforms_a_sphere(polar: int, azimuth: int) -> None:
    """A spherical harmonic transform in parts, and its gradient, are those of one process."""
    import torch_harmonics
    import torch_harmonics.distributed as parts

    dist.init_process_group("unisono")
    rank = dist.get_rank()
    assert polar * azimuth == dist.get_world_size()
    grid = torch.arange(polar * azimuth).reshape(polar, azimuth)
    along = [dist.new_group(column.tolist()) for column in grid.t()]
    around = [dist.new_group(row.tolist()) for row in grid]
    row, column = divmod(rank, azimuth)
    parts.init(along[column], around[row])
    latitudes, longitudes, channels = 33, 64, 5
    whole = torch.randn(2, channels, latitudes, longitudes, generator=torch.manual_seed(3))

    def own(field: Tensor) -> Tensor:
        rows = parts.split_tensor_along_dim(field, -2, polar)[row]
        return parts.split_tensor_along_dim(rows, -1, azimuth)[column].contiguous()

    forward = parts.DistributedRealSHT(latitudes, longitudes)
    inverse = parts.DistributedInverseRealSHT(latitudes, longitudes)
    reference = torch_harmonics.RealSHT(latitudes, longitudes)
    back = torch_harmonics.InverseRealSHT(latitudes, longitudes)
    mine, alone = own(whole).requires_grad_(), whole.clone().requires_grad_()
    spectrum, expected = forward(mine), reference(alone)
    torch.testing.assert_close(spectrum, own(expected), rtol=1e-3, atol=1e-4)
    field, wanted = inverse(spectrum), back(expected)
    torch.testing.assert_close(field, own(wanted), rtol=1e-3, atol=1e-4)
    (field**2).sum().backward()
    (wanted**2).sum().backward()
    torch.testing.assert_close(mine.grad, own(alone.grad), rtol=1e-3, atol=1e-3)
    dist.destroy_process_group()
