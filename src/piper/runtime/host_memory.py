"""Copies between the memory of a device and that of its host.

What is copied keeps its shapes, strides and aliases: all tensors of a bundle that share memory are
copied as one block, and views of the copy replace them. On a CPU, the host's memory is just other
memory, and copies are done when they start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

import torch

Block = tuple[int, torch.dtype]  # memory that tensors share, and their type
Copy = Callable[[torch.Tensor], torch.Tensor]  # of a flat tensor, to other memory
Pages = dict[tuple[int, int, torch.dtype], torch.Tensor]  # by position, size and type of a block


class Copying(Protocol):
    """A copy that has started."""

    def wait(self) -> Any:
        """The copy, which this device may use from now on."""

    def finish(self) -> None:
        """Block until the host may read it, too."""


class HostMemory(Protocol):
    """Starts copies of a tensor or a bundle."""

    def store(self, value: Any, stream: str, pages: Pages | None = None) -> Copying:
        """To new memory of the host, or to `pages`, which the next copy of the same fills again."""
        ...

    def fetch(self, value: Any, stream: str) -> Copying: ...


def host_memory(device: torch.device) -> HostMemory:
    return PinnedMemory(device) if device.type == "cuda" else OtherMemory()


@dataclass(slots=True)
class Copied:
    """A copy that is done."""

    value: Any

    def wait(self) -> Any:
        return self.value

    def finish(self) -> None:
        pass


@dataclass
class OtherMemory:
    """A CPU, whose devices have the same memory as their host."""

    def store(self, value: Any, stream: str, pages: Pages | None = None) -> Copied:
        new = reusing(pages, torch.empty_like)
        return Copied(copied(value, lambda flat: new(flat).copy_(flat)))

    def fetch(self, value: Any, stream: str) -> Copied:
        return Copied(copied(value, torch.clone))


@dataclass(slots=True)
class CudaCopy:
    """A copy on a stream. It keeps its source alive; `wait` makes the current stream wait."""

    value: Any
    source: Any
    done: torch.cuda.Event

    def wait(self) -> Any:
        torch.cuda.current_stream().wait_event(self.done)
        self.source = None
        return self.value

    def finish(self) -> None:
        self.done.synchronize()


@dataclass
class PinnedMemory:
    """A GPU: pinned memory of the host, and a stream for each direction, which run at once.

    New memory of the device belongs to the current stream, which waits for the copy before it uses
    or frees it. Pinned memory is reused by torch once the copies that read it are done.
    """

    device: torch.device
    streams: dict[tuple[str, str], torch.cuda.Stream] = field(default_factory=dict)

    def store(self, value: Any, stream: str, pages: Pages | None = None) -> CudaCopy:
        return self.start(value, (stream, "store"), reusing(pages, pinned))

    def fetch(self, value: Any, stream: str) -> CudaCopy:
        def new(flat: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(flat, device=self.device)

        return self.start(value, (stream, "fetch"), new)

    def start(self, value: Any, name: tuple[str, str], new: Copy) -> CudaCopy:
        """After everything that is queued on the current stream so far."""
        if name not in self.streams:
            self.streams[name] = torch.cuda.Stream(self.device)
        stream, now = self.streams[name], torch.cuda.current_stream()

        def copy(flat: torch.Tensor) -> torch.Tensor:
            there = new(flat)
            stream.wait_stream(now)
            with torch.cuda.stream(stream):
                there.copy_(flat, non_blocking=True)
            return there

        found = copied(value, copy)
        return CudaCopy(found, value, stream.record_event())


def reusing(pages: Pages | None, new: Copy) -> Copy:
    """Like `new`, in the same memory as before. To pin memory takes longer than to fill it."""
    if pages is None:
        return new
    position = count()

    def again(flat: torch.Tensor) -> torch.Tensor:
        key = next(position), flat.numel(), flat.dtype
        if key not in pages:
            pages[key] = new(flat)
        return pages[key]

    return again


def pinned(flat: torch.Tensor) -> torch.Tensor:
    return torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)


def copied(value: Any, copy: Copy) -> Any:
    """A tensor or a bundle in other memory. What is no tensor stays as it is."""
    tensors = [value] if isinstance(value, torch.Tensor) else list(value)
    blocks: dict[Block, list[torch.Tensor]] = {}
    for tensor in filter(torch.is_tensor, tensors):
        blocks.setdefault(block_of(tensor), []).append(tensor)
    moved = {key: (first(alike), copy(span(alike))) for key, alike in blocks.items()}
    found = [placed(t, *moved[block_of(t)]) if torch.is_tensor(t) else t for t in tensors]
    return found[0] if isinstance(value, torch.Tensor) else tuple(found)


def block_of(tensor: torch.Tensor) -> Block:
    return tensor.untyped_storage().data_ptr(), tensor.dtype


def first(tensors: Sequence[torch.Tensor]) -> int:
    """The first element of their memory that any of them uses."""
    return min(tensor.storage_offset() for tensor in tensors)


def span(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All memory from their first to their last element, as one flat tensor."""
    start, ends = first(tensors), [0]
    for tensor in (tensor for tensor in tensors if tensor.numel()):
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        ends.append(tensor.storage_offset() + sum((n - 1) * step for n, step in steps) + 1)
    return tensors[0].detach().as_strided((max(max(ends) - start, 0),), (1,), start)


def placed(tensor: torch.Tensor, start: int, flat: torch.Tensor) -> torch.Tensor:
    """The view of a copied block that is like a tensor in the original."""
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() - start)
