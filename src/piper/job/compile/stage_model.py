"""A model of equal stages, to look at a schedule that has no model yet."""

from __future__ import annotations

from piper.costs import Costs
from piper.costs.measured import Figure, RegionKey
from piper.directives import Place, Strategy
from piper.errors import Problem, Refused, StrategyError
from piper.ir.by_device.schedule_rows import STEPS
from piper.ir.model import Bucket, Model, Parameter, Region
from piper.ir.values import Role, TensorSpec, Value
from piper.job.compile.compiler import Compiled, compile_strategy
from piper.names import BucketId, RegionId, ValueId

CODE, STAGE = "stage", "PP"
MIB = 2**18  # float32 numbers
SMALL = TensorSpec((1, 1))  # a message: it does not count beside activations
WITHOUT_MODEL = (
    "there is no model: a forward takes 1 s, a backward 2 s, half of it 1 s, a message 1 ms; "
    "the activations of a microbatch take 1 MiB on a device, in equal parts for each stage that "
    "the device has of one replica; messages take no memory"
)


def compiled_alone(strategy: Strategy, where: str) -> Compiled:
    """Compile a strategy for as many equal stages as it places."""
    placed = [(one, v) for one in strategy if isinstance(one, Place) for v in stages_of(one)]
    fix = "give the script that uses it: `piper view train.py`"
    if not placed:
        raise StrategyError.of(where, "it places no stages (PP=0, PP=1, ...)", fix)
    figures = {RegionKey(CODE, phase): Figure(float(steps)) for phase, steps in STEPS.items()}
    stages = 1 + max(stage for _, stage in placed)
    ranks = len({place.devices[0] for place, _ in placed})  # of the first replica
    model = stage_model(stages, TensorSpec((1, MIB * ranks // stages)))
    costs = Costs(link=1e30, latency=1e-3, host_link=1e30, figures=figures)
    try:
        return compile_strategy(model, strategy.directives, costs=costs)
    except Refused as error:
        what = f"without its model it cannot be shown: {error.problems[0].what}"
        raise StrategyError(where, Problem(what, fix)) from None


def stages_of(place: Place) -> list[int]:
    """The pipeline stages that it places."""
    items = place.filter.items
    return [index for key, index in items if key == STAGE and isinstance(index, int)]


def stage_model(stages: int, activations: TensorSpec) -> Model:
    """Regions PP0 -> PP1 -> ... that all take equally long and hold the same activations."""
    outs = [ValueId(f"h{k}") for k in range(stages - 1)] + [ValueId("loss")]
    values = {out: Value((SMALL,)) for out in outs[:-1]}
    values[ValueId("x")] = Value((SMALL,), Role.BATCH, index=0)
    values[outs[-1]] = Value((TensorSpec(()),))
    weight = TensorSpec((1,))
    buckets = {
        BucketId(f"{STAGE}{k}"): Bucket(
            BucketId(f"{STAGE}{k}"), (Parameter(f"stages.{k}.weight", weight),)
        )
        for k in range(stages)
    }
    regions = tuple(stage(k, outs, activations) for k in range(stages))
    return Model(regions=regions, values=values, buckets=buckets, loss=outs[-1])


def stage(k: int, outs: list[ValueId], activations: TensorSpec) -> Region:
    return Region(
        id=RegionId(f"{STAGE}{k}"), tags=((STAGE, k),), code=CODE,
        inputs=(outs[k - 1] if k else ValueId("x"),), outputs=(outs[k],),
        buckets=(BucketId(f"{STAGE}{k}"),), input_grads=(0,) if k else (), output_grads=(0,),
        backward_inputs=(0,), backward_buckets=(0,), saved=(activations,), weight_inputs=(0,),
        weight_output_grads=(0,), carry=(activations,),
    )  # fmt: skip
