"""The simulator against public measurements: Megatron-style GPT training on A100s.

    python bench/vtrain.py

bench/data/vtrain holds measurements of the vTrain project (with its licence). Every run becomes a
model of pure data, compiled by the ordinary builders and simulated on device `a100`. Nothing runs.
Three constants of the device (FITTED) are fitted to a third of the runs on one node without tensor
parallelism. Errors are those of the other runs.

docs/simulate.md says what is known about the runs, what is assumed, and the results.
"""

from __future__ import annotations

import csv
import json
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from math import ceil, log2
from pathlib import Path
from typing import Any

from piper.costs import Costs
from piper.costs.devices import DEVICES, DeviceKind, costs_of_device
from piper.costs.links import NETWORKS, Network
from piper.costs.measured import Figure, RegionKey
from piper.ir.model import Bucket, Model, Parameter, Region
from piper.ir.values import Role, TensorSpec, Value
from piper.job.compile.compiler import Compiled, compile_strategy
from piper.job.compile.pricing import price
from piper.names import BI, BW, B, BucketId, F, RegionId, ValueId
from piper.strategies import BUILDERS

HERE = Path(__file__).parent
DATA = HERE / "data" / "vtrain"
VOCABULARY = 50304  # 50257, rounded up to a multiple of 128
OPTIMIZER = 30  # bytes that a step moves for each byte of fp16 parameters: see docs/simulate.md
NETWORK = NETWORKS["a100"]
SEED = 1


@dataclass(frozen=True)
class Run:
    """A row of the measurements."""

    gpus: int
    batch: int
    micro: int
    hidden: int
    heads: int
    layers: int
    length: int
    tp: int
    dp: int
    pp: int
    seconds: float
    virtual: int = 1  # stages per device
    recompute: str = "none"  # "all" or "attention"
    sequence: bool = False  # sequence parallelism: the rest is divided along the sequence

    @property
    def microbatches(self) -> int:
        return self.batch // self.dp // self.micro

    @property
    def name(self) -> str:
        return f"tp={self.tp} dp={self.dp} pp={self.pp}"


def runs(file: str, recompute: str) -> list[Run]:
    with (DATA / file).open() as lines:
        rows = [[float(cell) for cell in list(row.values())[-11:]] for row in csv.DictReader(lines)]
    return [Run(*map(int, row[:-1]), seconds=row[-1] / 1e3, recompute=recompute) for row in rows]


# --- a GPT as pure data -------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """The work of a pass on one device: FLOPs, bytes of other operators, number of operators."""

    flops: float = 0.0
    traffic: float = 0.0
    operators: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(self.parts, other.parts, strict=True)))

    def __mul__(self, times: float) -> Work:
        return Work(*(times * part for part in self.parts))

    @property
    def parts(self) -> tuple[float, float, float]:
        return self.flops, self.traffic, self.operators


def layer(run: Run) -> Work:
    """The forward pass of a layer. Bytes: fp16, two norms, bias-GELU, two residuals with dropout,
    one transposition (42 a token and channel), softmax and dropout of all scores (9 a score)."""
    tokens, scores = run.micro * run.length, run.micro * run.heads * run.length**2
    products = 24 * tokens * run.hidden**2 + 4 * tokens * run.length * run.hidden
    whole, cut = 22 * tokens * run.hidden, 20 * tokens * run.hidden + 9 * scores
    whole /= run.tp if run.sequence else 1
    return Work(products / run.tp, whole + cut / run.tp, 20 + (2 if run.tp > 1 else 0))


def attention(run: Run) -> Work:
    """What selective recomputation repeats: scores, softmax, dropout, context."""
    tokens, scores = run.micro * run.length, run.micro * run.heads * run.length**2
    return Work(4 * tokens * run.length * run.hidden / run.tp, 9 * scores / run.tp, 4)


def head(run: Run) -> Work:
    """Logits in fp16 and their cross entropy in fp32, operator by operator."""
    logits = run.micro * run.length * VOCABULARY / run.tp
    return Work(2 * logits * run.hidden, 32 * logits, 12)


def stage(run: Run, k: int, stages: int) -> tuple[Work, Work]:
    """Forward and backward of stage k."""
    forward = layer(run) * (run.layers / stages)
    again = {
        "all": forward, "attention": attention(run) * (run.layers / stages), "none": Work(),
    }[run.recompute]  # fmt: skip
    if k == stages - 1:
        forward += head(run)
    return forward, forward * 2 + again


def parameters(run: Run, k: int, stages: int) -> float:
    """Elements that a stage has on a device, without the vocabulary."""
    return 12 * run.hidden**2 / run.tp * run.layers / stages + 13 * run.hidden


def model_of(run: Run) -> Model:
    """Stages as regions PP=0, 1, ...; the vocabulary is shared by the first and the last."""
    stages = run.pp * run.virtual
    names = [f"PP{k}" for k in range(stages)]
    rows = TensorSpec((run.micro, run.length, run.hidden), "float16")
    tokens = TensorSpec((run.micro, run.length), "int64")
    values = {ValueId(f"h{k}"): Value((rows,)) for k in range(stages - 1)}
    values[ValueId("loss")] = Value((TensorSpec(()),))
    for k, name in enumerate(("x", "y")):
        values[ValueId(name)] = Value((tokens,), Role.BATCH, index=k)
    buckets = {BucketId(n): bucket(n, parameters(run, k, stages)) for k, n in enumerate(names)}
    buckets[BucketId("words")] = bucket("words", VOCABULARY * run.hidden / run.tp)
    regions = tuple(region(run, k, stages, rows) for k in range(stages))
    return Model(regions=regions, values=values, buckets=buckets, loss=ValueId("loss"))


def bucket(name: str, elements: float) -> Bucket:
    spec = TensorSpec((int(elements),), "float16")
    return Bucket(BucketId(name), (Parameter(f"{name}.weight", spec),))


def region(run: Run, k: int, stages: int, rows: TensorSpec) -> Region:
    first, last = k == 0, k == stages - 1
    inputs = (ValueId("x") if first else ValueId(f"h{k - 1}"), *((ValueId("y"),) if last else ()))
    names = (f"PP{k}", *(("words",) if first or last else ()))
    forward, backward = stage(run, k, stages)
    works = {F: forward, B: backward, BI: backward * 0.5, BW: backward * 0.5}
    return Region(
        id=RegionId(f"PP{k}"), tags=(("PP", k),), code=f"stage {k}", inputs=inputs,
        outputs=(ValueId("loss") if last else ValueId(f"h{k}"),),
        buckets=tuple(map(BucketId, names)), input_grads=() if first else (0,), output_grads=(0,),
        backward_inputs=tuple(range(len(inputs))), backward_buckets=tuple(range(len(names))),
        saved=(rows,) * max(1, run.layers // stages),
        flops={phase: work.flops for phase, work in works.items()},
        traffic={phase: work.traffic for phase, work in works.items()},
        operators={phase: int(work.operators) for phase, work in works.items()},
    )  # fmt: skip


# --- tensor parallelism: collectives priced inside a region ---------------------------------------


def gathered(run: Run, network: Network) -> float:
    """Seconds of the two all-reduces of a microbatch's activations in one forward of a layer.

    They cost what the simulator takes for a collective alone: rings in each node, then over all its
    uplinks. Reduce-scatter and all-gather together cost the same.
    """
    if run.tp == 1:
        return 0.0
    size = 2.0 * run.micro * run.length * run.hidden
    local = min(run.tp, network.per_node)
    nodes = run.tp // local
    seconds = 2 * size * (run.tp - 1) / run.tp / network.inside.bandwidth
    latency = network.inside.latency
    if nodes > 1:
        assert network.uplink is not None
        way = min(network.between.bandwidth, network.uplink.bandwidth / local)
        seconds = max(seconds, 2 * size * (nodes - 1) / nodes / local / way)
        latency = network.between.latency
    return 2 * (seconds + 2 * latency * ceil(log2(run.tp)))


def network_of(run: Run, network: Network) -> Network:
    """One device stands for `tp` that do the same.

    So a node has fewer devices, each with its part of the uplink.
    """
    if run.tp == 1:
        return network
    assert network.uplink is not None
    uplink = replace(network.uplink, bandwidth=network.uplink.bandwidth / run.tp)
    return replace(network, per_node=max(1, network.per_node // run.tp), uplink=uplink)


# --- prediction -----------------------------------------------------------------------------------


@cache
def compiled(run: Run) -> Compiled:
    name = "1f1b" if run.virtual == 1 else "interleaved-1f1b"
    if run.microbatches < run.pp:  # 1F1B does not support this
        name = "gpipe"
    more = {} if run.virtual == 1 else {"virtual": run.virtual}
    strategy = BUILDERS[name](pp=run.pp, dp=run.dp, microbatches=run.microbatches, **more)
    return compile_strategy(model_of(run), strategy.directives, by_role=True)


def predicted(run: Run, device: DeviceKind, network: Network = NETWORK) -> float:
    found = compiled(run)
    costs = costs_of_device(device, found.dag.model, network)
    costs = replace(costs, update=OPTIMIZER / device.moved)
    if run.tp > 1:
        costs = costs.with_figures(dict(with_collectives(run, found.dag.model, costs, network)))
    return price(found, costs, network_of(run, network)).seconds


def with_collectives(
    run: Run, model: Model, costs: Costs, network: Network
) -> Iterable[tuple[RegionKey, Figure]]:
    """Seconds of the phases of each stage, including the collectives of tensor parallelism."""
    once = gathered(run, network) * run.layers / (run.pp * run.virtual)
    again = 1 if run.recompute == "all" else 0
    for one in model.regions:
        for phase, times in ((F, 1), (B, 1 + again)):
            seconds = costs.region(model, one, phase) + times * once
            yield RegionKey(one.code, phase), Figure(seconds)


# --- fit and score --------------------------------------------------------------------------------

FITTED = ("share", "start", "launch")


def fit(some: Sequence[Run], device: DeviceKind) -> DeviceKind:
    """The constants with the least mean error, from several starting points."""
    begins = [replace(device, start=s, launch=l) for s, l in product((5e-6, 2e-5), (2e-5, 5e-5))]
    return min((climbed(some, one) for one in begins), key=lambda one: error_of(some, one))


def climbed(some: Sequence[Run], device: DeviceKind) -> DeviceKind:
    """Coordinate descent in ever smaller steps."""
    best, least = device, error_of(some, device)
    for step in (1.6, 1.25, 1.1, 1.04):
        again = True
        while again:
            again = False
            for name, factor in product(FITTED, (step, 1 / step)):
                tried = replace(best, **{name: getattr(best, name) * factor})
                found = error_of(some, tried)
                if found < least:
                    best, least, again = tried, found, True
    return best


def error_of(some: Sequence[Run], device: DeviceKind) -> float:
    return statistics.fmean(abs(predicted(run, device) / run.seconds - 1) for run in some)


def score(some: Sequence[Run], device: DeviceKind) -> list[dict[str, Any]]:
    rows = []
    for run in some:
        seconds = predicted(run, device)
        rows.append({**asdict(run), "predicted": seconds, "error": seconds / run.seconds - 1})
    return rows


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    errors = [abs(row["error"]) for row in rows]
    return {
        "runs": len(rows), "mean": statistics.fmean(errors), "median": statistics.median(errors),
        "max": max(errors), "bias": statistics.fmean(row["error"] for row in rows),
    }  # fmt: skip


def show(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    if rows:
        found = summary(rows)
        print(
            f"{name:34} {found['runs']:4} runs  mean {found['mean']:6.1%}  median "
            f"{found['median']:6.1%}  max {found['max']:6.1%}  bias {found['bias']:+6.1%}",
            flush=True,
        )


# The runs of "Reducing Activation Recomputation in Large Transformer Models" (Table 5), with which
# Calculon was validated: gpus, batch, micro, hidden, heads, layers, length, tp, dp, pp, seconds.
MEGATRON = [
    ("22B", Run(8, 4, 4, 6144, 64, 48, 2048, 8, 1, 1, 1.42), 1.10),
    ("175B", Run(64, 64, 1, 12288, 96, 96, 2048, 8, 1, 8, 18.13, virtual=3), 13.75),
    ("530B", Run(280, 280, 1, 20480, 128, 105, 2048, 8, 1, 35, 49.05, virtual=3), 37.83),
    ("1T", Run(512, 512, 1, 25600, 160, 128, 2048, 8, 1, 64, 94.42), 71.49),
]


def megatron(run: Run, selective: float) -> list[Run]:
    """Full recomputation; then selective recomputation with sequence parallelism."""
    some = replace(run, recompute="attention", sequence=True, seconds=selective)
    return [replace(run, recompute="all"), some]


def main() -> None:
    single, multi = runs("vtrain_single_node.csv", "none"), runs("vtrain_multi_node.csv", "all")
    plain = [run for run in single if run.tp == 1]
    random.Random(SEED).shuffle(plain)
    third, rest = plain[: len(plain) // 3], plain[len(plain) // 3 :]
    device = fit(third, DEVICES["a100"])
    print("fitted:", {name: float(f"{getattr(device, name):.3g}") for name in FITTED})
    results = {"device": {name: getattr(device, name) for name in FITTED}}
    parts = {
        "one node, as on the data sheet": (rest, DEVICES["a100"]),
        "one node, fitted third": (third, device),
        "one node, the others": (rest, device),
        "one node, tensor parallel": ([run for run in single if run.tp > 1], device),
        "many nodes": ([run for run in multi if run.tp == 1], device),
        "many nodes, tensor parallel": ([run for run in multi if run.tp > 1], device),
        "Megatron 22B to 1T": ([one for _, *two in MEGATRON for one in megatron(*two)], device),
    }
    for name, (some, kind) in parts.items():
        rows = score(some, kind)
        show(name, rows)
        if name != "one node, as on the data sheet":
            for key in sorted({(row["tp"], row["dp"], row["pp"]) for row in rows}):
                mine = [row for row in rows if (row["tp"], row["dp"], row["pp"]) == key]
                show("  tp={} dp={} pp={}".format(*key), mine)
        results[name] = {"summary": summary(rows), "rows": rows}
    (HERE / "results" / "vtrain.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
