"""Pieces of tensors in a checkpoint: each knows its tensor and its place in it, but no device."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from piper.errors import InputError
from piper.runtime.observe.measure import settle
from piper.runtime.state.device_state import BucketState, DeviceState, HeldPart
from piper.runtime.state.element_order import NATURAL, ElementOrder
from piper.runtime.state.optimizers import SCHEDULED, settings

PARAMETER, WHOLE, NUMBER = "parameter", "tensor", "number"  # the kinds of pieces
STEP = "step"  # a count, in torch's optimizers; may have the shape of a one-element parameter
WHERE = "give a folder that trainer.save wrote and that all processes can read"
Tensors = dict[str, torch.Tensor]
Described = dict[str, list[Any]]  # shape and dtype of every tensor of a model, by name


def key_of(kind: str, state: str, name: str, first: int, order: ElementOrder = NATURAL) -> str:
    """
    >>> key_of("parameter", "", "head.weight", 12)
    'parameter||head.weight|12'
    >>> key_of("parameter", "", "head.weight", 12, ElementOrder(1, 1, 2))
    'parameter||head.weight|12@1.1.2'
    """
    return f"{kind}|{state}|{name}|{first}{order}"


def order_of(text: str) -> ElementOrder:
    """
    >>> order_of("1.3.2"), order_of("") == NATURAL
    (ElementOrder(dim=1, blocks=3, ways=2), True)
    """
    return ElementOrder(*map(int, text.split("."))) if text else NATURAL


def saved(state: DeviceState, owned: Collection[str]) -> Tensors:
    """The pieces that this device writes: its parameters, buffers and optimizer states."""
    settle(state.device)
    found: Tensors = {}
    for value, bucket in state.buckets.items():
        if value in owned:
            refuse_counting(bucket)
            for part in bucket.parts():
                flat = part.parameter.data.flatten().cpu()
                found[key_of(PARAMETER, "", part.name, part.first, part.order)] = flat
                found.update(optimizer_pieces(bucket, part))
    return found


def optimizer_pieces(bucket: BucketState, part: HeldPart) -> Iterator[tuple[str, torch.Tensor]]:
    """A state with its parameter's shape is cut like it. Others (a step count) stay whole."""
    name, first, _, parameter, order = part
    held = bucket.optimizer.state.get(parameter, {}) if bucket.optimizer is not None else {}
    for state, value in held.items():
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape and state != STEP:
            yield key_of(PARAMETER, state, name, first, order), value.detach().flatten().cpu()
        elif isinstance(value, torch.Tensor):
            yield key_of(WHOLE, state, name, 0), value.detach().cpu()
        elif isinstance(value, bool | int | float):
            kind = torch.float64 if isinstance(value, float) else torch.int64
            yield key_of(NUMBER, state, name, 0), torch.tensor(value, dtype=kind)
        elif value is not None:
            raise refused(
                f"the optimizer's {state!r} of {name} is a {type(value).__name__}",
                "use an optimizer that keeps only tensors and numbers",
            )


def refuse_counting(bucket: BucketState) -> None:
    """A count in a group belongs to no parameter, so it would start again after `resume`."""
    if bucket.optimizer is None or bucket.first is None:
        return
    now = settings(bucket.optimizer, bucket.scheduler is not None)
    for group, then in zip(now, bucket.first, strict=True):
        changed = [key for key, value in group.items() if then.get(key, value) != value]
        if changed or group.keys() - then.keys() - set(SCHEDULED):
            raise refused(
                f"the optimizer's groups changed during training ({', '.join(changed) or 'new'})",
                "keep what changes in the optimizer's state, and set rates with lr_scheduler",
            )


@dataclass(frozen=True)
class Saved:
    """A piece in a checkpoint: its kind, where it starts in its tensor, and its length."""

    kind: str
    state: str  # of the optimizer; "" for the parameter itself
    first: int
    length: int
    key: str
    order: ElementOrder = NATURAL

    def overlaps(self, first: int, length: int, order: ElementOrder) -> bool:
        """Whether a part of its tensor needs it. What is not cut is needed by every part, and so
        is all that lies in another order."""
        inside = self.first < first + length and first < self.first + self.length
        return inside or self.kind != PARAMETER or self.order != order


@dataclass
class Reader:
    """A checkpoint's pieces, by the name of the parameter that they belong to."""

    folder: Path
    known: dict[str, list[Saved]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        import torch.distributed.checkpoint as dcp

        self.metadata = dcp.FileSystemReader(self.folder).read_metadata().state_dict_metadata
        for key, found in self.metadata.items():
            kind, state, rest = key.split("|", 2)
            name, _, at = rest.rpartition("|")
            first, _, order = at.partition("@")
            length = torch.Size(found.size).numel()
            one = Saved(kind, state, int(first), length, key, order_of(order))
            self.known.setdefault(name, []).append(one)

    def fill(self, bucket: BucketState) -> None:
        every = bucket.parts()
        parts = [part for part in every if part.parameter.numel() and part.name in self.known]
        tensors = self.read({one.key for part in parts for one in self.of(part)})
        for part in parts:
            held, parameter = self.states(tensors, part), part.parameter
            value = held.pop("")
            parameter.data.copy_(value)
            if bucket.optimizer is not None and held:
                moved = on_its_device(bucket.optimizer, parameter, held)
                bucket.optimizer.state[parameter] = in_its_type(parameter, value.dtype, moved)
        bucket.round_masters()

    def whole(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """A parameter or buffer. Returns `like` if no step had used it."""
        if name not in self.known or not like.numel():
            return like
        part = HeldPart(name, 0, like.shape, torch.nn.Parameter(like, requires_grad=False))
        tensors = self.read({one.key for one in self.of(part)})
        return torch.as_tensor(self.states(tensors, part)[""])

    def rest(self, names: Collection[str]) -> Tensors:
        """All pieces of parameters that are not in `names`."""
        others = [pieces for name, pieces in self.known.items() if name not in names]
        return self.read({one.key for pieces in others for one in pieces})

    def of(self, part: HeldPart) -> list[Saved]:
        """All pieces that a part of a parameter needs."""
        length = part.parameter.numel()
        return [o for o in self.known[part.name] if o.overlaps(part.first, length, part.order)]

    def read(self, keys: Collection[str]) -> Tensors:
        import torch.distributed.checkpoint as dcp

        found = {
            key: torch.empty(self.metadata[key].size, dtype=self.metadata[key].properties.dtype)
            for key in keys
        }
        try:
            with quiet():
                dcp.load(found, storage_reader=dcp.FileSystemReader(self.folder), no_dist=True)
        except dcp.CheckpointException as error:
            reasons = sorted({str(reason) for reason, _ in error.failures.values()})
            raise refused(f"{self.folder} cannot be read: {'; '.join(reasons)}", WHERE) from None
        return found

    def states(self, tensors: Tensors, part: HeldPart) -> dict[str, Any]:
        """A part of the parameter ("") and of each state of its optimizer."""
        pieces: dict[tuple[str, str], list[Saved]] = {}
        for one in self.of(part):
            pieces.setdefault((one.kind, one.state), []).append(one)
        held: dict[str, Any] = {}
        for (kind, state), found in pieces.items():
            value = tensors[found[0].key]
            if kind == PARAMETER:
                value = in_order(tensors, found, part)
            held[state] = value.item() if kind == NUMBER else value
        return held


def in_order(tensors: Tensors, pieces: Collection[Saved], part: HeldPart) -> torch.Tensor:
    """A part, in its own order. If pieces are in another order, the whole tensor is made first."""
    order, size = next(one.order for one in pieces), part.parameter.numel()
    if order == part.order:
        return joined(tensors, pieces, part.first, size).view(part.parameter.shape)
    whole = order.whole(joined(tensors, pieces, 0, part.shape.numel()), part.shape)
    flat = part.order.flat(whole)[part.first : part.first + size]
    return flat.view(part.parameter.shape)


def joined(tensors: Tensors, pieces: Collection[Saved], first: int, length: int) -> torch.Tensor:
    """Some elements, put together from the pieces that overlap them."""
    filled = 0
    whole = next(tensors[one.key] for one in pieces).new_empty(length)
    for one in pieces:
        low, high = max(first, one.first), min(first + length, one.first + one.length)
        whole[low - first : high - first] = tensors[one.key][low - one.first : high - one.first]
        filled += high - low
    if filled != length:
        raise refused("it contains only part of a parameter", WHERE)
    return whole


def on_its_device(
    optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, held: Mapping[str, Any]
) -> dict[str, Any]:
    """States on the parameter's device. Single numbers only if the optimizer reads them there."""
    groups = (g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    group: dict[str, Any] = next(groups, {})
    on_device = group.get("fused") or group.get("capturable")

    def moved(state: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        single = value.dim() == 0 and (state == STEP or parameter.dim() > 0)
        return value.to("cpu" if single and not on_device else parameter.device)

    return {state: moved(state, value) for state, value in held.items()}


def in_its_type(
    parameter: torch.nn.Parameter, was: torch.dtype, held: Mapping[str, Any]
) -> dict[str, Any]:
    """States that had the type of their parameter when they were saved still have it."""

    def typed(state: str, value: Any) -> Any:
        follows = isinstance(value, torch.Tensor) and value.dtype == was and state != STEP
        return value.to(parameter.dtype) if follows else value

    return {state: typed(state, value) for state, value in held.items()}


def refused(what: str, fix: str) -> InputError:
    return InputError.of("checkpoint", what, fix)


@contextmanager
def quiet() -> Iterator[None]:
    """Without torch's warning that there is only one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is.*")
        yield
