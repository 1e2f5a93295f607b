"""The form of a loss: proved on its graph, for a loss function or for a model's own loss."""

import copy
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from piper.capture import torch_private, tracing_private
from piper.capture.fx_nodes import arguments, value
from piper.capture.loss.calls import base_name
from piper.capture.loss.counts import Count, count_of, merged
from piper.capture.loss.decisions import deciding_line, threshold_line
from piper.capture.loss.domain import (
    FIXED,
    MEAN,
    MIXED,
    SUM,
    Known,
    Labels,
    OfTotal,
    PerRow,
    Reduced,
    Rows,
)
from piper.capture.loss.held_buffers import held_by, hold_buffers
from piper.capture.loss.meeting_rows import shares_rows
from piper.capture.loss.model_outputs import GrowingOutput
from piper.capture.loss.proof import batch_rows, followed, growing_rows, twins_of
from piper.capture.loss.rules import MEANS
from piper.capture.precision import Precision
from piper.capture.python_state.function_caches import forgetting
from piper.capture.torch_private import pytree
from piper.capture.trace.arguments.inputs import Inputs
from piper.capture.trace.arguments.outputs import Output
from piper.capture.trace.forward import Traced, own_loss_graph
from piper.capture.trace.replaced.calls import IN_PROOFS, ReplacedCalls
from piper.capture.trace.replaced.numbers import numbers_as_text

TracedLoss = tuple[fx.GraphModule, dict[str, fx.Node]]  # of a model, and its buffers there
OF_ROWS: dict[str, Known] = {"sum": SUM, "growing": MIXED, "mean": MEAN, "unknown": MEAN}
LOSSES = ("cross_entropy_loss", "nll_loss_nd", "nll_loss")


@dataclass(frozen=True, slots=True)
class LossForm:
    """How the loss of a batch follows from those of its microbatches.

    A mean over `counts` of each microbatch, or a sum. `kind` is None if that is not proved.
    """

    kind: Literal["mean", "sum"] | None = None
    counts: tuple[Count, ...] = ()
    even: bool = True  # some term needs microbatches of equal weight
    obscure: bool = False  # some mean counts labels that Piper cannot count
    sums: tuple[int, ...] = ()  # tensors that the model returns, by position: sums over rows
    means: tuple[int, ...] = ()  # those that are means over rows
    growing: str = ""  # the line of an output that grows with the rows, where a mean should be
    unknown: tuple[str, ...] = ()  # lines of outputs that count as means, without a proof
    dims: tuple[int | None, ...] = ()  # of rows in these tensors, if sizes do not say it
    decides: str = ""  # the line of a decision by what all rows give
    threshold: str = ""  # the line of a decision by how many rows count
    numbered: bool = False  # of Python numbers that follow the rows, and no proof
    held: tuple[str, ...] = ()  # buffers whose values `counts` have
    others: tuple[tuple[int, "LossForm"], ...] = ()  # for microbatches of so many rows

    def of(self, rows: int | None) -> "LossForm":
        """The same for a microbatch of so many rows: what it counts depends on its size."""
        return next((form for size, form in self.others if size == rows), self)

    @property
    def count(self) -> Count | None:
        """What all terms divide by, or by functions of it. None: there is no such thing."""
        same = len({one.graph for one in self.counts}) == 1 and not self.even
        if not same or any(other.count is None for _, other in self.others):
            return None
        first = self.counts[0]
        if len(self.counts) == 1:
            return first
        return replace(first, scale=None, empty=False, labels=None)

    @property
    def shape(self) -> tuple[object, ...]:
        """What must be the same for microbatches of all sizes, to add up their losses."""
        counts = tuple((one.what, one.scale, one.empty) for one in self.counts)
        return self.kind, counts, self.even, self.obscure


def model_form(traced: Traced, own: bool) -> LossForm:
    """The form of the loss that a model computes itself (`own`), as far as its graph shows it.

    Otherwise, what it says of labels in case `function_form` finds no proof. A graph of one row
    shows nothing: every size is a multiple of it.
    """
    rows = traced.inputs.rows or 0
    found = _of_model(traced, rows) if own and rows > 1 else None
    return found or _unproved(traced)


@forgetting()
def own_form(
    model: nn.Module,
    inputs: Inputs,
    device: str,
    precision: Precision | None,
    otherwise: LossForm,
) -> LossForm:
    """The form of the loss that a model computes itself, from graphs for these rows and for twice
    as many: they show which numbers are made from that of the rows."""
    found = None
    # With twice the rows, a model may not run.
    with suppress(Exception), torch_private.fake_errors_unlogged(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they have been seen when the model was traced
        rows = inputs.rows or 0
        traced = partial(own_loss_graph, model, device=device, precision=precision)
        found = _of_sizes(traced, model, inputs, rows) if rows else None
        if rows == 1 and found is None and (of_two := _of_sizes(traced, model, inputs, 2)):
            found = _same_of_one(of_two, traced(inputs), model, inputs)
    return _with_decision(found, otherwise)


def _with_decision(found: LossForm | None, otherwise: LossForm) -> LossForm:
    """Without a proof, what may be the reason."""
    if found is None or found.kind is None:
        why = (found.decides, found.threshold) if found else ("", "")
        return replace(otherwise, decides=why[0], threshold=why[1])
    return found


@forgetting()
def function_form(
    loss_fn: Callable[..., Any],
    output: Output,
    arguments: tuple[Any, ...],
    otherwise: LossForm,
    whole: frozenset[int] = frozenset(),
    growing: Sequence[GrowingOutput] = (),
    dims: tuple[int | None, ...] = (),
    twice: Output | None = None,
) -> LossForm:
    """The form of a loss function of the model's `output` and the last of the arguments.

    `whole`: the tensors of the arguments that all microbatches share. `growing`: outputs that
    follow from all rows. `dims`: where outputs have rows, if sizes do not say it. `twice`: the
    output with Python numbers of twice the rows, if they are others.
    """
    sums = tuple(one.position for one in growing if one.kind == "sum")
    unknown = tuple(one.where for one in growing if one.kind == "unknown")
    means = tuple(one.position for one in growing if one.kind == "mean")
    seen = partial(replace, sums=sums, means=means, unknown=unknown, dims=dims)
    sizes = [one.where for one in growing if one.kind in ("sum", "growing")]
    otherwise = seen(otherwise, growing="".join(sizes[:1]))
    batch = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
    cut = (tensor for k, tensor in enumerate(batch) if tensor.dim() and k not in whole)
    rows = next((tensor.shape[0] for tensor in cut), None)
    if not rows:
        return otherwise
    # If it cannot be traced alone, it is tried on numbers.
    with suppress(Exception), torch_private.fake_errors_unlogged(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they have been seen when the model was traced
        given = loss_fn, output, arguments[-1], rows
        found = _of_function(*given, len(batch), whole, growing, dims, twice or output)
        return seen(_with_decision(found, otherwise))
    return otherwise


def _of_function(
    loss_fn: Callable[..., Any],
    output: Output,
    labels: Any,
    rows: int,
    tensors: int,
    whole: frozenset[int],
    growing: Sequence[GrowingOutput],
    dims: Sequence[int | None],
    twice: Output,
) -> LossForm | None:
    """Trace the loss alone, for these rows and for twice as many."""
    many = sum(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(labels))
    kept = frozenset(k - tensors for k in whole if k >= tensors - many)
    one = _traced_loss(loss_fn, output, labels, rows, 1, kept, dims)
    two = _traced_loss(loss_fn, twice, labels, rows, 2, kept, dims)
    twins = twins_of(one.graph, two.graph, rows)
    if twins is None:
        return None
    places = one.graph.find_nodes(op="placeholder")
    outputs = sum(_is_tensor(leaf) for leaf in output[0])
    given: dict[fx.Node, Known] = {}
    for k, node in enumerate(places):
        here, there = value(node).shape, value(twins[node]).shape
        scalar = k < outputs and here.numel() == 1
        grows = [dim for dim, (a, b) in enumerate(zip(here, there, strict=True)) if a != b]
        given[node] = Rows(grows[0]) if grows else MEAN if scalar else FIXED
    for grown in growing:
        given[places[grown.position]] = OF_ROWS[grown.kind]
    batch = places[outputs:]
    known = followed(one.graph, given, frozenset(batch), rows, twins)
    first = tensors - len(batch)  # the labels are the last tensors of the batch
    everything: list[fx.Node | None] = [*[None] * first, *batch]
    loss = one.graph.output_node().args[0][0]
    return _form(one, everything, known[loss]) or _undecided(known, loss, batch)


def _traced_loss(
    loss_fn: Callable[..., Any],
    output: Output,
    labels: Any,
    rows: int,
    times: int,
    kept: frozenset[int],
    dims: Sequence[int | None],
) -> fx.GraphModule:
    """`kept`: labels that stay as they are, counted from the last one, which is -1."""
    own = copy.deepcopy(loss_fn) if isinstance(loss_fn, torch.nn.Module) else loss_fn
    leaves, spec = output
    wanted, label_spec = pytree.tree_flatten(labels)

    def call(*tensors: Tensor) -> list[Tensor]:
        rest = iter(tensors)
        made = [next(rest) if _is_tensor(leaf) else leaf for leaf in leaves]
        targets = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in wanted]
        given = pytree.tree_unflatten(made, spec), pytree.tree_unflatten(targets, label_spec)
        return [own(*given)]

    described = [leaf for leaf in leaves if _is_tensor(leaf)]
    described += [(tuple(t.shape), t.dtype) for t in wanted if isinstance(t, Tensor)]
    with (
        torch_private.new_fake_mode(), ReplacedCalls(IN_PROOFS), numbers_as_text(), forgetting(),
        tracing_private.unchecked_distributions(),
    ):  # fmt: skip
        sizes = [
            size if k - len(described) in kept else _times(size, rows, times, dims[k : k + 1])
            for k, (size, _) in enumerate(described)
        ]
        pairs = zip(sizes, described, strict=True)
        made = [torch.empty(size, dtype=kind) for size, (_, kind) in pairs]
        with torch.enable_grad():
            return tracing_private.trace_forward(call, *made)


def _times(
    size: tuple[int, ...], rows: int, times: int, known: Sequence[int | None] = ()
) -> tuple[int, ...]:
    """Sizes for more rows. The first dimension may also be all tokens of all rows.

    >>> _times((4, 2), 2, 3), _times((4, 2), 2, 3, [1]), _times((4, 2), 2, 3, [None])
    ((12, 2), (4, 6), (4, 2))
    """
    if known:
        return tuple(one * times if dim == known[0] else one for dim, one in enumerate(size))
    batched = size and size[0] % rows == 0 and (rows > 1 or size[0] == 1)
    return (size[0] * times, *size[1:]) if batched else size


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, tuple) and len(leaf) == 2 and isinstance(leaf[1], torch.dtype)


def _of_model(traced: Traced, rows: int) -> LossForm | None:
    whole = traced.inputs.whole
    given = {
        node: FIXED if k in whole else batch_rows(node, rows) for k, node in enumerate(traced.batch)
    }
    known = followed(traced.root.graph, given, frozenset(traced.batch), rows, model=True)
    if any(_may_follow_rows(node, one, rows) for node, one in known.items()):
        return None
    (loss, *_) = traced.results
    found = _form(traced.root, traced.batch, known[loss])
    shared = found is not None and found.kind == "sum" and shares_rows(loss, known)
    return None if shared else found


def _may_follow_rows(node: fx.Node, known: Known, rows: int) -> bool:
    """Whether a sum over rows meets a number that may be made from that of the rows, as in
    `labels.numel() - ignored.sum()`. Only a graph of other rows shows it."""
    if not isinstance(known, Reduced | OfTotal):
        return False
    numbers = [abs(one) for one in node.args if isinstance(one, int | float) and one]
    return any(one >= rows and one % rows == 0 or 1 / one % rows == 0 for one in numbers)


def _of_two(traced: Sequence[TracedLoss], model: nn.Module, inputs: Inputs) -> LossForm | None:
    """Buffers that no forward updates are constants of what a loss divides by: class weights."""
    ((one, _), (two, _)), rows = traced, inputs.rows or 0
    for root, buffers in traced:
        hold_buffers(root, buffers, model)
    twins = twins_of(one.graph, two.graph, rows)
    if twins is None:
        return None
    batch = one.graph.find_nodes(op="placeholder")[-len(inputs.tensors) :]
    given = growing_rows(batch, twins)
    known = followed(one.graph, given, frozenset(batch), rows, twins, model=True)
    loss = one.graph.output_node().args[0][0]
    return _of_loss(one, batch, known) or _undecided(known, loss, batch)


def _of_sizes(
    traced: Callable[[Inputs], TracedLoss], model: nn.Module, inputs: Inputs, rows: int
) -> LossForm | None:
    """From graphs of so many rows and of twice as many."""
    given = inputs.with_rows(rows)
    return _of_two([traced(given), traced(inputs.with_rows(2 * rows))], model, given)


def _same_of_one(
    proved: LossForm, traced: TracedLoss, model: nn.Module, inputs: Inputs
) -> LossForm | None:
    """For one row, for which models may do something else: they expand it, or leave a mask out.

    Alone, its graph proves nothing, since every size is a multiple of one.
    """
    root, buffers = traced
    hold_buffers(root, buffers, model)
    batch = root.graph.find_nodes(op="placeholder")[-len(inputs.tensors) :]
    given = {node: FIXED if k in inputs.whole else Rows(0) for k, node in enumerate(batch)}
    known = followed(root.graph, given, frozenset(batch), 1, model=True)
    found = _of_loss(root, batch, known)
    return found if found is not None and found.shape == proved.shape else None


def _of_loss(
    root: fx.GraphModule, batch: Sequence[fx.Node], known: Mapping[fx.Node, Known]
) -> LossForm | None:
    last = root.graph.output_node().args[0][0]
    loss = known[last]
    found = _form(root, batch, loss)
    if found is None or (found.kind == "sum" and shares_rows(last, known)):
        return None
    return replace(found, held=tuple(held_by(loss)))


def _undecided(known: Mapping[fx.Node, Known], loss: fx.Node, batch: Sequence[fx.Node]) -> LossForm:
    """Not proved. The batch's own tensors count rows, and what follows them alone decides nothing
    by the model."""
    own = set(batch)
    for node in loss.graph.nodes:
        if node.all_input_nodes and own.issuperset(node.all_input_nodes):
            own.add(node)
    given = known, loss, frozenset(own)
    return LossForm(decides=deciding_line(*given), threshold=threshold_line(*given))


def _form(root: fx.GraphModule, batch: Sequence[fx.Node | None], known: Known) -> LossForm | None:
    """`batch`: the placeholder of each tensor of the batch, as far as the graph reads it."""
    if not isinstance(known, Reduced):
        return None
    if not known.over:
        return LossForm("sum", even=False)
    counts = []
    for one in known.over:
        if not isinstance(one, PerRow):
            found = count_of(root, batch, one)
            if found is None:
                return None
            counts.append(found)
    return LossForm("mean", merged(counts), PerRow() in known.over)


def _unproved(traced: Traced) -> LossForm:
    """Not proved; but labels that any mean of the graph ignores must not differ in number."""
    counts: list[Count] = []
    obscure = False
    for node in traced.root.graph.nodes:
        if node.op == "call_function" and base_name(node) in LOSSES:
            given = arguments(node)
            labels, weight = given["target"], given.get("weight")
            if given.get("reduction", MEANS) != MEANS or value(labels).is_floating_point():
                continue
            ignored = given.get("ignore_index", -100)
            found = count_of(traced.root, traced.batch, Labels(labels, ignored, weight))
            obscure |= found is None or weight is not None
            counts += [found] if found is not None else []
    return LossForm(None, tuple(dict.fromkeys(counts)), True, obscure)


def form_to_json(form: LossForm) -> str:
    return json.dumps(asdict(form))


def form_from_json(text: str) -> LossForm:
    return _form_of(json.loads(text))


def _form_of(found: dict[str, Any]) -> LossForm:
    counts = tuple(Count(**one) for one in found["counts"])
    others = tuple((rows, _form_of(one)) for rows, one in found["others"])
    lists = {name: tuple(found[name]) for name in ("sums", "means", "unknown", "dims", "held")}
    return LossForm(**{**found, **lists, "counts": counts, "others": others})
