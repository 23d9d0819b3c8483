"""A matrix product that is summed over the ranks, fused by pieces over symmetric memory.

    torchrun --nproc-per-node 2 examples/torch/fused_matmul.py

Every rank has some of the columns of x and the same rows of w, as in a layer that is divided by
rows, and the product is the sum of what the ranks compute. One after the other that is a matmul and
an all_reduce of a result that has left the caches by then. Here a rank computes a piece of rows,
signals to the rank that sums it up, and goes on with the next one; the sum is made and stored to
all ranks while the pieces are still in the caches. It prints how long both take. --elsewhere has
the all_reduce work on torch's own memory, and not on tensors in the shared heap.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

# How many rounds of pieces a rank computes before it waits for those of the others.
AHEAD = 2
# Signals that may be under way to a rank from each other one.
CHANNELS = 8


class FusedMatmul:
    """The sum over the ranks of x @ w, of `rows` by `columns` elements.

    The result stays until this rank makes the next call: no other one stores to it before it has
    this rank's signal.
    """

    def __init__(self, rows: int, columns: int, piece: int) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        assert self.size > 1, "there is nothing to sum up on one rank"
        assert rows % (piece * self.size) == 0, "every rank sums up as many pieces as the others"
        self.parts, parts_of_all = self._shared(rows, columns, piece)
        self.sums, sums_of_all = self._shared(rows, columns, piece)
        self.signals = parts_of_all
        shape = self.sums.shape
        self.parts_of = [
            parts_of_all.get_buffer(rank, shape, torch.float32) for rank in range(self.size)
        ]
        self.sums_of = [
            sums_of_all.get_buffer(rank, shape, torch.float32) for rank in range(self.size)
        ]

    def _shared(
        self, rows: int, columns: int, piece: int
    ) -> tuple[torch.Tensor, symm_mem._SymmetricMemory]:
        tensor = symm_mem.empty(rows // piece, piece, columns, device="cpu")
        return tensor, symm_mem.rendezvous(tensor, dist.group.WORLD)

    def __call__(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x = x.view(*self.sums.shape[:2], -1)
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        rounds = len(x) // self.size
        # The ranks take turns in summing up pieces; each is AHEAD with the parts for the others.
        for number in range(rounds + AHEAD):
            if number < rounds:
                for other in others:
                    piece = number * self.size + other
                    torch.mm(x[piece], w, out=self.parts[piece])
                    self.signals.put_signal(other, number % CHANNELS)
            if number >= AHEAD:
                piece = (number - AHEAD) * self.size + self.rank
                for other in others:
                    self.signals.wait_signal(other, (number - AHEAD) % CHANNELS)
                first, *more = (self.parts_of[other][piece] for other in others)
                torch.addmm(first, x[piece], w, out=self.sums[piece])
                for part in more:
                    self.sums[piece] += part
                for other in others:
                    self.sums_of[other][piece].copy_(self.sums[piece])
        self.signals.barrier()
        return self.sums.view(-1, self.sums.shape[-1])


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def run(rows: int, columns: int, inner: int, piece: int, rounds: int, elsewhere: bool) -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    x, w = torch.randn(rows, inner), torch.randn(inner, columns)
    fused = FusedMatmul(rows, columns, piece)
    # The same kind of memory for both.
    product = (
        torch.empty(rows, columns) if elsewhere else symm_mem.empty(rows, columns, device="cpu")
    )

    def one_after_the_other() -> None:
        torch.mm(x, w, out=product)
        dist.all_reduce(product)

    one_after_the_other()
    torch.testing.assert_close(fused(x, w), product, rtol=1e-4, atol=1e-3)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        dist.barrier()
        times[0].append(seconds(one_after_the_other))
        dist.barrier()
        times[1].append(seconds(lambda: fused(x, w)))
    apart, together = map(statistics.median, times)
    sys.stdout.write(
        f"rank {rank}: matmul and all_reduce {apart * 1e3:.1f} ms, fused {together * 1e3:.1f} ms, "
        f"{apart / together:.2f} times as long (medians)\n"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=["unisono"], default="unisono")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=64)
    parser.add_argument("--piece", type=int, default=128, help="rows of a piece")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--elsewhere", action="store_true")
    arguments = vars(parser.parse_args())
    dist.init_process_group(arguments.pop("backend"))
    run(**arguments)
    dist.destroy_process_group()
