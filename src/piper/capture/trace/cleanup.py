"""Clean-ups of the traced graph: remove operations without a derivative or without an effect."""

import torch
from torch import Tensor, fx

from piper.capture import refusals, tensor_refusals
from piper.capture.fx_nodes import (
    arguments,
    closure,
    in_order,
    insert,
    line,
    same_layout,
    storages,
    value,
)
from piper.capture.kernels.linear_algebra import WITHOUT_CHECK
from piper.capture.marks.runs import path_of
from piper.capture.torch_private import (
    ENTER_AUTOCAST,
    MODE_SWITCHES,
    OpOverload,
    constant_of,
    is_view,
)
from piper.capture.trace.forward import Traced
from piper.capture.trace.type_refusals import mixed_types, norm_types

aten = torch.ops.aten

_CONVERSIONS = frozenset({
    aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.to.other, aten.type_as.default,
    aten.contiguous.default, aten._to_copy.default,
})  # fmt: skip
_ASSERTIONS = frozenset({
    aten._assert_scalar.default, aten._assert_async.msg, aten._assert_async.default,
    aten._assert_tensor_metadata.default,
})  # fmt: skip
# torch 2.11 loses its check where it differentiates it.
_CHECKED = frozenset({aten.linalg_ldl_factor.default})
# torch's derivative of it is wrong: autograd itself takes another way where it sees such a write.
_WRITTEN = aten.as_strided_scatter.default
_PACKED = frozenset({
    aten.lstm.data, aten.gru.data, aten.rnn_tanh.data, aten.rnn_relu.data,
})  # fmt: skip
_LOOKUPS = frozenset({
    aten.embedding.default, aten.embedding_bag.default, aten.embedding_bag.padding_idx,
})  # fmt: skip


# A trace accepts operands of different types here, and a run does not.
_PRODUCTS = frozenset({
    aten.linear.default, aten.matmul.default, aten.mm.default, aten.bmm.default,
    aten.addmm.default, aten.baddbmm.default, aten.conv1d.default, aten.conv2d.default,
    aten.conv3d.default, aten.convolution.default, aten.mv.default, aten.addmv.default,
    aten.addbmm.default,
})  # fmt: skip
_OF_ONE_TYPE = frozenset({  # of floating-point numbers
    aten.index_add.default, aten.index_copy.default, aten.index_put.default,
    aten.linalg_cross.default, aten.grid_sampler.default, aten.grid_sampler_2d.default,
    aten.grid_sampler_3d.default, aten.cdist.default, aten._cdist_forward.default,
    aten.cross_entropy_loss.default, aten.nll_loss.default, aten.nll_loss_nd.default,
})  # fmt: skip


_BATCH_NORMS = frozenset({
    aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit_no_training.default, aten.batch_norm.default,
})  # fmt: skip


def clean(traced: Traced) -> None:
    """Change the graph in place. It computes the same as before."""
    graph = traced.root.graph
    _refuse_mixed_types(graph)
    with traced.mode:
        _restore_constants(traced.root)
        trained = {traced.weights[name] for name, wanted in traced.parameters.items() if wanted}
        for node in list(graph.nodes):
            if node.target is aten.copy.default:
                _replace_copy(node, trained)
            elif node.target in _CONVERSIONS:
                _drop_if_nothing_changes(node)
            elif node.target in _ASSERTIONS:
                graph.erase_node(node)
            elif node.target in WITHOUT_CHECK:
                node.args, node.kwargs = tuple(arguments(node).values()), {}
                node.target = WITHOUT_CHECK[node.target]
            elif node.target in _CHECKED:
                raise refusals.checked_values(line(node))
            elif node.target in _PACKED:
                raise refusals.packed(line(node))
            elif node.target is _WRITTEN:
                raise tensor_refusals.written_by_memory(line(node))
            elif node.target in _LOOKUPS and arguments(node)["scale_grad_by_freq"]:
                raise refusals.scaled_by_frequency(line(node))
        _own_results(traced)
        _settle_updates(traced)
    graph.eliminate_dead_code(is_impure_node=_must_stay)
    graph.lint()


def _refuse_mixed_types(graph: fx.Graph) -> None:
    """Under autocast, operands are converted when the graph runs."""
    if any(node.target is ENTER_AUTOCAST for node in graph.nodes):
        return
    for node in graph.nodes:
        if node.target in _BATCH_NORMS:
            _refuse_mixed_norm(node)
        if node.target in _PRODUCTS:
            values = [value(one) for one in node.all_input_nodes]
            found = dict.fromkeys(one.dtype for one in values if isinstance(one, Tensor))
            if len(found) > 1:
                raise mixed_types(line(node), list(found))
        if node.target in _OF_ONE_TYPE:
            values = [value(one) for one in node.all_input_nodes]
            floats = [v.dtype for v in values if isinstance(v, Tensor) and v.is_floating_point()]
            if len(set(floats)) > 1:
                raise mixed_types(line(node), list(dict.fromkeys(floats)), called(node))


def called(node: fx.Node) -> str:
    """An operator, as users call it."""
    assert isinstance(node.target, OpOverload)
    return str(node.target.overloadpacket.__name__)


def _refuse_mixed_norm(node: fx.Node) -> None:
    """A trace accepts it, and a CPU does not."""
    given = arguments(node)
    tensors = [given[name] for name in ("weight", "running_mean")]
    found = [value(one) for one in tensors if isinstance(one, fx.Node)]
    if len({one.dtype for one in found}) > 1 and found[0].device.type == "cpu":
        raise norm_types(line(node), found[0].dtype, value(given["input"]).dim())


def _must_stay(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or node.target in MODE_SWITCHES


def _restore_constants(root: fx.GraphModule) -> None:
    """Tensors made from Python numbers were traced as fake tensors: put the numbers back."""
    for node in root.graph.find_nodes(op="get_attr"):
        tensor = getattr(root, node.target)
        if not isinstance(tensor, Tensor):
            continue
        constant = constant_of(tensor)
        if constant is not None and constant.requires_grad:
            raise tensor_refusals.foreign_parameter(node)
        if constant is None or constant.is_meta:
            raise tensor_refusals.foreign_tensor(node)
        setattr(root, node.target, constant)


def _replace_copy(node: fx.Node, trained: set[fx.Node]) -> None:
    """Replace `copy(x, y)`, which has no derivative, by y in the shape of x. It is `x[...] = y`.

    The inputs of x then have a gradient of zero instead of none. A view gets it from its base.
    """
    old, result = node.args[:2]
    assert isinstance(old, fx.Node) and isinstance(result, fx.Node)
    to, given = value(old), value(result)
    graph = node.graph
    with graph.inserting_before(node):
        if to.dtype != given.dtype or to.device != given.device:
            result = insert(graph, node, aten.to.device, result, to.device, to.dtype)
        if str(to.shape) != str(given.shape):
            sizes = insert_sizes(node, old)
            result = insert(graph, node, aten.expand.default, result, sizes)
        if not is_view(old) and not trained.isdisjoint(closure([old], ())):
            never = insert(
                graph, node, aten.scalar_tensor.default, 0, dtype=torch.bool, device=to.device
            )
            result = insert(graph, node, aten.where.self, never, old, result)
        else:
            result = insert(graph, node, aten.clone.default, result)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def insert_sizes(before: fx.Node, tensor: fx.Node) -> list[int | fx.Node]:
    """The shape of a tensor as arguments of a node. Unknown sizes become nodes."""
    return [
        size
        if isinstance(size, int)
        else insert(before.graph, before, aten.sym_size.int, tensor, dim)
        for dim, size in enumerate(value(tensor).shape)
    ]


def _drop_if_nothing_changes(node: fx.Node) -> None:
    given = node.args[0]
    if isinstance(given, fx.Node) and same_layout(value(given), value(node)):
        node.replace_all_uses_with(given)
        node.graph.erase_node(node)


def _own_results(traced: Traced) -> None:
    """Copy each result that shares memory with something else.

    It may be an argument, a view of one, or the new value of a buffer that has other uses too.
    """
    graph = traced.root.graph
    output = graph.output_node()
    arguments = {storage for node in traced.placeholders for storage in storages(node)}
    results = traced.results
    for position, node in enumerate(results):
        shared = position > 0 and (len(node.users) > 1 or results.count(node) > 1)
        if shared or storages(node) & arguments:
            at = output if node.op == "placeholder" else node.next
            with graph.inserting_before(at):
                results[position] = insert(graph, node, aten.clone.default, node)
    output.args = (tuple(results),)


def _settle_updates(traced: Traced) -> None:
    """Move the writes of buffers, which torch adds at the end of the trace, into regions.

    Each goes to where the last of its inputs is computed.
    """
    graph = traced.root.graph
    marked = {node for node in graph.nodes if path_of(node)}
    late = closure(traced.results[1:], stop=marked) if marked else set()
    place = {node: (index, 0) for index, node in enumerate(graph.nodes)}
    ends: dict[int, fx.Node] = {}  # the last node moved behind the node at an index
    for node in in_order(graph, late):
        needs = [need for need in node.all_input_nodes if need.op != "placeholder"]
        if needs:
            last = max(needs, key=place.__getitem__)
            index = place[last][0]
            end = ends.get(index, last)
            end.append(node)
            node.meta["custom"] = last.meta.get("custom", {})
            ends[index], place[node] = node, (index, place[end][1] + 1)
