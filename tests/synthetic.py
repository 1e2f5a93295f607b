"""Models without torch, of any size: what capture would find, made up."""

from piper.ir.model import Bucket, Model, Parameter, Region
from piper.ir.values import Origin, TensorSpec, Value
from piper.names import BucketId, RegionId, ValueId

ROW = TensorSpec((2, 4))


def chain(stages: int, skips: tuple[tuple[int, int], ...] = (), tied: bool = False) -> Model:
    """Regions PP0 -> PP1 -> ...; `skips` (a, b): PP-b also reads what PP-a writes."""
    names = [f"PP{k}" for k in range(stages)]
    outs = [ValueId(f"h{k}") for k in range(stages - 1)] + [ValueId("loss")]
    values = {out: Value((ROW,)) for out in outs[:-1]}
    values[ValueId("loss")] = Value((TensorSpec(()),))
    values[ValueId("x")] = Value((ROW,), Origin.BATCH, index=0)
    values[ValueId("y")] = Value((ROW,), Origin.BATCH, index=1)
    buckets = {BucketId(n): bucket(n) for n in names}
    if tied:
        buckets[BucketId("tied")] = bucket("tied")
    regions = [region(k, stages, outs, skips, tied) for k in range(stages)]
    return Model(regions=tuple(regions), values=values, buckets=buckets, loss=ValueId("loss"))


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
