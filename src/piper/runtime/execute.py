"""Run a plan: every instruction becomes one small function, and a step is a loop over these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, assert_never

import torch

from piper.errors import RunError
from piper.plan.instructions import (
    Add,
    Exchange,
    Fetch,
    Free,
    Gather,
    Instruction,
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
    Waits,
    is_message,
    line,
)
from piper.runtime.batch import StepInputs
from piper.runtime.comm.flat_messages import packed, unpacked
from piper.runtime.comm.gather_buffers import GatherBuffer, gathered_bytes
from piper.runtime.comm.gloo import Comm, Handle
from piper.runtime.comm.in_flight import Arrived, Shards, Single
from piper.runtime.comm.redistribution import redistribute, sliced
from piper.runtime.comm.token_routes import refuse_uncounted
from piper.runtime.gradient_norm import as_tuple, square
from piper.runtime.host_memory import host_memory
from piper.runtime.plan_values import counted, ending, exchanged, picked, results, waited_for
from piper.runtime.processes.activity import activity
from piper.runtime.state.device_state import BucketState, DeviceState
from piper.runtime.state.offloaded_optimizer import fetch_state, store_state
from piper.runtime.state.offloaded_parameters import BucketMemory
from piper.runtime.step_errors import step_error
from piper.runtime.torch_private import foreach_add_
from piper.runtime.updates import BucketUpdate

Act = Callable[[], None]


class Faster(Protocol):
    """What a step runs instead of one function per instruction: joined kernels, CUDA graphs."""

    def begin(self, batch: StepInputs) -> Sequence[tuple[int, Act]]: ...


Kernel = Callable[..., Sequence[Any]]
OWN = (ValueError, torch.OutOfMemoryError)  # this device's own errors; all others mean a lost peer


@dataclass
class Program:
    """A plan that is ready to run on one device. Buffers are slots of a list, resolved once."""

    plan: Plan
    kernels: Callable[[str, str], Kernel]  # region, phase
    state: DeviceState
    comm: Comm
    loss_dtype: torch.dtype = torch.float32
    slots: list[Any] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    handles: list[Handle | None] = field(default_factory=list)
    batch: StepInputs = field(default_factory=lambda: StepInputs((), ()))
    totals: torch.Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))
    losses: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for state in self.plan.states:
            self.slots[self.slot(state.value)] = self.state.buckets[state.value].tensors
        self.handles = [None] * len(self.plan.instructions)
        self.device = self.state.device
        self.gathered: dict[str, GatherBuffer] = {}  # by value
        self.host = host_memory(self.device)
        self.squares, self.counted = dict[int, torch.Tensor](), dict(counted(self.plan))
        self.results = {k: self.slot(name) for k, name in results(self.plan)}
        self.exchanged = {k: tuple(map(self.slot, names)) for k, names in exchanged(self.plan)}
        self.ending = ending(self.plan)
        self.acts = [self.act(k, one) for k, one in enumerate(self.plan.instructions)]
        self.own = self.acts  # tools replace `acts` for a while
        self.faster: Faster | None = None
        self.each_alone: Act = lambda: None  # makes the kernels that tools run and a step does not
        self.arrival: Callable[[int, Handle], Any] = waited  # tools replace it for a while
        self.position = 0  # the instruction that runs

    def step(self, batch: StepInputs) -> None:
        """Run the plan once. Afterwards no message is in flight."""
        self.batch, self.losses, self.position = batch, {}, 0
        if self.state.loss_scale is not None:
            self.state.loss_scale.begin(batch)
        try:
            with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
                for position, act in self.todo(batch):
                    self.position = position
                    act()
                self.finish()
                if self.state.loss_scale is not None:
                    self.state.loss_scale.end(self.totals)
        except RunError:
            raise
        except Exception as error:
            held = {name: self.slots[k] for name, k in self.numbers.items()}
            self.handles = [None] * len(self.handles)
            raise step_error(self.plan, self.position, error, held, batch.names) from error

    def todo(self, batch: StepInputs) -> Iterable[tuple[int, Act]]:
        faster = self.faster if self.acts is self.own else None
        return enumerate(self.acts) if faster is None else faster.begin(batch)

    def finish(self) -> None:
        for k, handle in enumerate(self.handles):
            if handle is not None:
                self.wait_one(k)

    def slot(self, value: str) -> int:
        if value not in self.numbers:
            self.numbers[value] = len(self.slots)
            self.slots.append(None)
        return self.numbers[value]

    def wait_one(self, k: int) -> None:
        handle, self.handles[k] = self.handles[k], None
        if handle is not None:
            activity.begin(lambda: waited_for(self.plan, k, self.position))
            try:
                arrived: Any = self.arrival(k, handle)
                activity.end()
            except OWN:
                raise
            except Exception as error:
                raise ConnectionError(f"{line(self.plan.instructions[k])}: {error}") from error
            if k in self.results:
                self.slots[self.results[k]] = arrived
            elif k in self.exchanged:
                for slot, tensor in zip(self.exchanged[k], arrived, strict=True):
                    self.slots[slot] = tensor

    def act(self, k: int, instruction: Instruction) -> Act:
        """One instruction as a function without arguments."""
        return self.after_messages(instruction, self.plain(k, instruction))

    def after_messages(self, instruction: Instruction, do: Act) -> Act:
        """The function, once the messages that the instruction waits for have arrived."""
        waits = self.messages(instruction)
        if not waits:
            return do

        def wait_then_do() -> None:
            for w in waits:
                self.wait_one(w)
            do()

        return wait_then_do

    def messages(self, instruction: Instruction) -> Waits:
        """The messages that an instruction waits for."""
        code = self.plan.instructions
        return tuple(w for w in instruction.waits if is_message(code[w]))

    def plain(self, k: int, instruction: Instruction) -> Act:
        match instruction:
            case Load():
                return self.load(instruction)
            case Run():
                return self.run(k, instruction)
            case Slice():
                return self.slice(instruction)
            case Keep():
                return self.keep(instruction)
            case Add():
                return self.add(instruction)
            case Send():
                return self.send(k, instruction)
            case Recv():
                return self.recv(k, instruction)
            case Reduce():
                return self.reduce(k, instruction)
            case Gather():
                return self.gather(k, instruction)
            case Exchange():
                return self.exchange(k, instruction)
            case Redistribute():
                return self.redistribute(k, instruction)
            case Store() | Fetch():
                return self.copy(k, instruction)
            case Total():
                return self.total(k, instruction)
            case Update():
                return self.bucket_update(k, instruction)
            case Free():
                return self.free(instruction)
            case _:
                assert_never(instruction)

    def load(self, load: Load) -> Act:
        slots, into = self.slots, self.slot(load.value)

        def act() -> None:
            slots[into] = self.loaded(load)

        return act

    def loaded(self, load: Load) -> torch.Tensor:
        return self.batch.loaded(load, self.loss_dtype, self.device)

    def run(self, position: int, run: Run) -> Act:
        kernel: Kernel | None = None  # made when it is first used
        slots = self.slots
        operands, writes = picked(map(self.slot, run.reads)), tuple(map(self.slot, run.writes))
        given = [self.slot(value) for value in run.reads if value in self.ending[position]]

        def act() -> None:
            nonlocal kernel
            if kernel is None:
                kernel = self.kernels(run.region, run.phase)
            for k in given:
                if isinstance(slots[k], tuple):
                    slots[k] = list(slots[k])
            results = kernel(*operands(slots))
            for k, result in zip(writes, results, strict=True):
                slots[k] = result

        return act

    def slice(self, one: Slice) -> Act:
        slots, into, value = self.slots, self.slot(one.into), self.slot(one.value)

        def act() -> None:
            slots[into] = sliced(slots[value], one.part, one.parts)

        return act

    def keep(self, keep: Keep) -> Act:
        slots, into, value = self.slots, self.slot(keep.into), self.slot(keep.value)

        def act() -> None:
            slots[into], slots[value] = slots[value], None

        return act

    def add(self, add: Add) -> Act:
        slots, into, value = self.slots, self.slot(add.into), self.slot(add.value)

        def act() -> None:
            part, slots[value] = slots[value], None
            foreach_add_(as_tuple(slots[into]), as_tuple(part))

        return act

    def send(self, k: int, send: Send) -> Act:
        slots, value = self.slots, self.slot(send.value)

        def act() -> None:
            self.handles[k] = self.comm.send(
                as_tuple(slots[value]), send.shapes, send.peer, send.stream
            )

        return act

    def recv(self, k: int, recv: Recv) -> Act:
        self.slot(recv.value)
        state = self.state.buckets.get(recv.value)
        into = state.tensors if state else None

        def act() -> None:
            arrival = self.comm.recv(recv.shapes, recv.peer, recv.stream, into)
            self.handles[k] = arrival if recv.bundle else Single(arrival)

        return act

    def reduce(self, k: int, reduce: Reduce) -> Act:
        slots, value = self.slots, self.slot(reduce.value)

        def act() -> None:
            tensors, slots[value] = list(as_tuple(slots[value])), None
            shapes = [tensor.shape for tensor in tensors]
            flats = [packed(tensors, message) for message in reduce.messages]
            if reduce.scatter:
                start = self.comm.reduce_scatter
                shards = [start(flats.pop(0), reduce.stream, reduce.group) for _ in reduce.messages]
                self.handles[k] = Shards(shards)
            else:
                works = [self.comm.all_reduce(f, reduce.stream, reduce.group) for f in flats]
                self.handles[k] = Arrived(works, unpacked(flats, reduce.messages, shapes))

        return act

    def gather(self, k: int, gather: Gather) -> Act:
        buffer = self.state.buffer(gather.buffer, self.plan.buffers[gather.buffer])
        self.gathered[gather.into] = buffer
        views = buffer.views(gather, self.plan.device)
        slots, value, size = self.slots, self.slot(gather.value), gathered_bytes(gather)

        def act() -> None:
            buffer.hold(size)
            self.handles[k] = views.fill(self.comm, slots[value], gather)

        return act

    def exchange(self, k: int, one: Exchange) -> Act:
        slots, reads = self.slots, tuple(map(self.slot, one.reads))

        def act() -> None:
            *tokens, route = [slots[r] for r in reads]  # or counts instead of a route
            if one.way == "counted" and not route.is_cuda:  # on GPUs, the exchange thread checks
                refuse_uncounted(route, tokens[0])
            start = self.comm.exchange
            self.handles[k] = start(tuple(tokens), route, one.way, one.stream, one.group)

        return act

    def redistribute(self, k: int, one: Redistribute) -> Act:
        slots, value = self.slots, self.slot(one.value)

        def act() -> None:
            given = slots[value]
            self.handles[k] = redistribute(self.comm, given, one.step, one.stream, one.group)

        return act

    def copy(self, k: int, one: Store | Fetch) -> Act:
        slots, value = self.slots, self.slot(one.value)
        stores, host = isinstance(one, Store), self.host
        if one.bucket:
            bucket, move = self.home(one.bucket), store_state if stores else fetch_state
            return partial(self.start, k, partial(move, bucket, host, one.stream))
        if stores and one.into in self.state.buckets:
            host = BucketMemory(self.state.buckets[one.into], self.host)
        start = host.store if stores else host.fetch
        return partial(self.start, k, lambda: start(slots[value], one.stream))

    def start(self, k: int, copy: Callable[[], Any]) -> None:
        self.handles[k] = copy()

    def total(self, k: int, total: Total) -> Act:
        losses = [(self.slot(value), part) for value, part in total.losses]
        grads = [self.slot(value) for value in total.grads]

        def act() -> None:
            if losses:  # copies: the next step overwrites the originals
                stacked = torch.stack([self.slots[k] for k, _ in losses])
                self.losses = dict(zip((part for _, part in losses), stacked, strict=True))
            self.totals = torch.zeros(2, dtype=torch.float64, device=self.device)
            self.count_losses()
            for grad in grads:
                found = self.squares.pop(grad, None)
                self.totals[1] += square(self.slots[grad]) if found is None else found
            self.handles[k] = self.comm.add_up(self.totals)

        return act

    def count_losses(self) -> None:
        for part, loss in self.losses.items():
            if self.batch.weights[part]:  # without weight, it may be a mean over nothing
                self.totals[0] += loss.double() * self.batch.weights[part]

    def bucket_update(self, k: int, update: Update) -> BucketUpdate:
        counts = self.counted.get(update.grad, k) > k
        return BucketUpdate(self, update, self.home(update.bucket), counts)

    def home(self, bucket: str) -> BucketState:
        """The state of a bucket that is updated. Its other states are copies."""
        found = (s for s in self.plan.states if s.bucket == bucket and s.home)
        return self.state.buckets[next(found).value]

    def watch(self, bucket: BucketState) -> None:
        """A hook for tests and tools to see final gradients. It does nothing by default."""

    def free(self, free: Free) -> Act:
        slots, ended = self.slots, tuple(map(self.slot, free.values))
        buffers = [self.gathered[value] for value in free.values if value in self.gathered]

        def act() -> None:
            for k in ended:
                slots[k] = None
            for buffer in buffers:
                buffer.release()

        return act


def waited(_: int, handle: Handle) -> Any:
    """What a message or copy brings."""
    return handle.wait()
