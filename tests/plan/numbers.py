"""The expected results of a step, in integers: an oracle without torch.

Kernels are hashes, so that no two different computations give the same number, and sums are sums.
Parameters and their gradients are tensors of such numbers, so that a wrong shard is another number.
`expected` is a plain loop over the model's regions; it knows no DAG, no strategy and no plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from plan.integer_tensors import PRIME, Bundle, Number, Wrong, added, blend, elements, mix, sizes
from plan.tokens import experts_run, has_experts, is_counts, is_rows, of, routing, weight_reads

from piper.ir.model import Model, Region


@dataclass(frozen=True)
class Outcome:
    """What a user can see after some steps."""

    weights: tuple[tuple[str, Number], ...]  # of every bucket, the same wherever it is
    totals: tuple[tuple[int, int], ...]  # loss and squared norm of each step


def bundle_of(model: Model, bucket: str, *seed: object) -> Bundle:
    """A different number for every element of every parameter."""
    specs = model.buckets[bucket].specs  # type: ignore[index]
    first = mix(*seed, bucket)
    return tuple(
        tuple([blend(first, j, k) for k in range(spec.numel)]) for j, spec in enumerate(specs)
    )


def initial(model: Model, bucket: str) -> Bundle:
    return bundle_of(model, bucket, "initial")


def loaded(origin: str, index: int, part: int, parts: int, step: int, feed: int) -> int:
    """Every feed has its own batch."""
    return mix(origin, index if origin == "batch" else 0, part, parts, step, feed)


def weight_of(part: int, feed: int) -> int:
    """Microbatches weigh differently in the loss."""
    return part + 3 + 100 * feed


def updated(bucket: str, old: Number, grad: Number, norm: int | None) -> Bundle:
    """Every element by itself, so that a shard is updated like the whole."""
    if isinstance(old, int) or sizes(old) != sizes(grad):
        raise Wrong(f"{bucket} is updated by something else than its gradient")
    numbers = zip(elements(old), elements(grad), strict=True)
    first = mix("update", bucket, norm)
    new = iter([blend(first, *pair) for pair in numbers])
    return tuple(tuple([next(new) for _ in tensor]) for tensor in old)


def squared(number: Number) -> int:
    return sum(element**2 for element in elements(number)) % PRIME


def kernel(model: Model, region: Region, phase: str, reads: Sequence[Number]) -> Iterator[Number]:
    """All that a phase writes, in order; BI and BW together give what B gives."""
    if has_experts(region):
        yield from experts_run(model, region, phase, reads)
        return
    name = f"{region.code} {region.id}"
    if phase == "F":
        yield from outputs(model, region, mix(name, "out", *reads))
        if region.has_backward:
            yield mix(name, "saved", *reads)
    if phase in ("B", "BI"):
        yield from input_grads(model, region, mix(name, "grad", *reads), reads)
        carry = mix(name, "carry", *reads)
        if phase == "BI":
            yield carry
        reads = list(weight_reads(region, reads, carry)) if phase == "B" else reads
    if phase in ("B", "BW"):
        seed = mix(name, "weight", *reads)
        yield from (bundle_of(model, bucket, seed) for bucket in model.trained(region))


def outputs(model: Model, region: Region, seed: int) -> Iterator[Number]:
    """Rows, and where they go, are made up."""
    specs = [model.values[value].specs[0] for value in region.outputs]
    lengths = [spec.shape[0] for spec in specs if is_rows(spec)]
    experts = next((spec.shape[0] or 0 for spec in specs if is_counts(spec)), 0)
    counts = routing(seed, experts, lengths[0]) if experts else ()
    for k, spec in enumerate(specs):
        if is_counts(spec):
            yield (counts,)
        elif is_rows(spec):
            yield (tuple(blend(seed, k, row) for row in range(sum(counts))),)
        else:
            yield blend(seed, k)


def input_grads(
    model: Model, region: Region, seed: int, reads: Sequence[Number]
) -> Iterator[Number]:
    """The gradient of rows has as many rows."""
    first = len(region.backward_buckets)
    read = {k: reads[first + j] for j, k in enumerate(region.backward_inputs)}
    for k in region.input_grads:
        if is_rows(model.values[region.inputs[k]].specs[0]):
            yield (tuple(blend(seed, k, row) for row in range(len(of(read[k])))),)
        else:
            yield blend(seed, k)


def expected(model: Model, parts: int, clip: bool, steps: int, feeds: int = 1) -> Outcome:
    """Microbatch after microbatch, region after region, as plain training does.

    Of each feed's batch there are `parts` microbatches.
    """
    used = dict.fromkeys(bucket for region in model.regions for bucket in region.buckets)
    trained = {bucket for region in model.regions for bucket in model.trained(region)}
    weights: dict[str, Number] = {bucket: initial(model, bucket) for bucket in used}
    totals = []
    for step in range(steps):
        loss, grads = 0, dict[str, list[Number]]()
        for feed in range(feeds):
            for part in range(parts):
                given = model_inputs(model, part, parts, step, feed)
                loss += weight_of(part, feed) * one_microbatch(model, weights, grads, given)
        sums = {bucket: added(*grads[bucket]) for bucket in trained}
        norm = sum(map(squared, sums.values())) % PRIME
        for bucket, grad in sums.items():
            weights[bucket] = updated(bucket, weights[bucket], grad, norm if clip else None)
        totals.append((loss % PRIME, norm))
    return Outcome(tuple(sorted(weights.items())), tuple(totals))


def model_inputs(model: Model, part: int, parts: int, step: int, feed: int) -> dict[str, Number]:
    given: dict[str, Number] = {
        name: loaded(value.role, value.index, part, parts, step, feed)
        for name, value in model.values.items()
        if value.is_given
    }
    return {**given, "seed": loaded("seed", 0, part, parts, step, feed)}


def one_microbatch(
    model: Model,
    weights: Mapping[str, Number],
    grads: dict[str, list[Number]],
    given: Mapping[str, Number],
) -> int:
    """Forward and backward; adds to the buckets' gradients and returns the loss."""
    known = dict(given)
    saved = {}
    for region in model.regions:
        reads = [weights[b] for b in region.buckets] + [known[v] for v in region.inputs]
        *outputs, saved[region.id] = kernel(model, region, "F", reads)
        if not region.has_backward:
            outputs.append(saved.pop(region.id))
        known.update(zip(region.outputs, outputs, strict=True))
    flowing: dict[str, list[Number]] = {model.loss: [given["seed"]]}
    for region in reversed(model.regions):
        if region.has_backward:
            reads = [
                *(weights[region.buckets[k]] for k in region.backward_buckets),
                *(known[region.inputs[k]] for k in region.backward_inputs),
                saved[region.id],
                *(added(*flowing[region.outputs[k]]) for k in region.output_grads),
            ]
            given = list(kernel(model, region, "B", reads))
            for k, grad in zip(region.input_grads, given, strict=False):
                flowing.setdefault(region.inputs[k], []).append(grad)
            of_buckets = given[len(region.input_grads) :]
            for bucket, grad in zip(model.trained(region), of_buckets, strict=True):
                grads.setdefault(bucket, []).append(grad)
    return known[model.loss]
