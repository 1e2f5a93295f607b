"""Contents of tensors that the host cannot read without waiting: compared there, known later.

A write through `.data` has no new version, and keeps the memory. On a GPU, each step asks whether
the bytes are still those of the capture. A later step, or whatever ends the run, reads the answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from piper.capture.python_state.leaves import PARTS, WHOLE
from piper.errors import InputError

AHEAD = 4  # questions without an answer: a host further ahead than this waits

Named = tuple[str, Tensor]  # the path of a tensor, and the tensor


@dataclass(frozen=True)
class Answer:
    """Whether any byte differs, on the host once `ready`."""

    differs: Tensor
    ready: torch.Event | None  # None: it is known at once

    def wait(self) -> bool:
        if self.ready is not None:
            self.ready.synchronize()
        return bool(self.differs)

    @property
    def is_known(self) -> bool:
        return self.ready is None or self.ready.query()


class DeviceContents:
    """The bytes of some tensors of one device, as they were when this was made."""

    def __init__(self, tensors: Iterable[Named]) -> None:
        self.tensors = [*tensors]
        self.before = self.bytes() if self.tensors else None
        self.answers: deque[Answer] = deque()

    def bytes(self) -> Tensor:
        return torch.cat([sample(tensor) for _, tensor in self.tensors])

    def ask(self) -> None:
        """Compare on the device, behind what was written so far."""
        if self.before is not None:
            differs = (self.bytes() != self.before).any()
            self.answers.append(on_host(differs))

    def refuse_written(self, wait: bool = False) -> None:
        """An error if an answer says that a step used what had been overwritten."""
        while self.answers and (wait or len(self.answers) > AHEAD or self.answers[0].is_known):
            if self.answers.popleft().wait():
                raise written(self.changed())

    def changed(self) -> str:
        """The tensors whose bytes are others now."""
        assert self.before is not None
        sizes = [sample(tensor).numel() for _, tensor in self.tensors]
        starts = [0, *accumulate(sizes)]
        rows = zip(self.tensors, starts, sizes, strict=False)
        differ = self.bytes() != self.before
        found = [name for (name, _), at, size in rows if bool(differ[at : at + size].any())]
        return ", ".join(found[:3]) or "a tensor that the model reads"


def sample(tensor: Tensor) -> Tensor:
    """The bytes between its first and last element, of a large one as many in parts."""
    with torch.no_grad():
        places = zip(tensor.shape, tensor.stride(), strict=True)
        size = (sum((n - 1) * by for n, by in places) + 1) * tensor.element_size()
        start = tensor.storage_offset() * tensor.element_size()
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        found = memory.set_(tensor.untyped_storage())[start : start + size]
        if size <= WHOLE:
            return found
        return found[: size // PARTS * PARTS].view(PARTS, -1)[:, : WHOLE // PARTS].reshape(-1)


def on_host(differs: Tensor) -> Answer:
    if differs.device.type == "cpu":
        return Answer(differs, None)
    there = torch.empty((), dtype=torch.bool, pin_memory=True)
    there.copy_(differs, non_blocking=True)
    ready = torch.Event(differs.device)
    ready.record(torch.accelerator.current_stream(differs.device))
    return Answer(there, ready)


def written(names: str) -> InputError:
    return InputError.of(
        "model",
        f"{names} was written through `.data` between steps, on a device where this is seen only "
        "afterwards: a step before this one was trained with its earlier values",
        "assign another tensor (`module.name = module.name * 0.9`), or write in place without "
        "`.data` (`module.name.mul_(0.9)`): both are read in the next step",
    )
