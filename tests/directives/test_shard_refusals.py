"""What `Shard` refuses, and what it says then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from synthetic import moe_chain

from piper.directives import Directive, Place, Replicate, Shard, Split
from piper.errors import DirectiveError, PassError, Refused
from piper.ir.filters import where
from piper.ir.model import Model, Parameter
from piper.ir.values import TensorSpec, Value
from piper.job.compile.compiler import compile_strategy

TWO, FOUR = [0, 1], [0, 1, 2, 3]
PAIRS = [[0, 1], [2, 3]]

NO_GROUPS = (
    "have different lengths or a device in common\n  fix: write groups such as [[0, 1], [2, 3]]"
)
TWICE = "has a device twice\n  fix: list each device once, such as [0, 2]"
NO_LIST = "is not a list of devices\n  fix: list each device once, such as [0, 2]"


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([[0, 1], [2]], f"the groups [[0, 1], [2]] {NO_GROUPS}"),
        ([[0, 1], [1, 2]], f"the groups [[0, 1], [1, 2]] {NO_GROUPS}"),
        ([], f"devices [] {NO_LIST}"),
        ([0, 0], f"devices [0, 0] {TWICE}"),
        ([[0, 0], [1, 2]], f"devices [0, 0] {TWICE}"),
        (3, "devices 3 is not a list of devices\n  fix: write devices=[3]"),
    ],
    ids=str,
)
def test_what_is_no_group_is_refused(devices: Any, message: str) -> None:
    with pytest.raises(Refused) as refused:
        Shard(where(), devices)

    assert str(refused.value) == message


@pytest.mark.parametrize("stream", ["compute", "loss_norm", "weights"])
def test_a_reserved_stream_is_refused(stream: str) -> None:
    with pytest.raises(Refused) as refused:
        Shard(where(), TWO, stream)

    what = f"the stream {stream!r} is reserved: Piper uses it itself"
    assert str(refused.value).startswith(f"{what}\n  fix: choose another name")


@pytest.mark.parametrize("stream", [3, ""])
def test_a_stream_that_is_no_name_is_refused(stream: Any) -> None:
    with pytest.raises(Refused) as refused:
        Shard(where(), TWO, stream)

    assert str(refused.value).startswith(f"stream {stream!r} is not a name\n")


def with_value(name: str, *shape: int | None, dtype: str = "float32") -> Model:
    model = moe_chain(1, extra=1)
    value = Value((TensorSpec(shape, dtype),))
    return replace(model, values={**model.values, name: value})


def with_bucket(**fields: Any) -> Model:
    model = moe_chain(1)
    changed = replace(model.buckets["PP0.EP0"], **fields)
    return replace(model, buckets={**model.buckets, changed.id: changed})


def with_parameter(*shape: int) -> Model:
    return with_bucket(parameters=(Parameter("experts.w", TensorSpec(shape)),))


def with_shared() -> Model:
    """The last region uses the parameters of the experts, too."""
    model = moe_chain(1)
    *first, last = model.regions
    both = replace(last, buckets=(*last.buckets, "PP0.EP0"))
    only = replace(model.buckets["PP0.EP0"], parameters=model.buckets["PP0.EP0"].parameters[:1])
    buckets = {**model.buckets, only.id: only}
    return replace(model, regions=(*first, both), buckets=buckets)


def without_rows() -> Model:
    model = moe_chain(1)
    before, experts, after = model.regions
    experts = replace(experts, inputs=("counts0",), input_grads=(), backward_inputs=(0,))
    return replace(model, regions=(replace(before, output_grads=(0,)), experts, after))


COUNTS = (
    "  fix: count the rows of each expert before the region, as int64[experts], and let the region "
    "read the rows, sorted by expert, and these counts"
)
ROWS = "  fix: let a region of experts read and write rows, sorted by expert, and nothing else"
STACK = "  fix: stack the parameters of all experts, and use shared ones outside the region"


def no_counts(inputs: str) -> str:
    return (
        "PP0.EP0 does not read exactly one vector of whole numbers, the rows of each expert (its "
        f"inputs are {inputs})\n{COUNTS}"
    )


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: with_value("counts0", 4),
            no_counts("rows0: float32[6, 3], rows0.0: float32[6, 3], counts0: float32[4]"),
        ),
        (
            lambda: with_value("counts0", None, dtype="int64"),
            no_counts("rows0: float32[6, 3], rows0.0: float32[6, 3], counts0: int64[?]"),
        ),
        (
            lambda: with_value("rows0.0", 6, dtype="int32"),
            no_counts("rows0: float32[6, 3], rows0.0: int32[6], counts0: int64[4]"),
        ),
        (
            lambda: with_value("rows0.0", 5, 3),
            "PP0.EP0: input rows0.0 is float32[5, 3], not rows of tokens "
            f"(expected a first dimension of 6)\n{ROWS}",
        ),
        (
            lambda: with_value("back0"),
            "PP0.EP0: output back0 is float32[], not rows of tokens "
            f"(expected a first dimension of 6)\n{ROWS}",
        ),
        (
            lambda: with_parameter(2, 4),
            "PP0.EP0: parameter experts.w is float32[2, 4] "
            f"(expected a first dimension of 4, the number of experts)\n{STACK}",
        ),
        (
            lambda: with_parameter(),
            "PP0.EP0: parameter experts.w is float32[] "
            f"(expected a first dimension of 4, the number of experts)\n{STACK}",
        ),
        (
            with_shared,
            "PP0.EP0 shares the parameter PP0.EP0.up with PP0#1\n"
            "  fix: give every region of experts parameters of its own",
        ),
    ],
    ids=[
        "no counts", "unknown experts", "two vectors", "an input", "an output", "a parameter",
        "a scalar", "a shared parameter",
    ],
)  # fmt: skip
def test_a_region_that_is_none_of_experts_is_refused(
    model: Callable[[], Model], message: str
) -> None:
    with pytest.raises(DirectiveError) as refused:
        compile_strategy(model(), [Shard(where(EP=0), TWO)])

    assert str(refused.value) == f"shard (directive 1 of 1): {message}"


def test_buffers_and_regions_without_rows_are_refused() -> None:
    for model, what in [
        (with_bucket(buffers=True, trainable=False), "PP0.EP0 uses the buffer PP0.EP0.up, "),
        (without_rows(), "PP0.EP0 reads no rows\n  fix: let it read the rows of the tokens"),
    ]:
        with pytest.raises(DirectiveError) as refused:
            compile_strategy(model, [Shard(where(EP=0), TWO)])

        assert str(refused.value).startswith(f"shard (directive 1 of 1): {what}")


def test_all_that_keeps_a_region_from_being_one_of_experts_is_told() -> None:
    model = with_parameter(3)
    bad = {**model.values, "back0": Value((TensorSpec((5, 3)),))}

    with pytest.raises(DirectiveError) as refused:
        compile_strategy(replace(model, values=bad), [Shard(where(EP=0), TWO)])

    assert [problem.what.partition(" is ")[0] for problem in refused.value.problems] == [
        "PP0.EP0: output back0", "PP0.EP0: parameter experts.w",
    ]  # fmt: skip


PLACE, KEEP = Place(where(), TWO), Replicate(where(), TWO)
CUT = Shard(where(EP=0), TWO)
IN_PAIRS = [Place(where(), FOUR), Shard(where(EP=0), PAIRS)]


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            [PLACE, KEEP, Shard(where(EP=0), [0, 2])],
            "shard (directive 3 of 3): PP0.EP0 is placed on devices [0, 1], not on [0, 2]\n"
            "  fix: write devices=[0, 1], or groups of them",
        ),
        (
            [PLACE, KEEP, CUT, CUT],
            "shard (directive 4 of 4): PP0.EP0 is already sharded\n"
            "  fix: match each region with exactly one `Shard`",
        ),
        (
            [Shard(where(EP=0, PASS="F"), TWO)],
            "shard (directive 1 of 1): where(EP=0, PASS='F') selects some of a region's work, but "
            "experts "
            "serve all of it\n  fix: leave PASS out of the filter",
        ),
        (
            [Split("MB", 2), Shard(where(EP=0, MB=0), TWO)],
            "shard (directive 2 of 2): where(EP=0, MB=0) selects some of a region's work, but "
            "experts "
            "serve all of it\n  fix: leave MB out of the filter",
        ),
        (
            [Shard(where(EP=3), TWO)],
            "shard (directive 1 of 1): where(EP=3) matches nothing\n"
            "  fix: choose from what exists: EP: 0",
        ),
        (
            [Shard(where(EP=None), TWO)],
            "shard (directive 1 of 1): PP0 does not read exactly one vector of whole numbers, the "
            f"rows of each expert (its inputs are x: float32[2, 4])\n{COUNTS}",
        ),
        (
            [Shard(where(EP=0), [0, 1, 2])],
            "shard (directive 1 of 1): the 4 experts of PP0.EP0 cannot be divided "
            "evenly over 3 devices\n  fix: use 2 or 4 devices, or groups such as "
            "[[0, 1], [2, 3]]",
        ),
    ],
    ids=["elsewhere", "twice", "pass", "microbatch", "nothing", "no experts", "uneven"],
)
def test_a_shard_that_does_not_fit_is_refused(program: list[Directive], message: str) -> None:
    with pytest.raises(DirectiveError) as refused:
        compile_strategy(moe_chain(1), program)

    assert str(refused.value) == message


def beside(experts: list[int]) -> list[Directive]:
    """All but the experts on devices 0 and 1."""
    rest = [Place(where(EP=None), TWO), Replicate(where(EP=None), TWO)]
    return [*rest, Place(where(EP=0), experts), Shard(where(EP=0), experts)]


def neighbour(name: str, devices: str) -> str:
    return (
        f"PP0.EP0 is sharded on devices {devices}, its neighbour {name} is on devices [0, 1]\n"
        f"  fix: place {name} on devices {devices} too"
    )


@pytest.mark.parametrize(
    ("program", "messages"),
    [
        (
            [Shard(where(EP=0), [0, 2]), PLACE, KEEP],
            [
                "PP0.EP0 is placed on devices [0, 1], but sharded on devices [0, 2]\n"
                "  fix: write devices=[0, 1] in its `Shard`, or groups of them"
            ],
        ),
        (
            [CUT],
            [
                f"{name} has no device\n  fix: add Place(where(PP=0, EP={tag}), devices=[...])"
                for name, tag in [("PP0", None), ("PP0.EP0", 0), ("PP0#1", None)]
            ],
        ),
        (beside([2, 3]), [neighbour("PP0", "[2, 3]"), neighbour("PP0#1", "[2, 3]")]),
        (beside([1, 0]), [neighbour("PP0", "[1, 0]"), neighbour("PP0#1", "[1, 0]")]),
        (
            [*IN_PAIRS, Replicate(where(EP=None), FOUR)],
            [
                "PP0.EP0 is on devices [0, 1, 2, 3], and nothing keeps its replicas equal\n"
                "  fix: add Replicate(where(PP=0, EP=0), devices=[0, 1, 2, 3])"
            ],
        ),
        (
            [
                Place(where(), range(6)),
                Shard(where(EP=0), [[0, 1], [2, 3], [4, 5]]),
                Replicate(where(), [[0, 1, 2], [3, 4, 5]], zero=1),
            ],  # fmt: skip
            [
                "PP0.EP0 is replicated in groups [[0, 1, 2], [3, 4, 5]], but its experts are in "
                "groups [[0, 1], [2, 3], [4, 5]]\n  fix: write the same groups in its `Shard` and "
                "its `Replicate`, or no groups in the `Replicate`"
            ],
        ),
    ],
    ids=["placed elsewhere", "no place", "neighbours", "mirrored", "no replicate", "groups"],
)
def test_a_strategy_that_does_not_fit_is_refused(
    program: list[Directive], messages: list[str]
) -> None:
    with pytest.raises(PassError) as refused:
        compile_strategy(moe_chain(1), program)

    assert str(refused.value) == "\n".join(f"strategy: {message}" for message in messages)
