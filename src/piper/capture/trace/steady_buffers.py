"""Which buffers a forward updates in the same way for any batch: replicas agree on them.

The weights of a target network are such buffers. They follow from parameters and from themselves.
"""

from collections.abc import Collection, Mapping

from torch import fx

from piper.capture.fx_nodes import closure
from piper.capture.python_state.graph_equality import Numbering
from piper.capture.torch_private import fake_errors_unlogged
from piper.capture.trace.decisions.shared_draws import Retrace, is_random


def steady_buffers(
    root: fx.GraphModule,
    updated: Mapping[str, fx.Node],
    batch: Collection[fx.Node],
    other_rows: Retrace,
) -> tuple[str, ...]:
    """The names of those that the loss depends on. `updated`: the old value of each buffer.

    Neither data nor random numbers change them, and they do not count rows.
    """
    loss, *new = results(root)
    values, needed = dict(zip(updated, new, strict=True)), closure([loss], stop=())
    if needed.isdisjoint(updated.values()):
        return ()
    varying = changed_by_data(root.graph, updated, values, batch)
    read = [name for name, old in updated.items() if old in needed]
    found = [name for name in read if values[name] not in varying]
    same = same_for_other_rows(root, values, other_rows) if found else set()
    return tuple(name for name in found if name in same)


def changed_by_data(
    graph: fx.Graph,
    updated: Mapping[str, fx.Node],
    values: Mapping[str, fx.Node],
    batch: Collection[fx.Node],
) -> set[fx.Node]:
    """The nodes that depend on data or random numbers, in this step or in an earlier one."""
    varying, count = {*batch, *filter(is_random, graph.nodes)}, 0
    while count < len(varying):
        count = len(varying)
        varying |= {old for name, old in updated.items() if values[name] in varying}
        varying = reached(graph, varying)
    return varying


def same_for_other_rows(
    root: fx.GraphModule, values: Mapping[str, fx.Node], other_rows: Retrace
) -> set[str]:
    """The buffers that are computed in the same way for a batch of another size."""
    try:
        with fake_errors_unlogged():
            other, _ = other_rows(3)
    except Exception:  # the model takes only one number of rows
        return set()
    numbering, there = Numbering(), results(other)[1:]
    if len(there) != len(values):
        return set()
    here, others = numbering.of(root), numbering.of(other)
    pairs = zip(values.items(), there, strict=True)
    return {name for (name, one), twin in pairs if here[one] == others[twin]}


def results(root: fx.GraphModule) -> list[fx.Node]:
    """The loss, and the new values of buffers."""
    return list(root.graph.output_node().args[0])


def reached(graph: fx.Graph, sources: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes whose values depend on these."""
    found = set(sources)
    for node in graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found
