"""What a process keeps beside tensors: its random state, and the position of its data."""

from __future__ import annotations

import random
import sys
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

import torch

from piper.runtime.checkpoint.format.plain_values import encoded
from piper.runtime.checkpoint.format.problems import refused

RandomState = dict[str, Any]  # of each library


@runtime_checkable
class Loader(Protocol):
    """A loader that knows its position, such as torchdata's StatefulDataLoader."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def refuse_other_loader(loader: object) -> None:
    if loader is not None and not isinstance(loader, Loader):
        raise refused(
            f"loader={type(loader).__name__} has no state_dict and load_state_dict",
            "leave out loader=, and skip as many batches as resume(...) returns; or use "
            "torchdata's StatefulDataLoader",
        )


def process_values(loader: Loader | None, device: torch.device) -> dict[str, Any]:
    """As JSON."""
    found = {"random": encoded(random_state(device), "the random state")}
    if loader is not None:
        found["loader"] = encoded(loader.state_dict(), "the loader's state_dict()")
    return found


def random_state(device: torch.device) -> RandomState:
    """Of whatever a script may draw from; dropout under Piper depends on none of it."""
    found = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        found["numpy"] = sys.modules["numpy"].random.get_state()
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def refuse_other_state(found: RandomState, device: torch.device) -> None:
    """Raises if it cannot be restored. Nothing is changed."""
    before = random_state(device)
    try:
        restore_random_state(found, device)
    finally:
        restore_random_state(before, device)


def restore_random_state(known: RandomState, device: torch.device) -> None:
    torch.set_rng_state(known["torch"])
    random.setstate(known["python"])
    if "numpy" in known:
        with suppress(ImportError):
            import numpy

            numpy.random.set_state(known["numpy"])
    if "cuda" in known and device.type == "cuda":
        torch.cuda.set_rng_state(known["cuda"], device)
