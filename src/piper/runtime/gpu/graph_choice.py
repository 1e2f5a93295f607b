"""`graphs="auto"`: a few steps without CUDA graphs, a few with them, then whichever is better.

Graphs have memory of their own, so they must save a larger part of the time than they add to the
memory. Every device decides by itself. Messages are the same either way, so devices need not
agree, and a step takes about as long on each of them. Nobody asked for graphs, so they must not be
the reason that a run fails: they leave memory for other work, such as evaluation, and are not tried
with an optimizer that keeps its gradients.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from piper.plan.instructions import Fetch, Plan, Store, Update
from piper.runtime.batch import StepInputs
from piper.runtime.execute import Act, Faster, Program
from piper.runtime.gpu.cuda_graphs import keeps_gradients
from piper.runtime.gpu.graph_memory import separate_state
from piper.runtime.gradient_norm import as_tuple
from piper.runtime.torch_private import free_workspaces

LOG = logging.getLogger("piper")
UNTIMED = 1  # steps of each kind before its times count: memory is allocated, clocks rise
TIMED = 4  # steps of each kind: the fastest counts, since what disturbs one only adds to it
GAIN = 0.98  # graphs hold memory between steps, so they must be worth it


@dataclass
class GraphChoice:
    """What a step runs, until the choice is made and afterwards."""

    program: Program
    plain: Faster | None  # None: one function per instruction
    record: Callable[[], Faster]
    clock: Callable[[], float]
    free: Callable[[], int]  # bytes of the device that nothing has reserved
    reserved: Callable[[], int]  # bytes that this process has reserved
    graphs: Faster | None = None
    chosen: bool = False
    state_pool: object | None = None  # the memory of optimizer state
    keeps: bool = False  # whether an optimizer keeps gradients, which graphs overwrite
    times: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    memory: dict[bool, int] = field(default_factory=dict)  # reserved after the steps of each kind

    def begin(self, batch: StepInputs) -> Sequence[tuple[int, Act]]:
        if self.chosen:
            return self.acts(self.graphs, batch)
        if self.graphs is None and self.is_known(False):
            self.try_recording()
        if self.is_known(True):
            self.choose()
        if self.chosen:
            return self.acts(self.graphs, batch)
        return self.measured(self.acts(self.graphs, batch), self.graphs is not None)

    @property
    def without(self) -> bool:
        """Whether it has chosen, and not graphs."""
        return self.chosen and self.graphs is None

    def acts(self, faster: Faster | None, batch: StepInputs) -> Sequence[tuple[int, Act]]:
        faster = faster or self.plain
        return list(enumerate(self.program.acts)) if faster is None else faster.begin(batch)

    def is_known(self, graphs: bool) -> bool:
        return len(self.times[graphs]) == UNTIMED + TIMED

    def measured(self, acts: Sequence[tuple[int, Act]], graphs: bool) -> Sequence[tuple[int, Act]]:
        """The same functions, and one that notes how long they took."""
        acts = acts if graphs else list(self.watched(acts))
        if not self.times[False]:
            empty_cache(self.program.device)  # of what was there before the first step
        began = self.clock()

        def end() -> None:
            self.program.finish()  # no message is in flight then
            self.times[graphs].append(self.clock() - began)
            self.memory[graphs] = self.reserved()

        return [*acts, (len(self.program.plan.instructions) - 1, end)]

    def watched(self, acts: Sequence[tuple[int, Act]]) -> Iterator[tuple[int, Act]]:
        """Look at optimizers right after their updates."""
        for k, act in acts:
            yield k, act
            one = self.program.plan.instructions[k]
            if isinstance(one, Update):
                yield k, partial(self.look, one)

    def look(self, update: Update) -> None:
        grads = as_tuple(self.program.slots[self.program.slot(update.grad)])
        optimizer = self.program.home(update.bucket).optimizer
        self.keeps = self.keeps or keeps_gradients(optimizer, grads)

    def try_recording(self) -> None:
        """Between two steps."""
        why_not = self.recorded()
        if why_not:
            self.chosen, self.graphs = True, None
            empty_cache(self.program.device)
            LOG.info("device %d: no CUDA graphs, %s", self.program.plan.device, why_not)

    def recorded(self) -> str:
        """Record. Returns a reason to go without; at least as much memory as they take is left."""
        if self.keeps:
            return "because the optimizer keeps the gradients that it is given"
        forget_values(self.program)
        try:
            self.move_state()
            before = self.free()
            self.graphs = self.record()
        except torch.OutOfMemoryError:
            return "which do not fit"
        left = self.free()
        return "which would leave too little memory" if left < before - left else ""

    def move_state(self) -> None:
        """To memory of its own, so that all other memory of the steps before can be given back."""
        device, buckets = self.program.device, self.program.state.buckets.values()
        empty_cache(device)
        try:
            self.state_pool = separate_state([bucket.optimizer for bucket in buckets], device)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # it only saves memory
            LOG.info("optimizer state stays where it is: %s", error)
        empty_cache(device)

    def choose(self) -> None:
        without, with_graphs = (min(self.times[kind][UNTIMED:]) for kind in (False, True))
        more, less = self.memory[True], self.memory[False]
        better = with_graphs < GAIN * without and with_graphs * more <= without * less
        self.chosen = True
        if not better:
            self.graphs = None
            empty_cache(self.program.device)
        LOG.info(
            "device %d: a step takes %.1f ms and %.2f GiB with CUDA graphs, %.1f ms and %.2f GiB "
            "without; it runs %s",
            self.program.plan.device, 1e3 * with_graphs, more / 2**30, 1e3 * without, less / 2**30,
            "with them" if better else "without",
        )  # fmt: skip


def is_suited(plan: Plan) -> bool:
    """Whether graphs are tried. If a strategy offloads, it has no memory for them."""
    return not any(isinstance(one, Store | Fetch) for one in plan.instructions)


def forget_values(program: Program) -> None:
    """What a step has left behind. States stay."""
    states = {program.slot(state.value) for state in program.plan.states}
    program.slots[:] = [held if k in states else None for k, held in enumerate(program.slots)]


def empty_cache(device: torch.device) -> None:
    """Give back what nothing uses, with the workspaces of products, which are made again."""
    if device.type == "cuda":
        free_workspaces()
        torch.cuda.empty_cache()


def free_memory() -> int:
    free, _ = torch.cuda.mem_get_info()
    return free


def reserved_memory() -> int:
    return torch.cuda.memory_reserved()


def device_clock() -> float:
    """The time once all kernels are done."""
    torch.cuda.synchronize()
    return time.perf_counter()
