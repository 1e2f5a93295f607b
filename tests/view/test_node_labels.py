"""Messages are named by what they carry, in words that need no knowledge of a plan."""

from __future__ import annotations

import re

import pytest
from synthetic import chain, moe_chain
from views import compiled

from piper.job.compile.compiler import Compiled
from piper.view.node_labels import node_label

ZERO = {"pp": 1, "dp": 2, "zero": 3, "microbatches": 2}
EXPERTS = {"pp": 2, "dp": 2, "ep": 2, "zero": 2, "microbatches": 4}
INTERNAL = re.compile(r"[dSRgwW]:|\*|>")


def labels(made: Compiled) -> set[str]:
    return {node_label(made.dag, node) for node in made.dag.nodes.values()}


def test_a_transfer_carries_activations_or_gradients_of_a_pass() -> None:
    found = labels(compiled("1f1b", chain(2), pp=2, microbatches=2))

    assert {"send activations of PP0:F@1", "send gradients of PP1:B@0"} <= found
    assert {"loss and norm all-reduce", "update PP0"} <= found


def test_parameters_are_gathered_and_gradients_reduced() -> None:
    found = labels(compiled("1f1b", chain(1), **ZERO))

    assert {"gather parameters of PP0", "reduce-scatter gradients of PP0:B@1"} <= found


def test_tokens_are_dispatched_and_combined() -> None:
    found = labels(compiled("dualpipev", moe_chain(4), **EXPERTS))

    assert {"dispatch to PP0.EP0:F@0", "combine from PP0.EP0:F@0"} <= found


@pytest.mark.parametrize(
    "made",
    [
        compiled("1f1b", chain(1), **ZERO),
        compiled("zbv", chain(8), pp=4, microbatches=8),
        compiled("dualpipev", moe_chain(4), **EXPERTS),
    ],
)
def test_no_label_contains_the_name_of_a_value(made: Compiled) -> None:
    assert [label for label in labels(made) if INTERNAL.search(label)] == []
