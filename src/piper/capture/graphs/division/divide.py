"""`divided`: a traced graph as each of several devices runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from piper.capture.description.description import number_tags, region_ids
from piper.capture.fx_nodes import insert, line, value
from piper.capture.graphs.division import equivalents, refusals
from piper.capture.graphs.division.calls import tensors
from piper.capture.graphs.division.expert_rows import refuse_rows
from piper.capture.graphs.division.layouts import refuse_outside
from piper.capture.graphs.division.local_graph import local_graph
from piper.capture.graphs.division.ring import rewrite_attention
from piper.capture.graphs.division.row_division import divided_by_rows
from piper.capture.graphs.division.search.plan import search
from piper.capture.graphs.division.search.space import Space, independent
from piper.capture.graphs.division.undivided import undivided
from piper.capture.marks.runs import REQUESTS
from piper.capture.regions.cut import cut, runs_of
from piper.capture.torch_private import MODE_SWITCHES
from piper.capture.trace.forward import Traced
from piper.capture.trace.grad_modes import modes_of
from piper.ir.placement.division import DivisionRequest

aten = torch.ops.aten
Requests = dict[fx.Node, DivisionRequest]


def divided(traced: Traced, requests: Sequence[DivisionRequest]) -> Traced:
    """Divide the regions that are named. The traced graph is changed in place, too.

    What is divided along two axes is divided twice: by tokens, and then the graph that each device
    runs by weights. Messages of the first division are operators as any others in the second.
    """
    axes = sorted({request.axis.number for request in requests})
    for axis in axes:
        _mark(traced, axis, _asked(traced, [one for one in requests if one.axis.number == axis]))
    for axis in axes:
        traced = _divided(traced, axis)
    return traced


def _divided(traced: Traced, axis: int) -> Traced:
    """Along one axis."""
    _rewrite(traced, requests_of(traced, axis))
    wanted = requests_of(traced, axis)
    _refuse(traced, wanted)
    refuse_rows(wanted)
    joins = _join(traced, wanted)
    wanted = requests_of(traced, axis)
    runs, _ = runs_of(traced, list(modes_of(traced.root.graph)))
    parameters = {traced.weights[name]: name for name in traced.parameters}
    used = {node: name for node, name in parameters.items() if node.users}
    space = Space(traced.root.graph, wanted, used, traced.batch, joins)
    plan = search(space, traced.results[0])
    found = local_graph(traced, space, plan, runs)
    rows = *traced.by_rows, *divided_by_rows(space, plan)
    return replace(found, undivided=(*traced.undivided, *undivided(space, plan)), by_rows=rows)


def _asked(traced: Traced, requests: Sequence[DivisionRequest]) -> dict[int, DivisionRequest]:
    """The request of each run, by the region that it becomes without any division."""
    runs, _ = runs_of(traced, list(modes_of(traced.root.graph)))
    number = {node: k for k, run in enumerate(runs) for node in run.nodes}
    chunks = cut(traced)
    ids, _ = region_ids(number_tags([chunk.path for chunk in chunks]))
    by_region = {region: request for request in requests for region in request.regions}
    return {
        number[chunk.results[0]]: by_region[id]
        for id, chunk in zip(ids, chunks, strict=True)
        if id in by_region and by_region[id].ways > 1
    }


def _mark(traced: Traced, axis: int, asked: Mapping[int, DivisionRequest]) -> None:
    """Every node of a divided region remembers its request, and so do those that replace it."""
    runs, _ = runs_of(traced, list(modes_of(traced.root.graph)))
    for number, request in asked.items():
        for node in runs[number].nodes:
            node.meta[REQUESTS] = {**node.meta.get(REQUESTS, {}), axis: request}


def requests_of(traced: Traced, axis: int) -> Requests:
    """The request of each node along an axis."""
    nodes = (node for node in traced.root.graph.nodes if node.op == "call_function")
    found = ((node, node.meta.get(REQUESTS, {}).get(axis)) for node in nodes)
    return {node: request for node, request in found if request is not None}


def _rewrite(traced: Traced, wanted: Requests) -> None:
    modes = modes_of(traced.root.graph)
    parameters = {traced.weights[name]: name for name in traced.parameters}
    free = independent(traced.root.graph, parameters)
    with traced.mode:
        for request in {id(request): request for request in wanted.values()}.values():
            mine = [node for node, one in wanted.items() if one is request and node in modes]
            if request.what != "experts" and mine:
                last = mine[0].meta[REQUESTS]  # words are divided along the last axis
                ways = last[max(last)].ways
                if request.attention is not None:
                    rewrite_attention({node: modes[node] for node in mine}, request, free)
                    mine = [node for node in mine if node.graph is traced.root.graph]
                equivalents.rewrite({node: modes[node] for node in mine}, ways, request.what)
    traced.root.graph.eliminate_dead_code(is_impure_node=_must_stay)


def _refuse(traced: Traced, wanted: Requests) -> None:
    for name, result in zip(traced.updated, traced.results[1:], strict=True):
        if result in wanted:
            raise refusals.updated_in_division(name)
    for node, request in wanted.items():
        if request.what != "experts" and not all(map(_is_known, tensors(node))):
            raise refusals.unknown_size_in_division(line(node))
    refuse_outside(wanted)


def _is_known(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and all(isinstance(s, int) for s in tensor.shape)


def _join(traced: Traced, wanted: Requests) -> set[fx.Node]:
    """A value that leaves a divided region for one that is divided otherwise, or not, is whole.

    A node of its own stands between them.
    """
    joins = set[fx.Node]()
    for node, request in wanted.items():
        if request.what == "experts":
            continue  # which read and write rows, and nothing else
        others = [
            user
            for user in node.users
            if user.op == "call_function" and not _alike(wanted.get(user), request)
        ]
        if others and not isinstance(value(node), list | tuple):
            with traced.mode, node.graph.inserting_after(node):
                whole = insert(node.graph, node, aten.alias.default, node)
            joins.add(whole)
            for user in others:
                user.replace_input_with(node, whole)
    return joins


def _alike(one: DivisionRequest | None, other: DivisionRequest) -> bool:
    """Also the order of tokens is that of the other."""
    return one is not None and all(
        getattr(one, name) == getattr(other, name) for name in ("ways", "what", "attention")
    )


def _must_stay(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or node.target in MODE_SWITCHES
