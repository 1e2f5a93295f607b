"""Layers that are divided by hand, with kernels written in plain PyTorch, and what they should do.

Every piece is a function of what one device holds. Autograd differentiates it device by device,
which is right because a placement says where the gradient is, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn.functional import relu, silu

from piper.directives import Directive
from piper.ir.model import Bucket, Model, Parameter, Region
from piper.ir.placement.placements import Conversion, Cut, Invariant, Partial, Placement, Replicated
from piper.ir.values import Role, TensorSpec, Value
from piper.job.compile.compiler import Compiled, compile_strategy
from piper.names import BI, BW, B, BucketId, F, RegionId, ValueId
from piper.plan.instructions import Plan
from piper.runtime.batch import StepInputs
from piper.runtime.comm.gloo import Comm
from piper.runtime.execute import Program
from piper.runtime.state.device_state import DeviceState, assembled
from piper.runtime.thread_devices import run_together

TOKENS, WIDTH, INNER = 8, 4, 16
ADAMW = partial(torch.optim.AdamW, lr=0.05)
I, R, P, S = Invariant(), Replicated(), Partial(), Cut(0)
Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Piece:
    """A function of parameters (a list), inputs and results, each with where it lies."""

    run: Callable[..., tuple[torch.Tensor, ...]]
    parameters: Mapping[str, Placement]
    inputs: tuple[str, ...]
    outputs: Mapping[str, Placement]
    grads: tuple[str, ...] = ()  # inputs that get a gradient


@dataclass
class Divided:
    """A model of pieces and conversions. `shapes` are those of whole values."""

    ways: int
    stages: int
    shapes: dict[str, tuple[int, ...]]
    regions: list[Region] = field(default_factory=list)
    values: dict[ValueId, Value] = field(default_factory=dict)
    buckets: dict[BucketId, Bucket] = field(default_factory=dict)
    pieces: dict[str, Piece] = field(default_factory=dict)
    runs: dict[int, int] = field(default_factory=dict)

    def given(self, name: str, index: int) -> None:
        spec = TensorSpec(self.shapes[name], "float64")
        self.values[ValueId(name)] = Value((spec,), Role.BATCH, index=index)

    def local(self, name: str, placement: Placement) -> TensorSpec:
        shape = self.shapes[name]
        return Parameter(name, TensorSpec(shape, "float64"), placement).local(self.ways)

    def add(self, stage: int, name: str, piece: Piece) -> None:
        if "rank" in piece.inputs:
            self.values[ValueId("rank")] = Value((TensorSpec((), "int64"),), Role.RANK)
        for out, placement in piece.outputs.items():
            self.values[ValueId(out)] = Value((self.local(out, placement),))
        kinds: dict[type, list[Parameter]] = {}
        for parameter, asked in piece.parameters.items():
            placement = asked if self.ways > 1 else I
            spec = TensorSpec(self.shapes[parameter], "float64")
            kinds.setdefault(type(placement), []).append(Parameter(parameter, spec, placement))
        mine = [self.bucket(name, found) for found in kinds.values()]
        inputs, grads = piece.inputs, tuple(map(piece.inputs.index, piece.grads))
        carry = tuple(p.local(self.ways) for found in kinds.values() for p in found)
        every, some = tuple(range(len(inputs))), tuple(range(len(mine)))
        self.pieces[name] = piece
        self.regions.append(
            Region(
                id=RegionId(name), tags=(("PP", stage),), run=self.run(stage), code=name,
                axes=self.axes, inputs=tuple(map(ValueId, inputs)),
                outputs=tuple(map(ValueId, piece.outputs)), buckets=tuple(mine), input_grads=grads,
                output_grads=tuple(range(len(piece.outputs))), backward_inputs=every,
                backward_buckets=some, carry=carry, flops=dict.fromkeys((F, B, BI, BW), 1e6),
            )
        )  # fmt: skip

    def bucket(self, region: str, parameters: list[Parameter]) -> BucketId:
        name = BucketId(f"{region}.{type(parameters[0].placement).__name__}")
        self.buckets[name] = Bucket(name, tuple(parameters))
        return name

    def convert(self, stage: int, value: str, source: Placement, target: Placement) -> str:
        out = f"{value}~"
        self.shapes[out] = self.shapes[value]
        self.values[ValueId(out)] = Value((self.local(out, target),))
        if value == "part":
            out = "loss"
            self.values[ValueId(out)] = self.values.pop(ValueId("part~"))
        self.regions.append(
            Region(
                id=RegionId(f"{value}:convert"), tags=(("PP", stage),), run=self.run(stage),
                code="", axes=self.axes, inputs=(ValueId(value),), outputs=(ValueId(out),),
                input_grads=(0,), output_grads=(0,), conversion=Conversion(source, target),
            )
        )  # fmt: skip
        return out

    @property
    def axes(self) -> tuple[int, ...]:
        return (self.ways,) if self.ways > 1 else ()

    def run(self, stage: int) -> int:
        self.runs[stage] = self.runs.get(stage, -1) + 1
        return self.runs[stage]

    def model(self) -> Model:
        return Model(
            regions=tuple(self.regions), values=self.values, buckets=self.buckets,
            loss=ValueId("loss"),
        )  # fmt: skip

    def kernel(self, region: str, phase: str) -> Callable[..., Any]:
        if region not in self.pieces:  # a conversion on one device
            return lambda *given: (given[-1], ())[: 2 if phase == "F" else 1]
        piece = self.pieces[region]
        whole = self.ways == 1 and bool(piece.parameters)
        count = 1 if whole else len({type(p) for p in piece.parameters.values()})
        return partial(KERNELS[phase], piece, count)

    def trained(self, name: str) -> bool:
        return True


def forward(piece: Piece, buckets: int, *given: Any) -> tuple[Any, ...]:
    weights = [w for bundle in given[:buckets] for w in bundle]
    return (*piece.run(weights, *given[buckets:]), ())


def gradients(piece: Piece, buckets: int, *given: Any) -> tuple[list[torch.Tensor], list[Any]]:
    """Of inputs, and of buckets."""
    count = len(piece.inputs)
    bundles = [[w.detach().requires_grad_() for w in bundle] for bundle in given[:buckets]]
    weights = [w for bundle in bundles for w in bundle]
    inputs = list(given[buckets : buckets + count])
    for name in piece.grads:
        k = piece.inputs.index(name)
        inputs[k] = inputs[k].detach().requires_grad_()
    with torch.enable_grad():
        outputs = piece.run(weights, *inputs)
    wanted = [inputs[piece.inputs.index(name)] for name in piece.grads]
    # contiguous copies, as Piper's graphs give: what they return is added up in place
    found = [
        g.clone(memory_format=torch.contiguous_format)
        for g in torch.autograd.grad(outputs, [*wanted, *weights], given[buckets + count + 1 :])
    ]
    rest = iter(found[len(wanted) :])
    return found[: len(wanted)], [tuple(next(rest) for _ in bundle) for bundle in bundles]


def backward(piece: Piece, buckets: int, *given: Any) -> tuple[Any, ...]:
    inputs, weights = gradients(piece, buckets, *given)
    return (*inputs, *weights)


def backward_input(piece: Piece, buckets: int, *given: Any) -> tuple[Any, ...]:
    inputs, weights = gradients(piece, buckets, *given)
    return (*inputs, tuple(weights))


def backward_weight(piece: Piece, buckets: int, carry: Any) -> tuple[Any, ...]:
    return tuple(carry)


KERNELS = {"F": forward, "B": backward, "BI": backward_input, "BW": backward_weight}


def mine(tensor: torch.Tensor, rank: torch.Tensor, ways: int) -> torch.Tensor:
    return tensor.chunk(ways)[int(rank)]


# Two linear layers with a residual: Megatron's column and row.


def tensor_parallel(ways: int, stages: int = 1) -> Divided:
    """x + g -> columns, relu, rows -> + bias, + residual -> ...; the loss is in the last stage."""
    made = Divided(ways, stages, {"x": (TOKENS, WIDTH), "t": (TOKENS, WIDTH), "loss": ()})
    made.given("x", 0)
    made.given("t", 1)
    came = "x"
    for stage in range(stages):
        s = str(stage)
        made.shapes |= {f"g{s}": (WIDTH,), f"up{s}": (INNER, WIDTH), f"bias{s}": (INNER,),
                        f"down{s}": (WIDTH, INNER), f"end{s}": (WIDTH,),
                        f"h{s}": (TOKENS, WIDTH), f"y{s}": (TOKENS, WIDTH),
                        f"z{s}": (TOKENS, WIDTH)}  # fmt: skip
        grads = (came,) if stage else ()
        made.add(stage, f"in{s}", Piece(lambda w, x: (torch.tanh(x) * w[0],), {f"g{s}": I},
                                        (came,), {f"h{s}": I}, grads))  # fmt: skip
        read = made.convert(stage, f"h{s}", I, R)
        parameters = {f"up{s}": S, f"bias{s}": S, f"down{s}": Cut(1)}
        made.add(stage, f"mlp{s}", Piece(column_row, parameters, (read,), {f"y{s}": P}, (read,)))
        back = made.convert(stage, f"y{s}", P, I)
        made.add(stage, f"out{s}", Piece(lambda w, y, h: (y + w[0] + h,), {f"end{s}": I},
                                         (back, f"h{s}"), {f"z{s}": I},
                                         (back, f"h{s}")))  # fmt: skip
        came = f"z{s}"
    loss = Piece(lambda _, z, t: ((z - t).square().mean(),), {}, (came, "t"), {"loss": I}, (came,))
    made.add(stages - 1, "loss", loss)
    return made


def column_row(w: Tensors, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
    up, bias, down = w
    return (relu(h @ up.T + bias) @ down.T,)


def plain_tensor_parallel(w: Mapping[str, torch.Tensor], x: Any, t: Any, stages: int) -> Any:
    for s in range(stages):
        h = torch.tanh(x) * w[f"g{s}"]
        x = relu(h @ w[f"up{s}"].T + w[f"bias{s}"]) @ w[f"down{s}"].T + w[f"end{s}"] + h
    return (x - t).square().mean()


# The same with cut tokens, a fused gate (two blocks), and a loss that is a sum of parts.


def sequence_parallel(ways: int, stages: int = 1) -> Divided:
    made = Divided(
        ways, stages, {"x": (TOKENS, WIDTH), "t": (TOKENS, WIDTH), "loss": (), "part": ()}
    )
    made.given("x", 0)
    made.given("t", 1)
    came = "x"
    for stage in range(stages):
        s = str(stage)
        made.shapes |= {f"g{s}": (WIDTH,), f"gate{s}": (2 * INNER, WIDTH),
                        f"down{s}": (WIDTH, INNER), f"end{s}": (WIDTH,),
                        f"h{s}": (TOKENS, WIDTH), f"y{s}": (TOKENS, WIDTH),
                        f"z{s}": (TOKENS, WIDTH)}  # fmt: skip
        first = lambda w, x, rank: (torch.tanh(mine(x, rank, ways)) * w[0],)  # noqa: E731
        later = lambda w, x: (torch.tanh(x) * w[0],)  # noqa: E731
        inputs, grads = ((came,), (came,)) if stage else ((came, "rank"), ())
        run = later if stage else first
        made.add(stage, f"in{s}", Piece(run, {f"g{s}": R}, inputs, {f"h{s}": S}, grads))
        read = made.convert(stage, f"h{s}", S, R)
        parameters = {f"gate{s}": Cut(0, 2), f"down{s}": Cut(1)}
        made.add(stage, f"mlp{s}", Piece(gated, parameters, (read,), {f"y{s}": P}, (read,)))
        back = made.convert(stage, f"y{s}", P, S)
        made.add(stage, f"out{s}", Piece(lambda w, y, h: (y + w[0] + h,), {f"end{s}": R},
                                         (back, f"h{s}"), {f"z{s}": S},
                                         (back, f"h{s}")))  # fmt: skip
        came = f"z{s}"

    def loss(_: Tensors, z: torch.Tensor, t: torch.Tensor, rank: torch.Tensor) -> Any:
        return ((z - mine(t, rank, ways)).square().sum() / t.numel(),)

    made.add(stages - 1, "loss", Piece(loss, {}, (came, "t", "rank"), {"part": P}, (came,)))
    made.convert(stages - 1, "part", P, I)
    return made


def gated(w: Tensors, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
    gate, up = (h @ w[0].T).chunk(2, dim=-1)
    return ((silu(gate) * up) @ w[1].T,)


def plain_sequence_parallel(w: Mapping[str, torch.Tensor], x: Any, t: Any, stages: int) -> Any:
    for s in range(stages):
        h = torch.tanh(x) * w[f"g{s}"]
        gate, up = (h @ w[f"gate{s}"].T).chunk(2, dim=-1)
        x = (silu(gate) * up) @ w[f"down{s}"].T + w[f"end{s}"] + h
    return (x - t).square().mean()


MODELS = {
    "tensor": (tensor_parallel, plain_tensor_parallel),
    "sequence": (sequence_parallel, plain_sequence_parallel),
}


@dataclass
class Result:
    """What training gave: of every step its loss and norm, then all parameters."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)


def initial(made: Divided) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(7)
    names = sorted({p.name for bucket in made.buckets.values() for p in bucket.parameters})
    return {n: torch.randn(made.shapes[n], generator=draw, dtype=torch.float64) for n in names}


def batches(steps: int, parts: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of all replicas and microbatches together, different everywhere."""
    draw = torch.Generator().manual_seed(1)
    shape = (parts * TOKENS, WIDTH)
    return [
        tuple(torch.randn(shape, generator=draw, dtype=torch.float64) for _ in "xt")
        for _ in range(steps)
    ]  # type: ignore[misc]


def plainly(name: str, stages: int, parts: int, steps: int, max_norm: float) -> Result:
    """Plain PyTorch: autograd on whole tensors."""
    build, loss_of = MODELS[name]
    weights = {n: w.requires_grad_() for n, w in initial(build(1, stages)).items()}
    optimizer, found = ADAMW(list(weights.values())), Result()
    for x, t in batches(steps, parts):
        optimizer.zero_grad()
        pairs = zip(x.chunk(parts), t.chunk(parts), strict=True)
        losses = [loss_of(weights, a, b, stages) / parts for a, b in pairs]
        sum(losses).backward()  # type: ignore[union-attr]
        found.losses.append(sum(loss.item() for loss in losses))
        found.norms.append(float(torch.nn.utils.clip_grad_norm_(weights.values(), max_norm)))
        optimizer.step()
    found.parameters = {n: w.detach() for n, w in weights.items()}
    return found


def contents(compiled: Compiled) -> dict[str, list[tuple[str, tuple[int, ...], str]]]:
    buckets = compiled.dag.model.buckets
    return {
        name: [(p.name, p.spec.shape, p.spec.dtype) for p in bucket.parameters]  # type: ignore[misc]
        for name, bucket in buckets.items()
    }


def together(
    made: Divided, program: Sequence[Directive], microbatches: int, steps: int, max_norm: float,
    states: dict[int, DeviceState] | None = None, make: Any = ADAMW, first: int = 0,
    resume: Any = None,
) -> Result:  # fmt: skip
    """Every device a thread of this process, from step `first` to `steps`.

    `states` are for the caller. `resume` fills a state from a checkpoint.
    """
    compiled = compile_strategy(made.model(), program, clip=True)
    feeds, known = compiled.dag.replicas, initial(made)
    count = len(feeds.feeds)
    parts = count * microbatches * feeds.parts
    held = {} if states is None else states
    inputs = [
        [StepInputs((xs, ts), (1 / parts,) * (parts // count), max_norm=max_norm)
         for xs, ts in zip(x.chunk(count), t.chunk(count), strict=True)]
        for x, t in batches(steps, parts)[first:]
    ]  # fmt: skip
    seen: list[Any] = [None] * (steps - first)

    def load(plan: Plan, comm: Comm) -> Program:
        state = held.setdefault(plan.device, DeviceState())
        values = lambda name: known[name].clone()  # noqa: E731
        state.add(plan.states, contents(compiled), made.trained, values, make)
        for bucket in state.buckets.values() if resume else ():
            resume.fill(bucket)
        return Program(plan, made.kernel, state, comm, torch.float64)

    def after(number: int, program: Program) -> None:
        seen[number] = program.totals.clone()

    mine = [[step[feeds.feed(plan.device)] for step in inputs] for plan in compiled.plans]
    run_together(compiled.plans, load, mine, after)
    every = assembled(part for state in held.values() for part in state.parts())
    return Result([float(t[0]) for t in seen], [float(t[1]) ** 0.5 for t in seen], every)
