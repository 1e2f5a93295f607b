"""Find the region that made the first NaN or infinity of a step.

A loss or norm that is not finite says little: by then, it is everywhere. So the step runs again, on
all devices, and every region is checked: the first one that makes a NaN of numbers is the origin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from piper.plan.instructions import Load, Run, is_message
from piper.runtime.batch import StepInputs
from piper.runtime.execute import Act, Program
from piper.runtime.processes.gathering import everyone
from piper.runtime.processes.wire_format import travels
from piper.runtime.torch_private import pytree


@dataclass(frozen=True, slots=True)
class Contents:
    """Which numbers that are not finite some tensors contain."""

    nan: bool = False
    infinity: bool = False


@travels
@dataclass(frozen=True, slots=True)
class Origin:
    """A region, phase and microbatch that makes what is not finite, or reads it."""

    device: int
    position: int  # in the plan of the device
    node: str
    region: str
    phase: str
    makes_nan: bool
    given: str = ""  # what was not finite before: parameters, or a tensor of the batch
    of_infinity: bool = False  # it makes NaN of an infinity that it did not make
    in_batch: bool = False  # whether `given` is a tensor of the batch

    @property
    def order(self) -> tuple[bool, int, bool, int, int]:
        """The most telling one first: parameters, then NaNs, then infinities; forwards first."""
        weight = 2 if self.of_infinity else int(not self.makes_nan)
        return (
            not self.given or self.of_infinity,
            weight,
            self.phase != "F",
            self.position,
            self.device,
        )

    def __str__(self) -> str:
        made = "NaN" if self.makes_nan else "an infinity"
        if self.given and not (self.of_infinity and self.makes_nan):
            return f"{self.given}, which {self.node} on device {self.device} reads"
        of = f" of an infinity in {self.given}" if self.given else ""
        return f"region {self.region}, where {self.node} on device {self.device} makes {made}{of}"


def contents(value: Any) -> Contents:
    """
    >>> contents((torch.ones(2), [torch.tensor([float("nan")])], torch.tensor(3)))
    Contents(nan=True, infinity=False)
    """
    tensors = [one for one in pytree.tree_leaves(value) if is_float(one)]
    nan = any(bool(one.isnan().any()) for one in tensors)
    return Contents(nan, any(bool(one.isinf().any()) for one in tensors))


def is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def origin_of(program: Program, inputs: StepInputs, names: Sequence[str]) -> Origin | None:
    """Run the step again, and find where the first number comes from that is not finite.

    `names` are those of the tensors of the batch. All devices call it. Nothing is updated.
    """
    search = Search(program, inputs, names)
    with search.checking(), buffers_as_they_were(program) as buffers:
        for tensor in filter(is_float, buffers):  # running statistics are NaN already
            tensor.masked_fill_(tensor.isnan(), 0.0)
        program.step(replace(inputs, only_finite=True))
    return min(on_all_devices(search.found), key=lambda one: one.order, default=None)


@dataclass
class Search:
    """Checks what every region of a step reads and writes."""

    program: Program
    inputs: StepInputs
    names: Sequence[str]
    found: list[Origin] = field(default_factory=list)

    def __post_init__(self) -> None:
        plan, buckets = self.program.plan, self.program.state.buckets
        trained = (one.value for one in plan.states if buckets[one.value].optimizer is not None)
        self.given = {name: f"the parameters {name} before the step" for name in trained}
        self.batch = {
            one.value: self.input_text(one)
            for one in plan.instructions
            if isinstance(one, Load) and one.role == "batch"
        }

    def input_text(self, load: Load) -> str:
        """A tensor of the batch, with its first row that has a NaN."""
        tensor = self.inputs.inputs[load.index]
        rows = tensor.isnan().flatten(1).any(1) if tensor.dim() > 1 else tensor.isnan().flatten()
        row = f", row {int(rows.int().argmax())}" if rows.any() else ""
        return f"the tensor {self.names[load.index]} of the batch{row}"

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Inside, every run of a region is checked."""
        program, before = self.program, self.program.acts
        program.each_alone()
        program.acts = [self.checked(k, act) for k, act in enumerate(before)]
        try:
            yield
        finally:
            program.acts = before

    def checked(self, k: int, act: Act) -> Act:
        program, run = self.program, self.program.plan.instructions[k]
        if not isinstance(run, Run):
            return act
        waits = [w for w in run.waits if is_message(program.plan.instructions[w])]

        def check() -> None:
            for w in waits:
                program.wait_one(w)
            reads = {name: contents(program.slots[program.numbers[name]]) for name in run.reads}
            act()
            wrote = contents([program.slots[program.numbers[name]] for name in run.writes])
            self.found.extend(self.origins(k, run, reads, wrote))

        return check

    def origins(
        self, k: int, run: Run, reads: dict[str, Contents], wrote: Contents
    ) -> Iterator[Origin]:
        """Whether a run makes what is not finite, or is the first to read it.

        A batch may have NaN or infinities that do no harm: marks of what is missing, or masks.
        """
        where = self.program.plan.device, k, run.node, run.region, run.phase
        nan = [name for name, one in reads.items() if one.nan]
        infinite = [name for name, one in reads.items() if one.infinity]
        known = self.given | (self.batch if wrote.nan else {})
        for name in nan:
            if name in known:
                yield Origin(*where, True, known[name], in_batch=name in self.batch)
        if nan:
            return
        source = next((self.batch[name] for name in infinite if name in self.batch), "")
        if wrote.nan:
            yield Origin(*where, True, source, bool(infinite), bool(source))
        elif wrote.infinity and (source or not infinite):
            yield Origin(*where, False, source, bool(source), bool(source))


def update_anyway(program: Program, inputs: StepInputs) -> None:
    """Run the step again, and update, as plain PyTorch does."""
    with buffers_as_they_were(program):
        program.step(replace(inputs, only_finite=False))


@contextmanager
def buffers_as_they_were(program: Program) -> Iterator[list[torch.Tensor]]:
    """A forward may change buffers, as BatchNorm does. A step that runs again changes none."""
    states = [one for one in program.state.buckets.values() if one.optimizer is None]
    buffers = [tensor for one in states for tensor in one.tensors]
    kept = [tensor.clone() for tensor in buffers]
    yield buffers
    for now, before in zip(buffers, kept, strict=True):
        now.copy_(before)


def on_all_devices(mine: list[Origin]) -> list[Origin]:
    found = everyone(mine, "the search for a number that is not finite")
    return [one for part in found for one in part]
