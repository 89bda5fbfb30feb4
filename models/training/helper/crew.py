"""Several processes that train one network on one machine: shared memory, and who updates which weights.

PyTorch's threads wait for each other in every operation, which costs far more than the work itself where other
programs use the cores. Here each process computes with one thread on rows of its own, and they wait for each other
twice a step: when the gradients are there, and when the weights are updated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

PATIENCE = 1800.0  # seconds that the first process waits for the others before it gives up


class Alone:
    """Stands for a barrier where there is one process."""

    def wait(self, timeout: float | None = None) -> None:
        """Return at once."""


@dataclass
class Crew:
    """What the processes share.

    Attributes:
        network: Its weights lie in shared memory.
        gradients: (processes, parameters), one row for each process.
        share: What the first process says of the next step: the share of the training that is done, or 1 to stop;
            and whether to write a checkpoint.
        barrier: Where they wait for each other.
    """

    network: nn.Module
    gradients: Tensor
    share: Tensor
    barrier: Any
    _lengths: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, network: nn.Module, processes: int) -> Crew:
        """Prepare for a number of processes."""
        weights = list(network.parameters())
        gradients = torch.zeros(processes, sum(w.numel() for w in weights), device=weights[0].device)
        share = torch.zeros(2, dtype=torch.float64)
        if processes == 1:
            return cls(network, gradients, share, Alone())
        network.share_memory()
        barrier = torch.multiprocessing.get_context("spawn").Barrier(processes)
        return cls(network, gradients.share_memory_(), share.share_memory_(), barrier)

    @property
    def size(self) -> int:
        """The number of processes."""
        return len(self.gradients)

    def attach(self, rank: int) -> None:
        """Let a backward pass of this process add to its row of the gradients, which begin at 0."""
        self.gradients[rank].zero_()
        at = 0
        for weight in self.network.parameters():
            weight.grad = self.gradients[rank, at : at + weight.numel()].view_as(weight)
            at += weight.numel()

    def own(self, rank: int) -> dict[str, nn.Parameter]:
        """The weights that a process updates: about the same work for each."""
        named = sorted(self.network.named_parameters(), key=lambda each: (-each[1].numel(), each[0]))
        return {name: weight for place, (name, weight) in enumerate(named) if place % self.size == rank}

    def wait(self, rank: int) -> None:
        """Wait for the other processes."""
        # The others wait without limit, because the first one may pause; they end when it ends.
        self.barrier.wait(PATIENCE if rank == 0 else None)

    @contextmanager
    def first(self, rank: int, length: int) -> Iterator[None]:
        """When rows of a length come for the first time, let the first process go ahead of the others."""
        new = length not in self._lengths
        self._lengths.add(length)
        if new and rank > 0:
            self.wait(rank)
        yield
        if new and rank == 0:
            self.wait(rank)

    def combine(self, rank: int, limit: float) -> None:
        """Write the mean gradient of all processes, with a norm of at most `limit`, into the weights of a process."""
        total = self.gradients.sum(0).div_(self.size) if self.size > 1 else self.gradients[0]
        total.mul_((limit / (total.norm() + 1e-6)).clamp(max=1.0))
        own = {id(weight) for weight in self.own(rank).values()}
        at = 0
        for weight in self.network.parameters():
            if id(weight) in own:
                weight.grad = total[at : at + weight.numel()].view_as(weight)
            at += weight.numel()
