"""What a step must give, in whole numbers: an oracle without torch.

Kernels are hashes, so that no two different computations give the same number, and sums are sums.
Parameters and their gradients are tensors of such numbers, so that a wrong shard is another number.
`expected` is a plain loop over the model's regions; it knows no DAG, no strategy and no plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from plan.bundles import PRIME, Bundle, Number, Wrong, added, elements, sizes

from piper.ir.model import Model, Region


@dataclass(frozen=True)
class Outcome:
    """What a user can see after some steps."""

    weights: tuple[tuple[str, Number], ...]  # of every bucket, the same wherever it is
    totals: tuple[tuple[int, int], ...]  # loss and squared norm of each step


def mix(*parts: object) -> int:
    return hash(parts) % PRIME


def bundle_of(model: Model, bucket: str, *seed: object) -> Bundle:
    """A number of its own for every element of every parameter."""
    specs = model.buckets[bucket].specs  # type: ignore[index]
    return tuple(
        tuple(mix(*seed, bucket, j, k) for k in range(spec.numel)) for j, spec in enumerate(specs)
    )


def initial(model: Model, bucket: str) -> Bundle:
    return bundle_of(model, bucket, "initial")


def loaded(origin: str, index: int, part: int, parts: int, step: int, feed: int) -> int:
    """Every feed has a batch of its own."""
    return mix(origin, index if origin == "batch" else 0, part, parts, step, feed)


def weight_of(part: int, feed: int) -> int:
    """Microbatches weigh differently in the loss."""
    return part + 3 + 100 * feed


def updated(bucket: str, old: Number, grad: Number, norm: int | None) -> Bundle:
    """Every element by itself, so that a shard is updated like the whole."""
    if isinstance(old, int) or sizes(old) != sizes(grad):
        raise Wrong(f"{bucket} is updated by something else than its gradient")
    numbers = zip(elements(old), elements(grad), strict=True)
    new = [mix("update", bucket, *pair, norm) for pair in numbers]
    return tuple(tuple(new.pop(0) for _ in tensor) for tensor in old)


def squared(number: Number) -> int:
    return sum(element**2 for element in elements(number)) % PRIME


def kernel(model: Model, region: Region, phase: str, reads: Sequence[Number]) -> Iterator[Number]:
    """All that a phase writes, in order; BI and BW together give what B gives."""
    name = region.code, region.id
    if phase == "F":
        yield from (mix(name, "out", k, *reads) for k in range(len(region.outputs)))
        if region.has_backward:
            yield mix(name, "saved", *reads)
    if phase in ("B", "BI"):
        yield from (mix(name, "grad", k, *reads) for k in region.input_grads)
    if phase == "BI":
        yield mix(name, "carry", *reads)
    if phase == "B":
        reads = list(reads_of_weight_grads(region, reads))
    if phase in ("B", "BW"):
        seed = mix(name, "weight", *reads)
        yield from (bundle_of(model, bucket, seed) for bucket in model.trained(region))


def reads_of_weight_grads(region: Region, reads: Sequence[Number]) -> Iterator[Number]:
    """What BW would read, out of what B reads."""
    buckets, inputs = len(region.backward_buckets), len(region.backward_inputs)
    of_bucket = dict(zip(region.backward_buckets, reads, strict=False))
    of_input = dict(zip(region.backward_inputs, reads[buckets:], strict=False))
    of_grad = dict(zip(region.output_grads, reads[buckets + inputs + 1 :], strict=True))
    yield from (of_bucket[k] for k in region.weight_buckets)
    yield from (of_input[k] for k in region.weight_inputs)
    yield mix((region.code, region.id), "carry", *reads)
    yield from (of_grad[k] for k in region.weight_output_grads)


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
        name: loaded(value.origin, value.index, part, parts, step, feed)
        for name, value in model.values.items()
        if value.origin != "flow"
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
    flowing: dict[str, int] = {model.loss: given["seed"]}  # type: ignore[dict-item]
    for region in reversed(model.regions):
        if region.has_backward:
            reads = [
                *(weights[region.buckets[k]] for k in region.backward_buckets),
                *(known[region.inputs[k]] for k in region.backward_inputs),
                saved[region.id],
                *(flowing[region.outputs[k]] % PRIME for k in region.output_grads),
            ]
            given = list(kernel(model, region, "B", reads))
            for k, grad in zip(region.input_grads, given, strict=False):
                flowing[region.inputs[k]] = flowing.get(region.inputs[k], 0) + grad
            of_buckets = given[len(region.input_grads) :]
            for bucket, grad in zip(model.trained(region), of_buckets, strict=True):
                grads.setdefault(bucket, []).append(grad)
    return known[model.loss]
