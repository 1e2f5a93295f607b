"""What a user is told of costs that were not measured."""

from __future__ import annotations

from dataclasses import replace

from costs.test_measured import LARGE, SMALL, measured
from costs.worked import Sketch, all_phases, model_of

from piper.costs import Costs
from piper.costs.devices import costs_of_device, device_kind
from piper.costs.links import NETWORKS
from piper.costs.measured import Figure, RegionKey
from piper.costs.modes import Mode
from piper.costs.notes import notes
from piper.names import B, F

COMPLETE = {"link": 2e9, "add": 1e-9, "square": 1e-9, "update": 1e-9}


def test_all_measured_needs_no_word() -> None:
    model = model_of([SMALL, LARGE])
    costs = replace(measured(model, 7.0, "small", "large"), **COMPLETE)

    assert notes(costs, model, all_phases(model)) == ()


def test_scaled_figures_are_counted() -> None:
    model = model_of([SMALL, LARGE, Sketch("huge", 1e12)])
    costs = replace(measured(model, 7.0, "small"), **COMPLETE)

    assert notes(costs, model, all_phases(model)) == (
        "scaled from other measurements: 8 of 12 figures; "
        "measure them with --profile at this microbatch size",
    )


def test_a_region_that_runs_often_is_one_figure() -> None:
    model = model_of([SMALL, LARGE])
    costs = replace(measured(model, 7.0, "small"), **COMPLETE)

    (found,) = notes(costs, model, [("small", F), ("large", F)] * 5)

    assert found.startswith("scaled from other measurements: 1 of 2 figures")


def test_another_mode_is_named() -> None:
    model = model_of([SMALL])
    costs = replace(measured(model, 7.0, "small"), **COMPLETE, mode=Mode.GRAPHS)

    assert notes(costs, model, all_phases(model)) == (
        "measured in another mode (eager): 4 of 4 figures; "
        "nothing measured says how mode graphs differs",
    )


def test_what_a_file_of_an_older_version_lacks_is_estimated() -> None:
    model = model_of([SMALL, LARGE])
    costs = Costs(figures={RegionKey("small", F): Figure(1.0)}, **COMPLETE)

    assert notes(costs, model, [("small", F), ("large", F)]) == (
        "estimated from FLOPs and bytes: 1 of 2 figures; "
        "measure them with --profile at this microbatch size",
    )


def test_nothing_measured_is_said() -> None:
    model = model_of([SMALL])

    assert notes(Costs(), model, all_phases(model)) == (
        "nothing was measured: regions are estimated from FLOPs and bytes",
    )


def test_a_model_too_small_for_a_gpu_is_said_to_be_bound_by_launches() -> None:
    model = model_of([Sketch("small", 1e6)])
    gpu = costs_of_device(device_kind("h200"), model, NETWORKS["h200"])

    assert notes(gpu, model, [("small", F), ("small", B)])[1] == (
        "the host takes longer to launch most operators (24 us each) than the device to compute "
        "them; larger microbatches help, and so do CUDA graphs, "
        "which a Trainer uses by default where they are faster"
    )
    assert len(notes(gpu.in_mode(Mode.GRAPHS), model, [("small", F), ("small", B)])) == 1


def test_constants_beside_measured_regions_are_said() -> None:
    model = model_of([SMALL])
    costs = replace(measured(model, 7.0, "small"), square=1e-9)

    assert notes(costs, model, all_phases(model)) == (
        "links were not measured: 1 GB/s unless --network says otherwise",
        "not measured, and counted as nothing: sums of gradients, the optimizer",
    )
