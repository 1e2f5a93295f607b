"""The smallest bad DAG for each rule, and what the rule says about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

import pytest
from divided import divided_chain
from synthetic import chain, moe_chain

from piper.directives import Offload, Place, Replicate, Shard, Split, Stream, apply
from piper.errors import BUG, Problem, Refused
from piper.ir import rules
from piper.ir.dag import Dag
from piper.ir.filters import where
from piper.ir.maker import Maker
from piper.ir.model import Model
from piper.ir.nodes import Precedence, Redistribute, Update
from piper.ir.placement.placements import Step
from piper.ir.rules import CAPTURED, FINAL, OFFLOADED, PLACED, Rule, require
from piper.ir.training import training_dag
from piper.job.compile.compiler import compile_strategy
from piper.names import NodeId, ValueId
from piper.passes.bucket_homes import with_homes
from piper.passes.reductions import place_reductions
from piper.passes.transfers import insert_transfers

RULES = tuple(dict.fromkeys((*CAPTURED, *PLACED, *OFFLOADED, *FINAL)))


def tiny() -> Dag:
    return training_dag(chain(1))


def placed(stages: int = 1, microbatches: int = 1) -> Dag:
    """Region k on device k."""
    dag = training_dag(chain(stages))
    for stage in range(stages):
        dag = Place(where(PP=stage), [stage]).rewrite(dag)
    return Split("MB", microbatches).rewrite(dag) if microbatches > 1 else dag


def without(dag: Dag, node: str) -> Dag:
    return replace(dag, nodes={k: v for k, v in dag.nodes.items() if k != node})


def on(dag: Dag, node: str, *devices: int) -> Dag:
    return dag.with_nodes([replace(dag.nodes[NodeId(node)], devices=devices)])


def on_the_host(value: str) -> Dag:
    dag = Offload(where()).rewrite(tiny())
    return dag.with_values({ValueId(value): replace(dag.values[ValueId(value)], host=True)})


def reading(dag: Dag, node: str, k: int, *total: str) -> Dag:
    """The node reads something else as its read k."""
    found = dag.nodes[NodeId(node)]
    reads = (*found.reads[:k], tuple(map(ValueId, total)), *found.reads[k + 1 :])
    return dag.with_nodes([replace(found, reads=reads)])


def divided(groups: list[list[int]], ways: int = 2, stages: int = 1) -> Dag:
    """All on one device after the other, divided in these groups."""
    dag = training_dag(divided_chain(stages, ways))
    devices = [device for group in groups for device in group]
    dag = Place(where(), sorted(devices)).rewrite(dag)
    return Shard(where(), groups, what="weights").rewrite(dag)


def out_of_step() -> Dag:
    """The second stage has other groups than the first."""
    dag = training_dag(divided_chain(2))
    for stage, groups in enumerate(([[0, 1], [2, 3]], [[4, 6], [5, 7]])):
        dag = Place(where(PP=stage), sorted(sum(groups, []))).rewrite(dag)
        dag = Shard(where(PP=stage), groups, what="weights").rewrite(dag)
    return dag


def divided_and_then(second: list[int]) -> Dag:
    """The first stage is divided over two devices."""
    dag = training_dag(divided_chain(2))
    for stage, devices in enumerate(([0, 1], second)):
        dag = Place(where(PP=stage), devices).rewrite(dag)
    return Shard(where(PP=0), [0, 1], what="weights").rewrite(dag)


def experts_among_weights() -> Dag:
    dag = Place(where(), [0, 1]).rewrite(training_dag(moe_chain(1)))
    dag = Shard(where(EP=None), [0, 1], what="weights").rewrite(dag)
    return Shard(where(EP=0), [0, 1]).rewrite(dag)


def cut_and_used_whole() -> Dag:
    model = divided_chain()
    last = replace(model.regions[-1], buckets=model.regions[0].buckets, axes=())
    return training_dag(replace(model, regions=(*model.regions[:-1], last)))


def converted_wrongly() -> Dag:
    dag = compile_strategy(
        divided_chain(), [Place(where(), [0, 1]), Shard(where(), [0, 1], what="weights")]
    ).dag
    node = next(node for node in dag.nodes.values() if isinstance(node, Redistribute))
    return dag.with_nodes([replace(node, step=Step.ALL_GATHER)])


def sharded(zero: int) -> Dag:
    return Replicate(where(), [0, 1], zero=zero).rewrite(Place(where(), [0, 1]).rewrite(tiny()))


def before(dag: Dag, first: str, second: str) -> Dag:
    order = Precedence((NodeId(first),), (NodeId(second),), Maker("order", 1, 1))
    return dag.with_precedences([order])


def neighbours(one: tuple[int, ...], other: tuple[int, ...]) -> Dag:
    dag = training_dag(chain(2))
    return Place(where(PP=1), other).rewrite(Place(where(PP=0), one).rewrite(dag))


def experts(
    devices: list[int],
    groups: list,
    replicated: list | None = None,
    beside: list | None = None,
    zero: int = 0,
) -> Dag:
    """Experts on these devices in these groups, all else beside them."""
    dag = Shard(where(EP=0), groups).rewrite(training_dag(moe_chain(1)))
    dag = Place(where(EP=0), devices).rewrite(dag)
    dag = Place(where(EP=None), beside or devices).rewrite(dag)
    return Replicate(where(), replicated, zero=zero).rewrite(dag) if replicated else dag


def stateful(*read: str, steady: bool = False) -> Model:
    model, varying = chain(1), () if steady else read
    region = replace(model.regions[0], stateful=True, reads_state=read, varying_state=varying)
    return replace(model, regions=(region,))


def shared_buffers() -> Dag:
    """Both regions use one bucket of buffers, which the first one updates."""
    model = chain(2)
    bucket = replace(model.buckets["PP0"], trainable=False, buffers=True)
    first, second = model.regions
    regions = (
        replace(first, stateful=True),
        replace(second, buckets=(first.buckets[0], *second.buckets)),
    )
    shared = replace(model, regions=regions, buckets={**model.buckets, bucket.id: bucket})
    return Place(where(PP=1), [1]).rewrite(Place(where(PP=0), [0]).rewrite(training_dag(shared)))


SMALLEST_BAD: dict[Rule, tuple[Callable[[], Dag], str]] = {
    rules.every_stream_with_a_share_is_used: (
        lambda: Stream("conpute").rewrite(tiny()),
        "nothing runs on the stream 'conpute', which has a share of the GPU\n"
        "  fix: name one of compute, or leave this `Stream` out; did you mean compute?",
    ),
    rules.every_read_has_a_writer: (
        lambda: without(tiny(), "PP0:F"),
        f"PP0:B reads saved:PP0, which nothing writes\n  fix: {BUG}",
    ),
    rules.every_value_is_written_once: (
        lambda: tiny().with_nodes([replace(tiny().nodes["PP0:U"], id=NodeId("again"))]),
        f"again and PP0:U both write w:PP0'\n  fix: {BUG}",
    ),
    rules.every_node_fits_its_region: (
        lambda: reading(training_dag(chain(2)), "PP1:B", 0, "w:PP0"),
        f"PP1:B reads w:PP0 as parameter bucket 0 of PP1 (expected the bucket PP1)\n  fix: {BUG}",
    ),
    rules.every_message_fits_what_it_carries: (
        lambda: reading(insert_transfers(with_homes(placed(2))), "send h0>1", 0, "saved:PP0"),
        "send h0>1 reads saved:PP0 as a part of h0>1 (expected the activation of h0)\n"
        f"  fix: {BUG}",
    ),
    rules.every_update_has_all_gradients: (
        lambda: reading(tiny(), "PP0:U", 0),
        f"PP0:U misses the gradient of PP0 from PP0 in microbatch 0\n  fix: {BUG}",
    ),
    rules.parameters_are_whole_where_they_are_used: (
        lambda: place_reductions(with_homes(sharded(zero=3))),
        "PP0:F reads w:PP0 as parameter bucket 0 of PP0, which is a shard (expected all of PP0, "
        f"gathered)\n  fix: {BUG}",
    ),
    rules.nothing_waits_for_itself: (
        lambda: before(tiny(), "PP0:B", "PP0:F"),
        "these wait for each other\n"
        "    PP0:B -> PP0:F   order (directive 1 of 1)\n"
        "    PP0:F -> PP0:B   data flow\n"
        "  fix: let the order put PP0:B after what it needs, or in the same slot",
    ),
    rules.every_gradient_is_counted_once: (
        lambda: without(tiny(), "PP0:U"),
        f"g:PP0/PP0 is added up 0 times\n  fix: {BUG}",
    ),
    rules.every_region_is_placed: (
        tiny,
        "PP0 has no device\n  fix: add Place(where(PP=0), devices=[...])",
    ),
    rules.backward_runs_where_forward_ran: (
        lambda: on(placed(), "PP0:B", 1),
        "PP0:B is on devices [1], its forward on devices [0]\n"
        "  fix: place a region's passes together: leave PASS out of the filter of `Place`",
    ),
    rules.replicas_are_kept_equal: (
        lambda: Place(where(), [0, 1]).rewrite(tiny()),
        "PP0 is on devices [0, 1], and nothing keeps its replicas equal\n"
        "  fix: add Replicate(where(PP=0), devices=[0, 1])",
    ),
    rules.replicas_are_where_they_are_placed: (
        lambda: Place(where(), [0, 1]).rewrite(Replicate(where(), [0, 2]).rewrite(tiny())),
        "PP0 is placed on devices [0, 1], but replicated on devices [0, 2]\n"
        "  fix: write devices=[0, 1] in its `Replicate`",
    ),
    rules.experts_are_where_they_are_placed: (
        lambda: experts([0, 1], [0, 2]),
        "PP0.EP0 is placed on devices [0, 1], but sharded on devices [0, 2]\n"
        "  fix: write devices=[0, 1] in its `Shard`, or groups of them",
    ),
    rules.experts_have_one_replica_on_a_device: (
        lambda: experts([0, 0, 1, 1], [0, 1]),
        "PP0.EP0 is sharded, and has several replicas on a device: devices [0, 0, 1, 1]\n"
        "  fix: give all regions lists of the same length, in which each device is once",
    ),
    rules.neighbours_of_experts_are_with_them: (
        lambda: experts([0, 1], [0, 1], beside=[2, 3]),
        "PP0.EP0 is sharded on devices [0, 1], its neighbour PP0 is on devices [2, 3]\n"
        "  fix: place PP0 on devices [0, 1] too",
    ),
    rules.groups_fit_the_experts: (
        lambda: experts(
            list(range(6)), [[0, 1], [2, 3], [4, 5]], replicated=[[0, 1, 2], [3, 4, 5]], zero=1
        ),
        "PP0.EP0 is replicated in groups [[0, 1, 2], [3, 4, 5]], but its experts are in groups "
        "[[0, 1], [2, 3], [4, 5]]\n"
        "  fix: write the same groups in its `Shard` and its `Replicate`, or no groups in the "
        "`Replicate`",
    ),
    rules.divided_regions_have_their_devices: (
        lambda: divided([[0, 1]], ways=4),
        "PP0.0 is divided over 4 devices, but sharded over 2\n"
        "  fix: match each region with at most one `Shard`, whatever stage it is in",
    ),
    rules.groups_are_the_same_in_every_stage: (
        out_of_step,
        "PP0.0 is divided over [[0, 1], [2, 3]], which are not at the same places of its `Place` "
        "as the groups of other regions\n"
        "  fix: write the devices of each stage in the same order, those of a group side by side, "
        "in rising order: Place(..., [0, 1, 2, 3]), Shard(..., [[0, 1], [2, 3]])",
    ),
    rules.regions_beside_divided_ones_have_whole_teams: (
        lambda: divided_and_then([2]),
        "some regions are on devices [2], and groups of 2 devices divide others; all regions need "
        "2 devices, or a multiple of 2\n"
        "  fix: place every region on 2 different devices, or on 4, 6, ...; write those of a group "
        "side by side",
    ),
    rules.experts_of_a_team_take_parts_of_its_rows: (
        experts_among_weights,
        f"PP0.EP0 has experts, and computes all rows on every device of a team\n  fix: {BUG}",
    ),
    rules.cut_parameters_are_used_in_divided_regions: (
        cut_and_used_whole,
        "PP0.2 uses PP0.0.cut.weight, which PP0.0 cuts\n"
        "  fix: let the `Shard` of PP0.0 match PP0.2, too",
    ),
    rules.every_redistribution_fits_its_conversion: (
        converted_wrongly,
        f"h0.1:convert:F is not the all-reduce of h0.1:convert in its groups\n  fix: {BUG}",
    ),
    rules.replicas_compute_with_no_buffers_they_update: (
        lambda: Place(where(), [0, 1]).rewrite(training_dag(stateful("centre"))),
        "PP0 updates centre and computes with it, on devices [0, 1]: replicas would compute with "
        "different values\n"
        "  fix: place PP0 on one device: devices=[0], or compute with values that no forward "
        "updates",
    ),
    rules.replicas_update_what_they_compute_with_once: (
        lambda: Split("MB", 2).rewrite(
            Place(where(), [0, 1]).rewrite(training_dag(stateful("target", steady=True)))
        ),
        "PP0 updates target and computes with it, in each microbatch of replicas on devices [0, 1] "
        "(MB has 2)\n"
        "  fix: use one microbatch for each replica: leave out `Split`, or write microbatches=1",
    ),
    rules.replicas_that_update_buffers_have_devices_of_their_own: (
        lambda: Place(where(), [0, 0]).rewrite(training_dag(stateful())),
        "PP0 updates buffers (running statistics) on devices [0, 0]: replicas on one device would "
        "update the same ones\n"
        "  fix: use a norm without running statistics, put the module in eval mode, or place every "
        "region on as many devices as PP0",
    ),
    rules.every_microbatch_of_a_region_is_placed_alike: (
        lambda: on(on(placed(microbatches=2), "PP0:F@1", 1), "PP0:B@1", 1),
        "PP0:F@1 is on devices [1], other parts on devices [0]\n"
        "  fix: place all microbatches of a region on the same devices: put `Place` before `Split`",
    ),
    rules.orders_name_all_microbatches_or_none: (
        lambda: before(placed(microbatches=2), "PP0:F@0", "PP0:B@1"),
        "the order (directive 1 of 1) names PP0 F for 1 of its microbatches, but not PP0:F@1\n"
        "  fix: add slots for PP0:F@1, or leave PP0 F out of the order",
    ),
    rules.buffers_that_change_are_on_one_device: (
        shared_buffers,
        "PP0 updates buffers that PP1 uses on other devices\n"
        "  fix: place PP0 and PP1 on the same devices",
    ),
    rules.neighbours_have_equally_many_replicas: (
        lambda: neighbours((0,), (1, 2)),
        "PP0 is on devices [0], PP1, which reads it, on devices [1, 2] (expected as many replicas "
        f"on both sides)\n  fix: {BUG}",
    ),
    rules.host_memory_is_read_by_copies_only: (
        lambda: on_the_host("saved:PP0"),
        f"PP0:B reads saved:PP0, which is in host memory\n  fix: {BUG}",
    ),
    rules.every_read_is_local: (
        lambda: on(on(tiny(), "PP0:F", 0), "PP0:B", 1),
        f"PP0:B reads saved:PP0, which is not on devices [1]\n  fix: {BUG}",
    ),
}


def test_every_rule_is_in_the_table() -> None:
    missing = [rule.__name__ for rule in RULES if rule not in SMALLEST_BAD]

    assert not missing


def test_every_rule_that_is_written_is_in_use() -> None:
    modules = [import_module(f"piper.ir.rules.{one.name}") for one in iter_modules(rules.__path__)]
    returns = {
        name: getattr(found, "__annotations__", {}).get("return")
        for module in modules
        for name, found in vars(module).items()
    }

    written = {name for name, result in returns.items() if result == "Iterator[Problem]"}

    assert written == {rule.__name__ for rule in RULES}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_finds_its_smallest_counterexample(rule: Rule) -> None:
    bad, message = SMALLEST_BAD[rule]

    problems = list(rule(bad()))

    assert str(problems[0]) == message


@cache
def pipeline() -> Dag:
    places = [Place(where(PP=0), [0]), Place(where(PP=1), [1]), Place(where(PP=2), [0])]
    model = chain(3, skips=((0, 2),), tied=True)
    return compile_strategy(model, [*places, Split("MB", 3)]).dag


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_finds_nothing_in_a_compiled_dag(rule: Rule) -> None:
    assert not list(rule(pipeline()))


def asked_and_compiled(cut: Shard, model: Model) -> tuple[Dag, Dag]:
    four = [0, 1, 2, 3]
    program = [Place(where(), four), cut, Replicate(where(), four, zero=2), Split("MB", 2)]
    return apply(program, training_dag(model)), compile_strategy(model, program).dag


@cache
def with_experts() -> tuple[Dag, Dag]:
    return asked_and_compiled(Shard(where(EP="*"), [[0, 1], [2, 3]]), moe_chain(1, layers=2))


@cache
def with_divided_weights() -> tuple[Dag, Dag]:
    cut = Shard(where(), [[0, 1], [2, 3]], what="weights")
    return asked_and_compiled(cut, divided_chain(2))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_finds_nothing_in_a_dag_with_experts(rule: Rule) -> None:
    asked, compiled = with_experts()

    assert not list(rule(asked if rule in PLACED else compiled))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_finds_nothing_in_a_divided_dag(rule: Rule) -> None:
    asked, compiled = with_divided_weights()

    assert not list(rule(asked if rule in PLACED else compiled))


def test_a_gradient_that_is_added_twice_is_found() -> None:
    dag = tiny()
    update = dag.nodes["PP0:U"]
    assert isinstance(update, Update)
    twice = replace(update, reads=((*update.reads[0], *update.reads[0]),))

    problems = list(rules.every_gradient_is_counted_once(dag.with_nodes([twice])))

    assert [problem.what for problem in problems] == ["g:PP0/PP0 is added up 2 times"]


def test_rules_report_all_they_find_and_say_it_once() -> None:
    many = training_dag(chain(20))

    with pytest.raises(Refused) as refused:
        require(many, PLACED)

    assert len(refused.value.problems) == 20
    assert str(refused.value) == (
        "PP0 has no device\n"
        "  fix: add Place(where(PP=0), devices=[...])\n"
        "  the same goes for PP1, PP2, PP3 and 16 more"
    )


def test_different_problems_are_said_one_by_one() -> None:
    """Up to eight: other devices are another problem, and so is another fix."""
    placed = [Problem(f"PP{k} is on devices [{k}]", "place it on [9]") for k in range(11)]
    fixes = [Problem("PP0 is wrong", "write it"), Problem("PP1 is wrong", "leave it out")]

    assert str(Refused(*placed)).splitlines() == [
        *(line for one in placed[:8] for line in str(one).splitlines()),
        "there are 3 other problems",
    ]
    assert str(Refused(*fixes)) == "\n".join(map(str, fixes))


def test_the_first_rule_that_is_broken_speaks_alone() -> None:
    both = on(training_dag(chain(2)), "PP0:B", 1)

    with pytest.raises(Refused) as refused:
        require(both, PLACED)

    assert [problem.what for problem in refused.value.problems] == [
        "PP0 has no device",
        "PP1 has no device",
    ]
