"""The state of one device that outlives a step: parameters, optimizers, buffers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler

from piper.errors import InputError
from piper.plan.instructions import Layout, State
from piper.runtime.comm.flat_messages import Piece, pieces
from piper.runtime.comm.gather_buffers import GatherBuffer
from piper.runtime.host_memory import Copying, Pages
from piper.runtime.optimizers.kept_optimizers import KeptOptimizers
from piper.runtime.optimizers.known_optimizers import MakeOptimizer, MakeScheduler
from piper.runtime.optimizers.user_optimizer import (
    forward,
    make_checked,
    make_scheduler,
    settings,
    step_schedulers,
)
from piper.runtime.processes.wire_format import travels
from piper.runtime.state import offloaded_optimizer
from piper.runtime.state.element_order import NATURAL, ElementOrder
from piper.runtime.state.loss_scale import DynamicLossScale
from piper.runtime.state.sharded_optimizer import sharded_optimizer
from piper.runtime.state.used_otherwise import used_otherwise
from piper.runtime.torch_private import foreach_copy_

Named = tuple[str, tuple[int, ...], str]  # name, shape and dtype of a parameter
NamedParameter = tuple[str, torch.nn.Parameter]


class HeldPart(NamedTuple):
    """What a device holds of a parameter: all of it, or some elements in an order."""

    name: str
    first: int
    shape: torch.Size  # of the whole parameter
    parameter: torch.nn.Parameter
    order: ElementOrder = NATURAL


@dataclass(slots=True)
class BucketState:
    """One bucket on one device, whole or a shard. It has an optimizer if it is at home here.

    `tensors` is the memory that plans use. `parameters` are views of it for the optimizer; or
    masters, where the optimizer has its own copy in a finer type. A shard that gathers round is in
    the type of its masters.
    """

    bucket: str
    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    tensors: tuple[torch.Tensor, ...]
    parameters: tuple[torch.nn.Parameter, ...]
    optimizer: torch.optim.Optimizer | None
    trained: bool = True
    pieces: tuple[Piece, ...] | None = None  # None: whole
    orders: tuple[ElementOrder, ...] = ()  # in which pieces are contiguous, of each parameter
    scheduler: LRScheduler | None = None
    first: list[dict[str, Any]] | None = None  # settings of the optimizer's groups at the start
    copies: list[tuple[torch.Tensor, torch.nn.Parameter]] = field(init=False)  # and their masters
    copying: Copying | None = None  # the last copy of what the optimizer keeps, to the host or back
    pages: Pages = field(default_factory=dict)  # of the host, for what the optimizer keeps
    in_parts: bool = False  # whether the optimizer steps on some parameters after others
    storing: Copying | None = None  # the last copy of new parameters to the host
    device: torch.device = torch.device("cpu")  # where it is used and updated
    optimizer_on_host: bool = False  # between updates
    on_host: bool = False  # whether `tensors` are in host memory
    home: Pages = field(default_factory=dict)  # of the host, for `tensors`
    averaged: bool = False  # whether averages of the parameters are kept
    averages: list[torch.Tensor] | None = None  # of `parameters`; None until the first step
    empty: Sequence[NamedParameter] = ()  # in no piece, and still parameters

    def __post_init__(self) -> None:
        pairs = zip(self.views(self.tensors), self.parameters, strict=True)
        self.copies = [(view, master) for view, master in pairs if view.dtype != master.dtype]
        if self.optimizer is not None:
            self.first = settings(self.optimizer, scheduled=False)

    def views(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Views like `parameters`, of tensors with the layout of `self.tensors`."""
        if self.pieces is None:
            return tensors
        flats = [tensor.reshape(-1) for tensor in tensors]
        return [piece.of(flats) for piece in self.pieces]

    def gradients(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradient of each of `parameters`, in its type."""
        pairs = zip(self.parameters, self.views(grads), strict=True)
        return [grad.to(parameter.dtype) for parameter, grad in pairs]

    def round_masters(self) -> None:
        """Write what the optimizer has updated to the memory that plans use."""
        if self.copies:
            foreach_copy_([copy for copy, _ in self.copies], [m.data for _, m in self.copies])

    def put_average(self, k: int, values: torch.Tensor) -> None:
        """The average of one of `parameters`, as it was saved."""
        if self.averages is None:
            self.averages = [parameter.data.clone() for parameter in self.parameters]
        self.averages[k].copy_(values)

    def settle(self) -> None:
        """Block until the host may read the parameters and what the optimizer keeps."""
        for copy in (self.copying, self.storing):
            if copy is not None:
                copy.finish()

    def parts(self) -> Iterator[HeldPart]:
        self.settle()
        if self.pieces is None:
            for name, shape, parameter in zip(
                self.names, self.shapes, self.parameters, strict=True
            ):
                yield HeldPart(name, 0, shape, parameter)
        else:
            for piece, parameter in zip(self.pieces, self.parameters, strict=True):
                k = piece.tensor
                order = self.orders[k] if self.orders[k:] else NATURAL
                order = NATURAL if order.is_natural else order
                yield HeldPart(self.names[k], piece.start, self.shapes[k], parameter, order)
            for name, parameter in self.empty:
                yield HeldPart(name, 0, parameter.shape, parameter)


class Origin(Protocol):
    """A checkpoint, which also fills buckets that are made later."""

    @property
    def known(self) -> Collection[str]:
        """The names of its parameters and buffers."""
        ...

    def fill(self, bucket: BucketState) -> None: ...

    def whole(self, name: str, like: torch.Tensor) -> torch.Tensor: ...

    def pieces(self, names: Collection[str]) -> list[tuple[Any, torch.Tensor]]:
        """All that it has of these, as it is saved again."""
        ...


@travels
@dataclass(frozen=True, slots=True)
class Part:
    """Some elements of a parameter, or of a tensor of its shape."""

    name: str
    first: int
    shape: tuple[int, ...]
    values: torch.Tensor
    order: ElementOrder = NATURAL


@dataclass
class DeviceState:
    """All buckets of one device, by the name of their value in plans."""

    device: torch.device = torch.device("cpu")
    buckets: dict[str, BucketState] = field(default_factory=dict)
    buffers: dict[int, GatherBuffer] = field(default_factory=dict)
    origin: Origin | None = None  # what the run was resumed from
    reads: int = 0  # how often values of a file were put into it
    loss_scale: DynamicLossScale | None = None  # of float16
    ema: float | None = None  # the decay of averages of parameters
    constants: dict[str, torch.Tensor] = field(default_factory=dict)  # that a loss divides by
    kept: KeptOptimizers = field(default_factory=KeptOptimizers)  # by the user's loop, perhaps

    def buffer(self, number: int, size: int) -> GatherBuffer:
        """All programs share it, because their steps never overlap."""
        if number not in self.buffers or self.buffers[number].flat.numel() < size:
            self.buffers[number] = GatherBuffer(size, self.device)
        return self.buffers[number]

    def add(
        self,
        states: Iterable[State],
        contents: Mapping[str, Sequence[Named]],
        trainable: Callable[[str], bool],
        initial: Callable[[str], torch.Tensor],
        make_optimizer: MakeOptimizer,
    ) -> None:
        """Make the buckets of a plan that do not exist yet. `contents` are their parameters."""
        for state in states:
            names = tuple(name for name, _, _ in contents[state.bucket])
            self.refuse_other_bucket(state, names, trainable(state.bucket))
            if state.value not in self.buckets:
                trained = trainable(state.bucket)
                here = partial(on_device, initial, self.device)
                made = make_bucket(state, contents[state.bucket], trained, here, make_optimizer)
                made.device = self.device
                made.averaged = self.ema is not None and made.optimizer is not None
                self.buckets[state.value] = made
                if self.origin is not None:
                    self.origin.fill(made)
                offloaded_optimizer.place(made, state, self.device)

    def schedule(self, make: MakeScheduler, steps: int) -> None:
        """Make schedulers for optimizers that have none, and advance them by `steps`."""
        for bucket in self.buckets.values():
            if bucket.optimizer is not None and bucket.scheduler is None:
                bucket.scheduler = make_scheduler(make, bucket.optimizer)
                forward(bucket.scheduler, steps)

    def advance(self) -> None:
        """Step all schedulers after a step, also those of unused parameters."""
        every = (one.scheduler for one in self.buckets.values())
        step_schedulers([one for one in every if one is not None])

    def refuse_other_bucket(self, state: State, names: tuple[str, ...], trained: bool) -> None:
        """Programs may share buckets, but must not put a parameter into different buckets."""
        known = self.buckets.get(state.value)
        same = known and known.names == names and (known.trained == trained)
        others = [b.names for b in self.buckets.values() if b.bucket != state.bucket]
        taken = {name for other in others for name in other} & set(names)
        was = {name: one.trained for one in self.buckets.values() for name in one.names}
        if flipped := [name for name in names if was.get(name, trained) != trained]:
            raise InputError.of(
                "model",
                f"{', '.join(flipped)[:80]} changed between frozen and trained (requires_grad)",
                "make a new Trainer, with a model that has loaded state_dict() of this one",
            )
        if not same and (known or taken):
            other = sorted(set(known.names) ^ set(names)) if known else sorted(taken)
            raise used_otherwise(other, set(was))

    def whole(
        self,
        found: Mapping[str, torch.Tensor],
        model: Mapping[str, torch.Tensor],
        aliases: Mapping[str, str],
        initial: Callable[[str, torch.Tensor], torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """The state dict of a model. Parameters that no program uses keep their initial values."""

        def rest(name: str, tensor: torch.Tensor) -> torch.Tensor:
            first = initial(name, tensor)
            return self.origin.whole(name, first) if self.origin else first

        first = {name: aliases.get(name, name) for name in model}
        return {
            n: finer(found[f], model[n]) if f in found else rest(f, model[n])
            for n, f in first.items()
        }

    def parts(self, values: Container[str] | None = None) -> list[Part]:
        """All parameters and buffers of this device, or of these states only."""
        return [
            Part(name, first, tuple(shape), parameter.data.flatten().cpu(), order)
            for value, bucket in self.buckets.items()
            if values is None or value in values
            for name, first, shape, parameter, order in bucket.parts()
        ]

    @property
    def learning_rate(self) -> float | None:
        """Of the first parameter on this device; None if nothing is trained here."""
        groups = (group for one in self.optimizers().values() for group in one.param_groups)
        found = next((one["lr"] for one in groups if "lr" in one and one["params"]), None)
        waits = isinstance(found, torch.Tensor) and found.is_cuda
        return None if found is None or waits else float(found)

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {v: b.optimizer for v, b in self.buckets.items() if b.optimizer is not None}


def on_device(
    initial: Callable[[str], torch.Tensor], device: torch.device, name: str
) -> torch.Tensor:
    return initial(name).to(device)


def finer(found: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """At least in the model's type. Frozen parameters may be in a coarser one, without masters."""
    return found.to(torch.promote_types(found.dtype, model.dtype))


def assembled(parts: Iterable[Part]) -> dict[str, torch.Tensor]:
    """Whole tensors from the parts of all devices. Equal parts may occur twice."""
    flats: dict[str, tuple[Part, torch.Tensor]] = {}
    for part in parts:
        if part.name not in flats:
            flats[part.name] = part, part.values.new_empty(torch.Size(part.shape).numel())
        flat = flats[part.name][1]
        flat[part.first : part.first + part.values.numel()] = part.values
    return {name: part.order.whole(flat, part.shape) for name, (part, flat) in flats.items()}


def make_bucket(
    state: State,
    contents: Sequence[Named],
    trained: bool,
    initial: Callable[[str], torch.Tensor],
    make_optimizer: MakeOptimizer,
) -> BucketState:
    if state.ways > 1 or state.shares > 1:
        return make_shard(state, contents, trained, initial, make_optimizer)
    names = tuple(name for name, _, _ in contents)
    types, updated = [getattr(torch, dtype) for *_, dtype in contents], state.home and trained
    values = [initial(name) for name in names]
    if not updated:  # without masters
        values = [value.to(dtype) for value, dtype in zip(values, types, strict=True)]
    parameters = tuple(torch.nn.Parameter(value, requires_grad=trained) for value in values)
    named = list(zip(names, parameters, strict=True))
    optimizer = make_checked(make_optimizer, named) if updated and named else None
    pairs = zip(parameters, types, strict=True)  # kernels run without autograd
    tensors = tuple(parameter.data.to(dtype) for parameter, dtype in pairs)
    shapes = tuple(value.shape for value in values)
    return BucketState(state.bucket, names, shapes, tensors, parameters, optimizer, trained)


def make_shard(
    state: State,
    contents: Sequence[Named],
    trained: bool,
    initial: Callable[[str], torch.Tensor],
    make_optimizer: MakeOptimizer,
) -> BucketState:
    """Make whole parameters, for the optimizer to see, and keep only the pieces of this shard."""
    names = tuple(name for name, _, _ in contents)
    shapes = tuple(torch.Size(shape) for _, shape, _ in contents)
    found = tuple(held_pieces(state, [shape.numel() for shape in shapes]))
    layout = state.messages or [
        (dtype, (k,), share_size(shape, state)) for k, (_, shape, dtype) in enumerate(contents)
    ]
    wholes = [(n, torch.nn.Parameter(initial(n), requires_grad=trained)) for n in names]
    empty = [(n, torch.nn.Parameter(whole.data)) for n, whole in wholes if not whole.numel()]
    masters = empty_shards(layout, wholes, state.ways, trained)
    orders = tuple(element_orders(state, len(names)))
    for piece in found:
        whole = orders[piece.tensor].flat(wholes[piece.tensor][1].detach())
        piece.of(masters).copy_(whole[piece.start : piece.stop])
    flats = masters
    if not state.rounded_late:
        pairs = zip(masters, layout, strict=True)
        flats = [master.to(getattr(torch, dtype)) for master, (dtype, *_) in pairs]
    parameters = tuple(torch.nn.Parameter(p.of(masters), requires_grad=trained) for p in found)
    optimizer = None
    if trained and wholes:
        held = list(zip(found, parameters, strict=True))
        optimizer = sharded_optimizer(make_optimizer, wholes, held, orders, state.ways > 1)
    tensors = tuple(flats)
    if state.ways == 1:
        each = zip(orders, flats, shapes, strict=True)
        tensors = tuple(flat.view(order.local(shape)) for order, flat, shape in each)
    return BucketState(
        state.bucket, names, shapes, tensors, parameters, optimizer, trained, found, orders,
        empty=empty,
    )  # fmt: skip


def element_orders(state: State, count: int) -> Iterator[ElementOrder]:
    """In which the part of this device is contiguous; experts are, as they are in memory."""
    for dim, blocks in state.cuts or ((0, 1),) * count:
        yield ElementOrder(dim, blocks, state.shares)


def empty_shards(
    layout: Sequence[Layout], wholes: Sequence[NamedParameter], ways: int, trained: bool
) -> list[torch.Tensor]:
    """A shard of each message: of trained parameters, in the type of their masters."""
    found = []
    for dtype, tensors, padded in layout:
        first = wholes[tensors[0]][1]
        kind = first.dtype if trained else getattr(torch, dtype)
        found.append(torch.zeros(padded // ways, dtype=kind, device=first.device))
    return found


def share_size(shape: tuple[int, ...], state: State) -> int:
    """Elements of this device's part."""
    return torch.Size(shape).numel() // state.shares


def held_pieces(state: State, numels: Sequence[int]) -> Iterator[Piece]:
    """The pieces of a state: a shard of each parameter, or of this device's part of it."""
    if state.ways == 1:
        for k, numel in enumerate(numels):
            part = numel // state.shares
            yield Piece(k, state.share * part, (state.share + 1) * part, k, 0)
        return
    shared = [numel // state.shares for numel in numels]
    for piece in pieces(state.messages, shared, state.shard, state.ways):
        first = state.share * shared[piece.tensor]
        yield replace(piece, start=first + piece.start, stop=first + piece.stop)
