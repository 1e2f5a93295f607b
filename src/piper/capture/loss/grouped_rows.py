"""Rows behind tokens in one dimension, as a model that has tokens first flattens them.

Where each row is matters for another shape alone. All else works as for rows, element by element.
"""

from dataclasses import replace
from math import prod

from piper.capture.loss.calls import Call, shape
from piper.capture.loss.domain import FIXED, MIXED, Inner, Known, Reduced, Rows
from piper.capture.loss.labelled import elementwise_loss, labelled_loss
from piper.capture.loss.rules import (
    RULES,
    elementwise,
    is_elementwise,
    product,
    quotient,
    same,
    sum_of_two,
    sum_or_mean,
    within_rows,
)
from piper.capture.loss.shapes import (
    along_dimension,
    another_shape,
    from_the_left,
    lookup,
    moved_dimensions,
)

RULED = (
    same, product, quotient, sum_of_two, sum_or_mean, within_rows, from_the_left, lookup,
    moved_dimensions, along_dimension, elementwise_loss, labelled_loss,
)  # fmt: skip


def as_rows(known: Known) -> Known:
    return Rows(known.dim) if isinstance(known, Inner) else known


def in_groups(call: Call) -> Known:
    """What a rule for rows finds, where all tensors have their rows in as many groups."""
    inputs = {node: call.known[node] for node in call.node.all_input_nodes}
    groups = {one.groups for one in inputs.values() if isinstance(one, Inner)}
    if len(groups) > 1 or any(not isinstance(k, Inner) and k != FIXED for k in inputs.values()):
        return MIXED
    rule = RULES.get(call.name, elementwise if is_elementwise(call.node) else None)
    (count,) = groups
    if rule is another_shape:
        return another_shape_of_groups(call, count)
    if rule not in (*RULED, elementwise):
        return MIXED
    found = rule(replace(call, known={node: as_rows(one) for node, one in inputs.items()}))
    if isinstance(found, Rows):
        return Inner(found.dim, count) if found == Rows(found.dim) else MIXED
    return found if found == FIXED or isinstance(found, Reduced) else MIXED


def another_shape_of_groups(call: Call, groups: int) -> Known:
    known = call.of("self")
    assert isinstance(known, Inner)
    return call.grouped(prod(shape(call.given["self"])[: known.dim]) * groups)
