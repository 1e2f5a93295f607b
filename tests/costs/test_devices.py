"""What accelerators take, from their data sheets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from synthetic import chain

from piper.costs import Costs
from piper.costs.devices import DEVICES, costs_of_device, device_kind, dtype_of
from piper.costs.links import NETWORKS
from piper.errors import StrategyError
from piper.ir.model import Model
from piper.ir.values import TensorSpec
from piper.names import B, F


def working(flops: float, traffic: float = 0.0, operators: int = 0) -> Model:
    """One region with so much work forward; twice as much backward."""
    model = chain(1)
    region = replace(
        model.regions[0],
        flops={F: flops, B: 2 * flops},
        traffic={F: traffic, B: 2 * traffic},
        operators={F: operators, B: 2 * operators},
    )
    return replace(model, regions=(region,))


def seconds(model: Model, device: str = "h200") -> float:
    costs = costs_of_device(device_kind(device), model, NETWORKS[device])
    return costs.region(model, model.regions[0], F)


def in_half(model: Model) -> Model:
    """The same with parameters in bfloat16."""
    buckets = {
        name: replace(
            bucket,
            parameters=tuple(
                replace(p, spec=TensorSpec(p.spec.shape, "bfloat16")) for p in bucket.parameters
            ),
        )
        for name, bucket in model.buckets.items()
    }
    return replace(model, buckets=buckets)


def test_large_products_take_the_share_of_the_peak() -> None:
    assert seconds(working(1e15)) == pytest.approx(1e15 / (0.65 * 67e12), rel=1e-3)
    assert seconds(in_half(working(1e15))) == pytest.approx(1e15 / (0.65 * 989e12), rel=1e-3)


def test_other_operators_take_the_time_of_their_bytes() -> None:
    assert seconds(working(0.0, traffic=1e12)) == pytest.approx(1e12 / (0.8 * 4.8e12))


def test_small_work_takes_what_its_operators_take_to_start() -> None:
    few, many = seconds(working(1.0, 1.0, 10)), seconds(working(1.0, 1.0, 100))

    assert few == pytest.approx(10 * device_kind("h200").launch)
    assert many == pytest.approx(10 * few)


def test_the_share_of_the_peak_grows_with_the_work() -> None:
    sizes = [10.0**k for k in range(9, 16)]
    reached = [size / seconds(in_half(working(size, operators=20))) for size in sizes]

    assert reached == sorted(reached)
    assert reached[0] < 0.1 * reached[-1]


def test_costs_of_a_cpu_count_what_they_always_counted() -> None:
    one = working(2e10, traffic=1e15, operators=1000)

    assert Costs().region(one, one.regions[0], F) == pytest.approx(1.0, rel=1e-3)


def test_a_newer_device_is_no_slower() -> None:
    one = in_half(working(1e13, 1e10, 10))

    assert seconds(one, "a100") > seconds(one, "h100") >= seconds(one, "h200")


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_has_its_network(name: str) -> None:
    assert name in NETWORKS
    assert DEVICES[name].name == name


def test_the_type_is_that_of_most_parameters() -> None:
    assert dtype_of(chain(2)) == "float32"
    assert dtype_of(in_half(chain(2))) == "bfloat16"


def test_an_unknown_device_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(StrategyError) as refused:
        device_kind("z80")

    assert str(refused.value) == (
        "device: there is no device 'z80'\n"
        "  fix: choose one of h100, h200, h800, a100, cpu; for another, measure on it with "
        "--profile costs.json, and give --costs costs.json"
    )
