"""Tokens as integers: how experts compute on them, and how the token all-to-all sends them.

Written from the meaning of the instructions, independently of the code under test. Rows, and the
counts of experts, are bundles of one tensor; a row is one number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from random import Random

from plan.integer_tensors import PRIME, Bundle, Number, Wrong, blend, mix, number
from synthetic import TOKENS

from piper.ir.model import Model, Region
from piper.ir.values import TensorSpec

Row = tuple[int, ...]
Matrix = tuple[Row, ...]  # rows of each expert of each device


def is_counts(spec: TensorSpec) -> bool:
    return spec.dtype == "int64"


def is_rows(spec: TensorSpec) -> bool:
    return spec.shape[1:] == TOKENS.shape[1:]


def has_experts(region: Region) -> bool:
    return "EP" in dict(region.tags)


def routing(seed: int, experts: int, length: int | None) -> Row:
    """How many rows each expert gets: few to some, none to others; of unknown length, often none
    at all."""
    random = Random(seed)
    liked = random.sample(range(experts), random.randint(1, experts))
    total = random.choice([0, 1, 4, 6]) if length is None else length
    chosen = random.choices(liked, k=total)
    return tuple(chosen.count(expert) for expert in range(experts))


def of(given: Number) -> Row:
    """The only tensor of rows, or of counts."""
    if isinstance(given, int) or len(given) != 1:
        raise Wrong("rows or counts are something else")
    return given[0]


# How experts compute: each row by itself, with the parameters of its expert.


def experts_run(
    model: Model, region: Region, phase: str, reads: Sequence[Number]
) -> Iterator[Number]:
    if phase == "F":
        yield from forward(model, region, reads)
    if phase in ("B", "BI"):
        done = rows_of(model, region, "backward", reads)
        yield from (told(done, "grad", k) for k in region.input_grads)
        carry = (*told(done, "carry"), saved_counts(region, reads))
        if phase == "BI":
            yield carry
        reads = list(weight_reads(region, reads, carry)) if phase == "B" else reads
    if phase in ("B", "BW"):
        yield from weight_grads(model, region, reads)


def forward(model: Model, region: Region, reads: Sequence[Number]) -> Iterator[Number]:
    count = len(region.buckets)
    counts = next(
        of(n) for n, k in zip(reads[count:], region.inputs, strict=True) if counted(model, k)
    )
    inputs = range(len(region.inputs))
    parts = [
        *buckets_of(reads[:count], counts),
        *inputs_of(model, region, inputs, reads[count:], counts),
    ]
    done = by_row(region, "forward", parts, sum(counts))
    yield from (told(done, "out", k) for k in range(len(region.outputs)))
    if region.has_backward:
        yield (*told(done, "saved"), counts)


def counted(model: Model, value: str) -> bool:
    return is_counts(model.values[value].specs[0])  # type: ignore[index]


def told(rows: Row, *what: object) -> Bundle:
    word = mix(*what)
    return (tuple([blend(row, word) for row in rows]),)


def saved_counts(region: Region, reads: Sequence[Number]) -> Row:
    kept = reads[len(region.backward_buckets) + len(region.backward_inputs)]
    return kept[1]  # type: ignore[index]


def rows_of(model: Model, region: Region, word: str, reads: Sequence[Number]) -> Row:
    """A number for each row, of all that a half of the backward knows of it."""
    weights = word == "weight"
    buckets = region.weight_buckets if weights else region.backward_buckets
    inputs = region.weight_inputs if weights else region.backward_inputs
    kept = reads[len(buckets) + len(inputs)]
    if isinstance(kept, int) or len(kept) != 2:
        raise Wrong(f"{region.id} kept something else")
    counts, first = kept[1], len(buckets)
    parts = [
        *buckets_of(reads[:first], counts),
        *inputs_of(model, region, inputs, reads[first : first + len(inputs)], counts),
        kept[0],
        *map(of, reads[first + len(inputs) + 1 :]),
    ]
    return by_row(region, word, parts, sum(counts))


def buckets_of(bundles: Sequence[Number], counts: Row) -> Iterator[Row]:
    """For each row, the parameters of its expert."""
    for bundle in bundles:
        if isinstance(bundle, int):
            raise Wrong("these are no parameters")
        cuts = [equal_parts(tensor, len(counts)) for tensor in bundle]
        seen = [mix(*(tensor[e] for tensor in cuts)) for e in range(len(counts))]
        yield tuple(seen[e] for e, rows in enumerate(counts) for _ in range(rows))


def inputs_of(
    model: Model, region: Region, inputs: Sequence[int], given: Sequence[Number], counts: Row
) -> Iterator[Row]:
    for k, each in zip(inputs, given, strict=True):
        if not counted(model, region.inputs[k]):
            yield of(each)
        elif of(each) != counts:
            raise Wrong(f"{region.id} reads other counts than before")


def by_row(region: Region, word: str, parts: Sequence[Row], length: int) -> Row:
    if any(len(part) != length for part in parts):
        raise Wrong(f"{region.id} has not as many rows as are counted")
    name = number(f"{region.code} {region.id} {word}")
    return tuple(blend(name, *row) for row in zip(*parts, strict=True))


def weight_reads(region: Region, reads: Sequence[Number], carry: Number) -> Iterator[Number]:
    """What BW would read, out of what B reads."""
    buckets, inputs = len(region.backward_buckets), len(region.backward_inputs)
    of_bucket = dict(zip(region.backward_buckets, reads, strict=False))
    of_input = dict(zip(region.backward_inputs, reads[buckets:], strict=False))
    of_grad = dict(zip(region.output_grads, reads[buckets + inputs + 1 :], strict=True))
    yield from (of_bucket[k] for k in region.weight_buckets)
    yield from (of_input[k] for k in region.weight_inputs)
    yield carry
    yield from (of_grad[k] for k in region.weight_output_grads)


def weight_grads(model: Model, region: Region, reads: Sequence[Number]) -> Iterator[Number]:
    """Added up over the rows of each expert: who computes on which of them makes no difference."""
    rows = rows_of(model, region, "weight", reads)
    counts: Row = reads[len(region.weight_buckets) + len(region.weight_inputs)][1]  # type: ignore[index]
    mine = cut(rows, counts)
    for bucket in model.trained(region):
        specs = model.buckets[bucket].specs
        sizes = [spec.numel // (spec.shape[0] or 1) for spec in specs]
        yield tuple(
            tuple(sum([blend(r, j, k) for r in own]) % PRIME for own in mine for k in range(size))
            for j, size in enumerate(sizes)
        )


# The token all-to-all.


def cut(flat: Row, lengths: Sequence[int]) -> list[Row]:
    ends = list(accumulate(lengths, initial=0))
    if ends[-1] != len(flat):
        raise Wrong("there are other rows than those that are counted")
    return [flat[a:b] for a, b in pairwise(ends)]


def equal_parts(flat: Row, ways: int) -> tuple[Row, ...]:
    if ways < 1 or len(flat) % ways:
        raise Wrong("experts cannot be divided like this")
    size = len(flat) // ways
    return tuple(flat[k * size : (k + 1) * size] for k in range(ways))


def joined_rows(parts: Sequence[Row]) -> Row:
    return tuple(row for part in parts for row in part)


def to_experts(rows: Row, sent: Matrix) -> list[Row]:
    """The rows for each device. They are sorted by expert, and so by device."""
    return cut(rows, [sum(counts) for counts in sent])


def at_experts(came: Sequence[Row], got: Matrix) -> Row:
    """From what came from each device: expert by expert, and in each device by device."""
    parts = [cut(rows, counts) for rows, counts in zip(came, got, strict=True)]
    return joined_rows([part[e] for e in range(len(got[0])) for part in parts])


def to_sources(rows: Row, got: Matrix) -> list[Row]:
    """The rows that go back to each device."""
    devices = range(len(got))
    parts = iter(cut(rows, [got[d][e] for e in range(len(got[0])) for d in devices]))
    by_expert = [[next(parts) for _ in devices] for _ in got[0]]
    return [joined_rows([row[d] for row in by_expert]) for d in devices]


def at_sources(came: Sequence[Row], sent: Matrix) -> Row:
    cut(joined_rows(came), [sum(counts) for counts in sent])
    if [len(rows) for rows in came] != [sum(counts) for counts in sent]:
        raise Wrong("other rows come back than were sent")
    return joined_rows(came)
