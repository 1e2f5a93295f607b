"""Count the bytes that collectives of torch.distributed send, as rings send them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# What goes around the ring, and how often: the larger of all inputs and results, as for a gather.
ROUNDS = {
    "allreduce_": 2, "allreduce_coalesced_": 2, "_allgather_base_": 1, "allgather_": 1,
    "allgather_into_tensor_coalesced_": 1, "_reduce_scatter_base_": 1, "reduce_scatter_": 1,
    "reduce_scatter_tensor_coalesced_": 1,
}  # fmt: skip


class Wire(TorchDispatchMode):
    """Inside, `sent` are the bytes that this rank sends. All ranks are in every group."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.sent = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            self.see(str(func.overloadpacket.__name__), args)
        return func(*args, **(kwargs or {}))

    def see(self, name: str, args: Any) -> None:
        self.calls[name] += 1
        if name in ROUNDS:
            sides = [pytree.tree_leaves(side) for side in args[:2]]
            sizes = [sum(t.nbytes for t in side if isinstance(t, Tensor)) for side in sides]
            world = dist.get_world_size()
            self.sent += ROUNDS[name] * max(sizes) * (world - 1) // world
