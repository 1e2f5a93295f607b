"""Synthetic models of any size, without torch, as capture would describe them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from random import Random

from piper.ir.model import Bucket, Model, Parameter, Region
from piper.ir.values import Role, TensorSpec, Value
from piper.names import BucketId, RegionId, ValueId

ROW = TensorSpec((2, 4))
TOKENS = TensorSpec((6, 3))  # rows that are sorted by expert; nothing else is 3 wide


def chain(stages: int, skips: tuple[tuple[int, int], ...] = (), tied: bool = False) -> Model:
    """Regions PP0 -> PP1 -> ...; `skips` (a, b): PP-b also reads what PP-a writes."""
    names = [f"PP{k}" for k in range(stages)]
    outs = [ValueId(f"h{k}") for k in range(stages - 1)] + [ValueId("loss")]
    values = {out: Value((ROW,)) for out in outs[:-1]}
    values[ValueId("loss")] = Value((TensorSpec(()),))
    values[ValueId("x")] = Value((ROW,), Role.BATCH, index=0)
    values[ValueId("y")] = Value((ROW,), Role.BATCH, index=1)
    buckets = {BucketId(n): bucket(n) for n in names}
    if tied:
        buckets[BucketId("tied")] = bucket("tied")
    regions = [region(k, stages, outs, skips, tied) for k in range(stages)]
    return Model(regions=tuple(regions), values=values, buckets=buckets, loss=ValueId("loss"))


def moe_chain(
    stages: int, layers: int = 1, experts: int = 4, tokens: TensorSpec = TOKENS, extra: int = 0
) -> Model:
    """Stages PP0, PP0.EP0, PP0#1, PP1, ...: between regions that sort tokens, regions of experts.

    A region reads the rows that came back and writes new ones, with the counts of their experts;
    `extra`: with each row go so many others (as its weight does).
    """
    sketch = MoeChain(stages, layers, experts, tokens, extra)
    regions = [one for s in range(stages) for one in sketch.stage(s)]
    values = sketch.values(regions)
    buckets = {BucketId(one.id): sketch.bucket(one) for one in regions}
    return Model(regions=tuple(regions), values=values, buckets=buckets, loss=ValueId("loss"))


@dataclass(frozen=True)
class MoeChain:
    """The arguments of `moe_chain`. Layers are numbered across all stages."""

    stages: int
    layers: int
    experts: int
    tokens: TensorSpec
    extra: int

    def stage(self, s: int) -> Iterator[Region]:
        for layer in range(s * self.layers, (s + 1) * self.layers):
            yield self.around(s, layer - s * self.layers, layer, sorts=True)
            yield self.of_experts(s, layer)
        yield self.around(s, self.layers, (s + 1) * self.layers, sorts=False)

    def around(self, s: int, number: int, layer: int, sorts: bool) -> Region:
        """Reads what came before it in its stage, and the rows of the layer before."""
        last = s == self.stages - 1 and not sorts
        came = [f"h{s}.{number - 1}", f"back{layer - 1}"] if number else [f"h{s - 1}.{self.layers}"]
        came = came if number or s else []
        inputs = [*came, *(() if s or number else ("x",)), *(("y",) if last else ())]
        rows = self.rows(layer) if sorts else []
        outputs = ["loss"] if last else [f"h{s}.{number}", *rows]
        name = f"PP{s}#{number}" if number else f"PP{s}"
        return moe_region(
            name, (("PP", s),), [*inputs], [*outputs, *([f"counts{layer}"] if sorts else [])],
            input_grads=range(len(came)), output_grads=range(len(outputs)), run=number,
        )  # fmt: skip

    def of_experts(self, s: int, layer: int) -> Region:
        tags, inputs = (("PP", s), ("EP", layer)), [*self.rows(layer), f"counts{layer}"]
        return moe_region(
            f"PP{s}.EP{layer}", tags, inputs, [f"back{layer}"],
            input_grads=range(self.extra + 1), output_grads=range(1),
        )  # fmt: skip

    def rows(self, layer: int) -> list[str]:
        return [f"rows{layer}", *(f"rows{layer}.{k}" for k in range(self.extra))]

    def values(self, regions: Iterable[Region]) -> dict[ValueId, Value]:
        known = {ValueId(n): Value((ROW,), Role.BATCH, index=k) for k, n in enumerate("xy")}
        counts = TensorSpec((self.experts,), "int64")
        specs = {"h": ROW, "l": TensorSpec(()), "r": self.tokens, "b": self.tokens, "c": counts}
        made = {out: Value((specs[out[0]],)) for region in regions for out in region.outputs}
        return {**known, **made}

    def bucket(self, region: Region) -> Bucket:
        if "EP" not in dict(region.tags):
            return bucket(region.id)
        shapes = [("up", (self.experts, 2, 3)), ("bias", (self.experts,))]
        named = [Parameter(f"{region.id}.{name}", TensorSpec(shape)) for name, shape in shapes]
        return Bucket(BucketId(region.id), tuple(named))


def moe_region(
    name: str, tags: tuple[tuple[str, int], ...], inputs: list[str], outputs: list[str],
    input_grads: range, output_grads: range, run: int = 0,
) -> Region:  # fmt: skip
    return Region(
        id=RegionId(name), tags=tags, run=run, code="experts" if "EP" in name else "block",
        inputs=tuple(map(ValueId, inputs)), outputs=tuple(map(ValueId, outputs)),
        buckets=(BucketId(name),), input_grads=tuple(input_grads),
        output_grads=tuple(output_grads), backward_inputs=tuple(range(len(inputs))),
        backward_buckets=(0,), saved=(ROW,), weight_inputs=(0,),
        weight_output_grads=tuple(output_grads)[-1:], carry=(ROW,),
    )  # fmt: skip


def bucket(name: str) -> Bucket:
    return Bucket(BucketId(name), (Parameter(f"{name}.weight", TensorSpec((4, 4))),))


def region(
    k: int, stages: int, outs: list[ValueId], skips: tuple[tuple[int, int], ...], tied: bool
) -> Region:
    acts = [outs[k - 1]] if k else []
    acts += [outs[a] for a, b in skips if b == k]
    inputs = (ValueId("x"),) if k == 0 else tuple(acts)
    if k == stages - 1:
        inputs += (ValueId("y"),)
    ends = tied and k in (0, stages - 1)
    buckets = (BucketId(f"PP{k}"), *((BucketId("tied"),) if ends else ()))
    return Region(
        id=RegionId(f"PP{k}"), tags=(("PP", k),), code="block", source=f"model.py:{k + 1}",
        inputs=inputs, outputs=(outs[k],), buckets=buckets,
        input_grads=tuple(range(len(acts))), output_grads=(0,),
        backward_inputs=tuple(range(len(inputs))), backward_buckets=tuple(range(len(buckets))),
        saved=(ROW,), weight_inputs=(0,), weight_output_grads=(0,), carry=(ROW,),
    )  # fmt: skip


def frozen(model: Model) -> Model:
    """The same model with nothing to train, so its replicas stay equal by themselves."""
    buckets = {name: replace(bucket, trainable=False) for name, bucket in model.buckets.items()}
    return replace(model, buckets=buckets)


def without_buffers(model: Model) -> Model:
    """The same model where no region updates buffers: such a region has no replicas."""
    regions = tuple(replace(region, stateful=False) for region in model.regions)
    return replace(model, regions=regions)


def with_odd_parameters(model: Model, random: Random) -> Model:
    """The same model with several parameters in a bucket, of two types, of sizes that no number of
    shards divides."""
    return replace(
        model, buckets={name: odd(bucket, random) for name, bucket in model.buckets.items()}
    )


def odd(bucket: Bucket, random: Random) -> Bucket:
    shapes = [random.choice([(), (3,), (7,), (2, 2), (5, 3)]) for _ in range(random.randint(1, 4))]
    dtypes = [random.choice(["float32", "float32", "bfloat16"]) for _ in shapes]
    specs = [TensorSpec(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    named = tuple(Parameter(f"{bucket.id}.{k}", spec) for k, spec in enumerate(specs))
    return replace(bucket, parameters=named)


def network(random: Random, regions: int) -> Model:
    """Any directed graph of regions PP0, PP1, ... that ends in a loss.

    Branches, skips, several outputs, outputs without gradient, shared and frozen parameters,
    regions without backward and with buffers: what a model can have, in random combination.
    """
    names = [BucketId(f"w{k}") for k in range(regions)]
    buckets = {
        name: Bucket(name, (Parameter(f"{name}.weight", ROW),), random.random() < 0.8)
        for name in names
    }
    values = {ValueId(f"x{k}"): Value((ROW,), Role.BATCH, index=k) for k in range(2)}
    values[ValueId("r")] = Value((ROW,), Role.RANDOM)
    sketches = [sketch(k, regions, random, list(values), names, values) for k in range(regions)]
    return Model(
        regions=tuple(with_gradients(sketches, values, buckets, random)),
        values=values,
        buckets=buckets,
        loss=ValueId("loss"),
    )


def sketch(
    k: int,
    regions: int,
    random: Random,
    known: list[ValueId],
    buckets: list[BucketId],
    values: dict[ValueId, Value],
) -> Region:
    """A region's forward reads and writes. Adds what it writes to `values`."""
    outputs = [ValueId(f"v{k}.{j}") for j in range(random.randint(1, 2))]
    if k == regions - 1:
        outputs = [ValueId("loss")]
    values.update((out, Value((ROW,))) for out in outputs)
    near = known[-random.randint(1, 3) :]
    inputs = dict.fromkeys((*random.sample(near, 1), *random.sample(known, random.randint(0, 2))))
    used = random.sample(buckets, min(len(buckets), random.choice([0, 1, 1, 2])))
    return Region(
        id=RegionId(f"PP{k}"), tags=(("PP", k),), code="block", inputs=tuple(inputs),
        outputs=tuple(outputs), buckets=tuple(used), stateful=random.random() < 0.1,
    )  # fmt: skip


def with_gradients(
    regions: list[Region],
    values: dict[ValueId, Value],
    buckets: dict[BucketId, Bucket],
    random: Random,
) -> list[Region]:
    """The regions with their backward, as autograd would derive it."""
    differentiable: set[ValueId] = set()
    for region in regions:
        if any(buckets[b].trainable for b in region.buckets) or differentiable & {*region.inputs}:
            differentiable |= {v for v in region.outputs if v == "loss" or random.random() < 0.85}
    wanted = {ValueId("loss")}
    done = []
    for region in reversed(regions):
        got = [k for k, v in enumerate(region.outputs) if v in wanted and v in differentiable]
        inputs = [k for k, v in enumerate(region.inputs) if v in differentiable] if got else []
        wanted |= {region.inputs[k] for k in inputs}
        done.append(with_backward(region, got, inputs, random))
    return done[::-1]


def with_backward(
    region: Region, output_grads: list[int], input_grads: list[int], random: Random
) -> Region:
    if not output_grads:
        return replace(region, has_backward=False)

    def some(indices: Iterable[int]) -> tuple[int, ...]:
        return tuple(k for k in indices if random.random() < 0.6)

    inputs, buckets = some(range(len(region.inputs))), some(range(len(region.buckets)))
    return replace(
        region, input_grads=tuple(input_grads), output_grads=tuple(output_grads), saved=(ROW,),
        backward_inputs=inputs, backward_buckets=buckets, weight_inputs=some(inputs),
        weight_output_grads=some(output_grads), weight_buckets=some(buckets), carry=(ROW,),
    )  # fmt: skip
