"""Trace the whole forward pass, up to the loss, into one graph. Weights need no memory."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx, nn

from piper.capture import refusals, tensor_refusals, torch_private
from piper.capture.precision import TYPES, Precision
from piper.capture.python_state import carried
from piper.capture.python_state.carried import Once, same_results
from piper.capture.python_state.clocks import refuse_clocks
from piper.capture.python_state.graph_equality import Numbering
from piper.capture.python_state.loss_state import OWNER, LossCopy, loss_buffers, reach_of_both
from piper.capture.python_state.settings import settings_kept
from piper.capture.python_state.snapshot import Snapshot
from piper.capture.python_state.tensor_attributes import attributes_lent
from piper.capture.source_lines import line_of
from piper.capture.trace import float8, model_copy, side_effects
from piper.capture.trace.arguments.call_arguments import flatten, own_loss, split
from piper.capture.trace.arguments.fakes import fake, fake_input
from piper.capture.trace.arguments.inputs import Inputs, inputs_of
from piper.capture.trace.arguments.layouts import listen
from piper.capture.trace.arguments.loss_call import called
from piper.capture.trace.arguments.outputs import Output, joined
from piper.capture.trace.attribute_buffers import make_buffers, plain_attributes, unmake_buffers
from piper.capture.trace.conversions import gradient_types, in_type, parameter_types
from piper.capture.trace.decisions.both_ways import with_both_ways
from piper.capture.trace.decisions.random_decisions import RandomDecisions
from piper.capture.trace.decisions.shared_draws import mark_draws
from piper.capture.trace.decisions.ways import Way
from piper.capture.trace.model_copy import acting_as, knows_modules, run_with
from piper.capture.trace.steady_buffers import steady_buffers
from piper.capture.trace.tracing import graph_of, tracing
from piper.errors import CaptureError
from piper.ir.placement.placements import Placement
from piper.ir.values import TensorSpec

Loss = Callable[[Any, Any], Tensor]
Given = tuple[Loss | None, Inputs, str, Precision | None]  # loss, inputs, device, precision


@dataclass
class Traced:
    """The traced graph. Its placeholders are parameters, buffers and batch tensors, in this order.

    Its outputs are the loss and the new values of `updated` buffers.
    """

    root: fx.GraphModule
    mode: Any  # the fake mode of all its values
    parameters: dict[str, bool]  # name -> requires a gradient
    buffers: tuple[str, ...]
    updated: tuple[str, ...]
    aliases: dict[str, str]  # other names of tied parameters and buffers -> first name
    inputs: Inputs
    device: str
    output: Output  # of the model, which the loss reads
    precision: Precision | None = None
    gradients: dict[str, str] = field(default_factory=dict)  # types of sums, if not their own
    random: fx.Node | None = None  # the placeholder of the random seed, behind the batch
    rank: fx.Node | None = None  # the placeholder of the rank in a divided graph, the last one
    placements: dict[str, Placement] = field(default_factory=dict)  # of parameters that are divided
    by_tokens: dict[str, Placement] = field(default_factory=dict)  # if also divided by weights
    whole: dict[str, TensorSpec] = field(default_factory=dict)  # of parameters that are cut
    undivided: tuple[str, ...] = ()  # work in divided regions that each device does whole
    by_rows: tuple[str, ...] = ()  # attentions of which rows are divided, where tokens were asked
    check: Callable[[fx.GraphModule], None] = lambda _: None  # refuses some constants of a graph
    asked: str = ""  # the first line that asks for the layout of the batch
    unclear_draw: str = ""  # the first line that draws numbers, if Piper cannot say for which rows
    remembers: bool = False  # whether the forward changes Python state that some code reads
    steady: tuple[str, ...] = ()  # updated buffers that are the same for any batch, and are read

    @property
    def placeholders(self) -> list[fx.Node]:
        return self.root.graph.find_nodes(op="placeholder")

    @property
    def weights(self) -> dict[str, fx.Node]:
        """Placeholders of parameters and buffers, by name."""
        return dict(zip([*self.parameters, *self.buffers], self.placeholders, strict=False))

    @property
    def batch(self) -> list[fx.Node]:
        start = len(self.parameters) + len(self.buffers)
        return self.placeholders[start : start + len(self.inputs.tensors)]

    @property
    def results(self) -> list[fx.Node]:
        return list(self.root.graph.output_node().args[0])


def trace(
    model: nn.Module,
    loss_fn: Loss | None,
    example: tuple[Any, ...],
    device: str,
    precision: Precision | None = None,
    whole: frozenset[int] = frozenset(),
) -> Traced:
    side_effects.refuse_untraceable(model)
    float8.refuse_device(precision, device)
    given = loss_fn, inputs_of(example, whole), device, precision
    attempt = Attempt(model, *given)
    try:
        root = attempt.root()
    except RuntimeError as error:
        if torch_private.FOREIGN_WRITE not in str(error):
            raise
        _find_carried(attempt, given, error)
    if attempt.carried or attempt.carried_by_loss:  # from step to step, which buffers are
        make_buffers(model, attempt.carried)
        attempt = Attempt(model, *given, attempt.carried_by_loss)
        root = attempt.root()
    check = partial(side_effects.refuse_registered_constants, model=model)
    check(root)
    traced = Traced(
        root=root,
        mode=attempt.mode,
        parameters={name: tensor.requires_grad for name, tensor in attempt.parameters.items()},
        buffers=tuple(attempt.buffers),
        updated=tuple(attempt.updated),
        aliases=model_copy.aliases_in(model, {**attempt.parameters, **attempt.buffers}),
        inputs=attempt.inputs,
        device=device,
        output=attempt.seen[-1],
        precision=precision,
        gradients=gradient_types(model, precision),
        check=check,
        remembers=attempt.remembers,
        asked="".join(attempt.asked[:1]),
    )
    again = partial(_with_other_rows, attempt, given)
    cut = [node for k, node in enumerate(traced.batch) if k not in whole]
    unclear = mark_draws(root, cut, attempt.inputs.rows or 1, again)
    old = {name: traced.weights[name] for name in traced.updated}
    steady = steady_buffers(root, old, traced.batch, again)
    return replace(traced, unclear_draw="".join(unclear[:1]), steady=steady)


def _with_other_rows(attempt: "Attempt", given: Given, least: int) -> tuple[fx.GraphModule, int]:
    """The same for several times the rows, which is no other size by chance. And how many times."""
    loss_fn, inputs, device, precision = given
    known = [*attempt.parameters.values(), *attempt.buffers.values(), *inputs.tensors]
    taken, rows = {size for one in known for size in one.shape}, inputs.rows or 1
    times = next(n for n in count(least, least) if n * rows not in taken)
    others = loss_fn, inputs.with_rows(times * rows), device, precision
    return Attempt(attempt.model, *others, list(attempt.loss.buffers)).root(), times


def output_graph(
    model: nn.Module, inputs: Inputs, device: str, precision: Precision | None
) -> fx.GraphModule:
    """The graph of what the model returns, `joined`. Its last placeholders are the inputs."""
    return Attempt(model, joined, inputs, device, precision).root()


def loss_graph(
    model: nn.Module,
    inputs: Inputs,
    device: str,
    precision: Precision | None,
    loss_fn: Loss | None = None,
) -> fx.GraphModule:
    """The graph of a loss, or of that which the model computes itself, likewise."""
    return Attempt(model, loss_fn, inputs, device, precision).root()


def own_loss_graph(
    model: nn.Module, inputs: Inputs, device: str, precision: Precision | None
) -> tuple[fx.GraphModule, dict[str, fx.Node]]:
    """The graph of the own loss of a model. By name: buffers that no forward updates, in it."""
    attempt = Attempt(model, None, inputs, device, precision)
    places = (root := attempt.root()).graph.find_nodes(op="placeholder")
    held = dict(zip(attempt.buffers, places[len(attempt.parameters) :], strict=False))
    return root, {name: node for name, node in held.items() if name not in attempt.updated}


def _find_carried(attempt: "Attempt", given: Given, error: RuntimeError) -> None:
    """A trace cannot write to a tensor outside of it. So try with all of them as buffers."""
    model, names = attempt.model, plain_attributes(attempt.model)
    make_buffers(model, names)
    try:
        trial = Attempt(model, *given, list(loss_buffers(given[0])))
        trial.root()
    except RuntimeError:
        raise refusals.foreign_write(line_of(error.__traceback__)) from error
    finally:
        unmake_buffers(model, names)
    attempt.carried = [name for name in trial.updated if name in names]
    attempt.carried_by_loss = [name for name in trial.updated if name in trial.loss.buffers]


class Attempt:
    """Traces a model, and once more if its forward changed Python state."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss | None,
        inputs: Inputs,
        device: str,
        precision: Precision | None,
        carried_by_loss: Sequence[str] = (),
    ) -> None:
        self.model, self.inputs, self.device = model, inputs, device
        self.loss = LossCopy(loss_fn, model, carried_by_loss)
        self.precision, self.mode = precision, torch_private.new_fake_mode()
        self.types = parameter_types(model, precision)
        self.parameters, self.buffers = dict(model.named_parameters()), dict(model.named_buffers())
        self.view = model_copy.throw_away(model, loss_fn)
        self.runs = self.view  # or the model, if its code may ask which module it is
        self.modules = list(model.modules())  # while another one acts as the model, these are gone
        self.buffers |= self.loss.buffers
        self.reach = reach_of_both(self.view, self.loss.call)
        self.updated, self.seen = list[str](), list[Output]()
        self.carried: list[str] = []  # attributes that must be buffers, found by `judge`
        self.carried_by_loss: list[str] = []  # buffers of the loss that it updates
        self.asked: list[str] = []  # lines that ask for the layout of the batch
        self.remembers = False  # whether the forward changes what some code reads
        self.decisions: Callable[[], RandomDecisions] = RandomDecisions
        self.numbering = Numbering()

    def root(self) -> fx.GraphModule:
        """The graph of one step, if the next step computes the same."""
        once = self.settled(RandomDecisions)
        if not once.decisions or self.carried or self.carried_by_loss:
            return once.finish()
        other, seen = self.settled(partial(RandomDecisions, default=True)), self.seen[-1]
        longer = max(once, other, key=Once.extent)  # it has all layers, and so their marks
        base = self.way(longer, (longer is other,) * longer.decisions, longer.updated)
        root = with_both_ways(base, partial(self.decided, longer.updated))
        self.updated[:], self.seen[-1] = longer.updated, seen
        return root

    def decided(self, updated: tuple[str, ...], answers: tuple[bool, ...]) -> Way:
        once = self.settled(partial(RandomDecisions, answers))
        return self.way(once, answers[: once.decisions], updated)

    def way(self, once: Once, answers: tuple[bool, ...], updated: tuple[str, ...]) -> Way:
        """A trace with these results: buffers that it does not update stay as they are."""
        new = dict(zip(once.updated, once.results[1:], strict=True))
        inputs = once.root.graph.find_nodes(op="placeholder")
        old = dict(zip([*self.parameters, *self.buffers], inputs, strict=False))
        others = [new[name] for name in new if name not in updated]
        results = [once.results[0], *(new.get(name, old[name]) for name in updated), *others]
        return Way(once.giving([*results, *once.marks]), answers, self.numbering)

    def settled(self, decisions: Callable[[], RandomDecisions]) -> Once:
        """One trace that leaves Python state as it was."""
        self.decisions = decisions
        with acting_as(self.model, self.view), settings_kept(self.reach):
            once = self.once()
            try:
                if changes := once.changes:
                    self.remembers |= any(self.reach.may_read(one.place.names) for one in changes)
                    self.judge(once)
            finally:
                once.before.restore()
            refuse_clocks(self.reach, once.before, lambda: same_results(once, self.again()))
        return once

    def again(self) -> Once:
        again = self.once()
        again.before.restore()
        return again

    def judge(self, once: Once) -> None:
        """Refuse a forward whose next step would differ, unless buffers make it right."""
        made = carried.with_new_tensors(once, self.mode)
        try:
            again = self.once()
            same = carried.same_step(once, again, made)
        except CaptureError:
            raise
        except Exception as error:  # with the state of the first step, it does not run
            raise carried.refusal(once.changes[0], self.reach) from error
        wrong = carried.written_in_place(once) + carried.still_changing(once, again, self.reach)
        if not same or wrong:
            self.carried = carried.buffers_of(self.view, once.changes)
            self.carried_by_loss = self.loss.changed(once.changes)
            if not self.carried and not self.carried_by_loss:
                raise carried.refusal((wrong or once.changes)[0], self.reach)

    def once(self) -> Once:
        found = self.traced()
        if self.runs is self.view and knows_modules(self.modules, found.before):
            found.before.restore()
            self.runs = self.model
            return self.traced()
        return found

    def traced(self) -> Once:
        left: list[Snapshot] = []
        decisions = self.decisions()

        def forward(*given: list[Tensor]) -> list[Tensor]:
            found = self.forward(*given)
            left.append(Snapshot(self.reach))
            return [*found, *(place.value for place in left[-1].traced()), *decisions.marks]

        itself = self.runs is self.model
        own = model_copy.with_own_children(self.modules, self.view) if itself else nullcontext()
        with own, tracing(self.model, self.runs, self.mode, self.precision), decisions:
            before = Snapshot(self.reach)
            root = graph_of(forward, *self.fakes())
        kept, count = left[-1].traced(), len(decisions.marks)
        return Once(root, tuple(self.updated), before, left[-1], kept, count)

    def fakes(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Parameters, buffers and the batch, without values."""
        return (
            [fake(one, self.device, self.types[n]) for n, one in self.parameters.items()],
            [fake(tensor, self.device) for tensor in self.buffers.values()],
            [fake_input(spec, self.device) for spec in self.inputs.tensors],
        )

    def forward(
        self, weights: list[Tensor], states: list[Tensor], batch: list[Tensor]
    ) -> list[Tensor]:
        """The loss, and the new values of updated buffers."""
        before = dict(zip([*self.parameters, *self.buffers], [*weights, *states], strict=True))
        after = dict(before)  # torch puts new values here that the model assigns to attributes
        output = TYPES[self.precision.output] if self.precision else None
        listen(batch, self.asked)
        arguments = self.inputs.join(batch)
        loss_fn = self.loss.bound(after)
        with attributes_lent({**self.parameters, **self.buffers}, before, self.reach):
            found = model_output(self.runs, after, loss_fn, arguments, self.seen, output)
            _refuse_updated_inputs(batch)
            loss = scalar_loss(found, loss_fn, arguments)
        self.updated[:] = [
            name
            for name, tensor in before.items()
            if after[name] is not tensor or torch_private.was_updated(tensor)
        ]
        _refuse_updated_parameters([name for name in self.updated if name in self.parameters])
        _refuse_updated_inputs(batch, by_loss=loss_fn is not None)
        side_effects.refuse_shared_updates(before, after, self.updated, self.reach)
        side_effects.refuse_gradients(self.parameters, before, self.reach)
        for name in self.updated:
            if after[name].shape != before[name].shape:
                raise tensor_refusals.resized(name, self.reach, before[name], after[name])
        return [loss, *(after[name] for name in self.updated)]


def _refuse_updated_inputs(batch: list[Tensor], by_loss: bool = False) -> None:
    for index in (k for k, one in enumerate(batch) if torch_private.was_updated(one)):
        raise refusals.changed_input(index, by_loss)


def model_output(
    view: nn.Module,
    state: dict[str, Tensor],
    loss_fn: Loss | None,
    arguments: tuple[Any, ...],
    seen: list[Output],
    dtype: torch.dtype | None,
) -> Any:
    """`dtype`: the type of the output that loss_fn reads; None: as the model returns it."""
    given = arguments if loss_fn is None else arguments[:-1]
    own = {name: one for name, one in state.items() if not name.startswith(OWNER)}
    output = run_with(view, own, *split(given))
    state.update(own)  # with what the model has assigned
    output = output if dtype is None or loss_fn is None else in_type(output, dtype)
    leaves, spec = flatten(output)
    seen.append(([_described(leaf) for leaf in leaves], spec))
    return output


def scalar_loss(output: Any, loss_fn: Loss | None, arguments: tuple[Any, ...]) -> Tensor:
    """In float32 or float64, in which its gradient starts."""
    loss = own_loss(output) if loss_fn is None else called(loss_fn, output, arguments[-1])
    if loss_fn is joined:
        return loss
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise refusals.not_a_loss(loss, given=loss_fn is not None)
    scalar = loss.reshape(())
    return scalar if scalar.dtype == torch.float64 else scalar.float()


def _described(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _refuse_updated_parameters(names: list[str]) -> None:
    if names:
        raise refusals.updated_parameters(names)
