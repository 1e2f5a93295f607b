"""CUDA graphs: the kernels between two messages are launched as one.

All segments are recorded before the first step, in the order of the plan, while no message is in
flight. They share one memory pool: a later segment may reuse memory that an earlier one freed, as
in a step without graphs, and replays keep that order. Values that are received have a place in the
pool, too. The host reads results through tensors that do not own their memory.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, assert_never

import torch

from piper.plan.analyse.graph_segments import Hosted, Recorded, Segment, segments
from piper.plan.instructions import (
    Add,
    Exchange,
    Fetch,
    Free,
    Gather,
    Keep,
    Load,
    Plan,
    Recv,
    Redistribute,
    Reduce,
    Run,
    Send,
    Slice,
    Store,
    Total,
    Update,
    is_dynamic,
)
from piper.runtime.batch import StepInputs
from piper.runtime.comm.gather_buffers import GatherViews, gathered_bytes
from piper.runtime.comm.gloo import empty
from piper.runtime.comm.in_flight import Single
from piper.runtime.execute import Act, Program
from piper.runtime.gpu.graph_memory import growing_segments, nothing_freed
from piper.runtime.gpu.warmup import Known, zeros
from piper.runtime.gradient_norm import as_tuple
from piper.runtime.joined_runs import Joins, Together, plain_acts
from piper.runtime.torch_private import pytree, release_pool, storage_at

LOG = logging.getLogger("piper")


class Tape(Protocol):
    """Records functions, and returns functions that replay them."""

    def record(self, do: Act) -> Act: ...

    def alias(self, tensor: torch.Tensor) -> torch.Tensor: ...


class CudaTape:
    """CUDA graphs with one memory pool."""

    def __init__(self) -> None:
        """Record on the current stream if compute has one of its own, with a limit of SMs."""
        now = torch.cuda.current_stream()
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream() if now == torch.cuda.default_stream() else now

    def record(self, do: Act) -> Act:
        """Record without torch.cuda.graph, which synchronizes and collects garbage each time.

        Other threads (NCCL's watchdog) may go on meanwhile.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # a region of views only
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                do()
                graph.capture_end()
            except BaseException:
                self.abandon(graph)
                raise
        replay: Act = graph.replay
        return replay

    def abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a recording that failed. If even that fails, torch leaves the pool open, and would
        keep its memory until the recording ends."""
        try:
            graph.capture_end()
        except RuntimeError:
            device = torch.cuda.current_device()
            with suppress(RuntimeError, AttributeError):
                release_pool(device, self.pool)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_cuda:
            return tensor
        whole = tensor.untyped_storage()
        storage = storage_at(whole.data_ptr(), tensor.device, whole.nbytes())
        found = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return found.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


class NotRecordable(Exception):
    """Some regions cannot be recorded."""

    def __init__(self, names: set[tuple[str, str]], reason: str) -> None:
        super().__init__(reason)
        self.names = names


@dataclass
class Graphs:
    """A program as recorded segments, and the instructions between them."""

    program: Program
    loads: list[tuple[Load, int, torch.Tensor]]
    acts: list[tuple[int, Act]]
    places: list[Act] = field(default_factory=list)  # keep the memory that messages arrive in
    weights: tuple[float, ...] | None = None

    def begin(self, batch: StepInputs) -> Sequence[tuple[int, Act]]:
        """Copy the batch to fixed addresses. Returns the functions of the step."""
        weights = (*batch.weights, batch.scale)
        same, self.weights = weights == self.weights, weights
        for load, slot, fixed in self.loads:
            if not (same and load.role == "seed"):
                fixed.copy_(self.program.loaded(load), non_blocking=True)
            self.program.slots[slot] = fixed
        return self.acts


def record_graphs(
    program: Program,
    known: Known,
    tape: Callable[[], Tape] = CudaTape,
    joins: Joins | None = None,
) -> Graphs:
    """Record what can be recorded, with joined runs. The host runs the rest, which is logged."""
    not_recordable: set[tuple[str, str]] = set()
    before = list(program.slots)
    while True:
        program.slots[:] = before + [None] * (len(program.slots) - len(before))
        try:
            with (
                torch.no_grad(),
                torch.autocast(program.device.type, enabled=False),
                nothing_freed(),
                growing_segments(),
            ):
                return Recording(program, known, tape(), not_recordable, joins).graphs()
        except NotRecordable as error:
            names = ", ".join(sorted(f"{phase} of {region}" for region, phase in error.names))
            LOG.info("%s cannot be a CUDA graph: %s", names, error)
            not_recordable |= error.names  # its recordings are freed with the error


@dataclass
class Recording:
    """Records a program."""

    program: Program
    known: Known
    tape: Tape
    not_recordable: set[tuple[str, str]]
    joins: Joins | None = None
    loads: list[tuple[Load, int, torch.Tensor]] = field(default_factory=list)
    held: dict[int, Any] = field(default_factory=dict)  # operands of messages in flight
    pinned: list[Any] = field(default_factory=list)  # memory that results may alias
    places: list[Act] = field(default_factory=list)  # recordings that only allocate
    by_host: set[str] = field(default_factory=set)  # values that the host does more with than send

    def graphs(self) -> Graphs:
        slots = self.program.slots
        before = list(slots)
        for one in self.program.plan.instructions:
            if isinstance(one, Load):
                fixed = zeros(self.program, self.known, one.value)
                slot = self.program.slot(one.value)
                slots[slot] = fixed
                self.loads.append((one, slot, fixed))
        found = segments(self.program.plan, self.fits)
        self.by_host = set(read_by_host(self.program.plan, found))
        acts = [(one.at if isinstance(one, Hosted) else one.at[0], self.act(one)) for one in found]
        slots[:] = before + [None] * (len(slots) - len(before))
        return Graphs(self.program, self.loads, acts, self.places)

    def fits(self, run: Run, moving: frozenset[str]) -> bool:
        """Dynamic sizes cannot be recorded, nor moving bundles, whose layout is not known."""
        if (run.region, run.phase) in self.not_recordable or any(self.known(n)[1] for n in moving):
            return False
        values = (*run.reads, *run.writes)
        shapes = (s for n in values for s in self.known(n)[0])
        return not any(map(is_dynamic, shapes))

    def act(self, segment: Hosted | Recorded) -> Act:
        return (
            self.recorded(segment)
            if isinstance(segment, Recorded)
            else self.run_by_host(segment.at)
        )

    def recorded(self, segment: Recorded) -> Act:
        program, slots, slot = self.program, self.program.slots, self.program.slot
        self.ended(segment.waits)
        copies = [(slot(n), self.copied(n)) for n in segment.copied]
        replay = self.replayed(segment.at)
        for k, _ in copies:
            slots[k] = None
        shown = [(slot(n), self.alias(slots[slot(n)])) for n in segment.exported]
        ended, waits = [slot(n) for n in segment.freed], segment.waits

        def act() -> None:
            for w in waits:
                program.wait_one(w)
            for k, fixed in copies:
                put(slots[k], fixed)
            replay()
            for k, alias in shown:
                slots[k] = alias
            for k in ended:
                slots[k] = None

        return Together(segment.at, act)

    def copied(self, name: str) -> torch.Tensor:
        """Memory of the pool for a moving value, which is used again once this segment is over."""
        owners = list[torch.Tensor]()
        make = partial(zeros, self.program, self.known, name)
        self.places.append(self.tape.record(lambda: owners.append(make())))
        self.program.slots[self.program.slot(name)] = owners[0]
        return self.tape.alias(owners[0])

    def replayed(self, at: tuple[int, ...]) -> Act:
        code = self.program.plan.instructions
        acts, now = plain_acts(self.program, at, self.joins), at[0]

        def do() -> None:
            nonlocal now
            for now, act in acts:  # noqa: B007 (`now` is read if it fails)
                act()

        if not any(isinstance(code[k], Run | Add | Slice) for k in at):  # no kernels
            do()
            return lambda: None
        try:
            return self.tape.record(do)
        except RuntimeError as error:
            runs = [one for one in (code[now], *(code[k] for k in at)) if isinstance(one, Run)]
            if not runs:
                raise
            guilty = runs[:1] if isinstance(code[now], Run) else runs
            names = set().union(*map(self.alike, guilty))
            raise NotRecordable(names, str(error).partition("\n")[0]) from None

    def alike(self, run: Run) -> set[tuple[str, str]]:
        """The runs with the same kernel."""
        kernels, runs = self.program.kernels, self.program.plan.instructions
        names = {(one.region, one.phase) for one in runs if isinstance(one, Run)}
        same = kernels(run.region, run.phase)
        return {name for name in names if kernels(*name) is same} | {(run.region, run.phase)}

    def run_by_host(self, k: int) -> Act:
        """The instruction's own function. While recording, only its effect on memory counts."""
        program, one = self.program, self.program.plan.instructions[k]
        slots, slot = program.slots, program.slot
        self.ended(one.waits)
        match one:
            case Recv() if one.value not in program.state.buckets and not any(
                map(is_dynamic, one.shapes)
            ):
                return self.received(k, one)
            case Gather():
                return self.gathered(k, one)
            case Reduce():
                self.held[k], slots[slot(one.value)] = slots[slot(one.value)], None
                if not one.scatter:
                    self.pinned.append(self.held[k])  # the sum may alias its parts
            case Run():
                self.pinned += [slots[slot(name)] for name in one.reads]  # results may alias them
            case Add():
                slots[slot(one.value)] = None
            case Update():
                return self.updated(k, one)
            case (
                Recv() | Load() | Keep() | Slice() | Send() | Exchange() | Redistribute() | Total()
            ):
                pass
            case Store() | Fetch() | Free():
                pass
            case _:
                assert_never(one)
        return program.acts[k]

    def updated(self, k: int, update: Update) -> Act:
        """Check once that the optimizer keeps no gradients, which the next step overwrites."""
        act, checked = self.program.acts[k], False
        bucket = self.program.home(update.bucket)
        bucket.in_parts = True
        grad = self.program.slot(update.grad)

        def update_and_look() -> None:
            nonlocal checked
            act()
            if not checked:
                refuse_kept_gradients(bucket.optimizer, as_tuple(self.program.slots[grad]))
                checked = True

        return update_and_look

    def received(self, k: int, recv: Recv) -> Act:
        """Receive at a fixed address in the pool, which is used again once the value is freed."""
        program = self.program
        owners = self.placed(recv.value, lambda: empty_for(recv, program.device))
        program.slots[program.slot(recv.value)] = tuple(owners) if recv.bundle else owners[0]
        tensors = tuple(map(self.tape.alias, owners))

        def act() -> None:
            arrival = program.comm.recv(recv.shapes, recv.peer, recv.stream, tensors)
            program.handles[k] = arrival if recv.bundle else Single(arrival)

        return program.after_messages(recv, act)

    def gathered(self, k: int, gather: Gather) -> Act:
        """Gather to a fixed address in the pool, which is used again once the value is freed."""
        program, shards = self.program, self.program.slot(gather.value)
        size = [gathered_bytes(gather)]
        owner = self.placed(gather.into, lambda: [empty(size, "uint8", program.device)])[0]
        whole = GatherViews.of(owner, gather, program.plan.device).parameters
        program.slots[program.slot(gather.into)] = whole
        views = GatherViews.of(self.tape.alias(owner), gather, program.plan.device)

        def act() -> None:
            program.handles[k] = views.fill(program.comm, program.slots[shards], gather)

        return program.after_messages(gather, act)

    def placed(self, value: str, make: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        """Memory of the pool that a message fills."""
        owners = list[torch.Tensor]()
        self.places.append(self.tape.record(lambda: owners.extend(make())))
        if value in self.by_host:
            self.pinned.append(owners)  # results may alias it
        return owners

    def ended(self, waits: Sequence[int]) -> None:
        for k in waits:
            self.held.pop(k, None)

    def alias(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.tape.alias(value)
        return None if value is None else tuple(map(self.tape.alias, value))


def read_by_host(plan: Plan, found: Sequence[Segment]) -> Iterator[str]:
    """What instructions of the host read that may return the same memory."""
    for segment in found:
        one = plan.instructions[segment.at] if isinstance(segment, Hosted) else None
        if one is not None and not isinstance(one, Send | Free):
            yield from one.uses


def refuse_kept_gradients(optimizer: Any, grads: Sequence[torch.Tensor]) -> None:
    if keeps_gradients(optimizer, grads):
        raise ValueError(
            f"{type(optimizer).__name__} keeps the gradients it is given, which graphs "
            "overwrite: let it keep a copy (p.grad.clone()), or leave out graphs=True"
        )


def keeps_gradients(optimizer: Any, grads: Sequence[torch.Tensor]) -> bool:
    places = {grad.untyped_storage().data_ptr() for grad in grads if grad.numel()}
    state = getattr(optimizer, "state", {})
    return any(
        isinstance(kept, torch.Tensor) and kept.untyped_storage().data_ptr() in places
        for kept in pytree.tree_leaves(list(state.values()))
    )


def put(value: torch.Tensor, fixed: torch.Tensor) -> None:
    """Copy a value to its fixed address. The shapes must be equal: no broadcasting."""
    if value.shape != fixed.shape:
        raise ValueError(f"recorded for {tuple(fixed.shape)}, but this is {tuple(value.shape)}")
    fixed.copy_(value)


def empty_for(recv: Recv, device: torch.device) -> list[torch.Tensor]:
    return [empty([size or 0 for size in sizes], dtype, device) for sizes, dtype in recv.shapes]
