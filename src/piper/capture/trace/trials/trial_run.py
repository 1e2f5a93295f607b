"""Run a model and its loss once on numbers, as a plain loop would, and leave nothing behind."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from piper.capture.autograd_private import apply_function, functions_as
from piper.capture.kernels.ctc import refuse_no_class
from piper.capture.python_state.loss_state import Loss
from piper.capture.source_lines import current_line
from piper.capture.torch_private import (
    HigherOrderOperator,
    TorchDispatchMode,
    is_custom,
    named_arguments,
    pytree,
    storage_id,
    writes,
)
from piper.capture.trace.arguments.call_arguments import flatten, own_loss, split
from piper.capture.trace.model_copy import run_with
from piper.capture.trace.trials.comparisons import Comparisons
from piper.capture.trace.trials.reduced_rows import CallSizes, OtherValues, tensors
from piper.capture.trace.trials.trial_copy import TrialCopy
from piper.capture.trace.trials.trial_draws import DRAWS, Drawn, Numbers, SameNumbers
from piper.capture.trace.trials.windows import Window

ORDERS = frozenset({"sort", "topk"})
aten = torch.ops.aten
COARSER = (torch.float32, torch.float16, torch.bfloat16)
TILE = 65_521  # random numbers that are repeated: a prime, so that no two rows get the same


@dataclass(frozen=True, slots=True)
class Result:
    """What one call of a torch function gave, and the user's line that called it."""

    line: str
    tensor: Tensor
    inputs: tuple[int, ...] = ()  # the results that it was computed from, by position


@dataclass
class Trial:
    """One run: the tensors that the model returned, its loss, and the coarsest type inside."""

    output: list[Tensor]
    loss: Tensor
    coarsest: torch.dtype
    calls: list[Result] = field(default_factory=list)
    own_derivatives: list[str] = field(default_factory=list)  # lines with those of the user's
    rounded: dict[torch.dtype, str] = field(default_factory=dict)  # coarse types, and first lines
    graph: tuple[Tensor, list[Tensor]] | None = None  # the loss and what it is derived by, if asked
    sizes: list[CallSizes] = field(default_factory=list)  # of all calls
    before_loss: int = 0  # so many calls of the model, before those of its loss function
    made_by: list[int] = field(default_factory=list)  # the last call for each tensor of the output
    drawn: list[Drawn] = field(default_factory=list)  # random numbers, in order
    left: dict[str, Tensor] = field(default_factory=dict)  # parameters and buffers, after it


@dataclass
class TrialRuns:
    """Runs of one model with the same weights, each as if it were the first."""

    model: nn.Module
    loss_fn: Loss | None
    initial: Callable[[str], Tensor]  # the first value of a parameter or buffer, by name
    is_large: bool = False  # matrices have other values, which take less memory
    converted: dict[torch.dtype | None, dict[str, Tensor]] = field(default_factory=dict)
    copies: dict[torch.dtype | None, TrialCopy] = field(default_factory=dict)
    comparisons: Comparisons = field(default_factory=Comparisons)

    @cached_property
    def windows(self) -> dict[str, Window]:
        named = self.model.named_parameters() if self.is_large else ()
        floats = ((name, one) for name, one in named if one.is_floating_point())
        found = (Window(name, tuple(one.shape), one.dtype) for name, one in floats)
        return {one.name: one for one in found if one.saves}

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        names = [n for n, _ in self.model.named_parameters() if n not in self.windows]
        return {name: _moved(self.initial(name).cpu()) for name in names}

    @cached_property
    def buffers(self) -> dict[str, Tensor]:
        return {name: self.initial(name).cpu() for name, _ in self.model.named_buffers()}

    def state(self, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """A forward may change its buffers. If it changed its parameters, capture said so."""
        if dtype not in self.converted:
            windows = {name: one.values(dtype) for name, one in self.windows.items()}
            own = {name: in_type(one, dtype) for name, one in self.parameters.items()}
            self.converted = {dtype: windows | own}
        copies = {name: in_type(one, dtype, copy=True) for name, one in self.buffers.items()}
        return self.converted[dtype] | copies

    @property
    def trained(self) -> list[str]:
        """Those by which a loss is derived: gradients of large matrices take much memory."""
        named = self.model.named_parameters()
        return [n for n, one in named if one.requires_grad and n not in self.windows]

    def run(
        self,
        arguments: tuple[Any, ...],
        dtype: torch.dtype | None,
        calls: bool,
        derived: bool = False,
        sizes: bool = False,
        others: OtherValues | None = None,
        numbers: Numbers | None = None,
    ) -> Trial:
        """`dtype`: what floating-point numbers are converted to. `calls`: keep what calls give.

        `derived`: such that `gradients` can follow. `sizes`: keep those of calls. `others`: values
        to put in place of those that it computes. `numbers`: random ones; None: all are the same.
        """
        state, leaves = self.state(dtype), dict[str, Tensor]()
        if derived:
            leaves = {name: state[name].detach().requires_grad_() for name in self.trained}
        with torch.set_grad_enabled(derived or torch.is_grad_enabled()):
            found = self._run(arguments, dtype, calls, state | leaves, sizes, others, numbers)
        graph = (found.loss, list(leaves.values())) if leaves else None
        return replace(found, loss=found.loss.detach(), graph=graph)

    def _run(
        self,
        arguments: tuple[Any, ...],
        dtype: torch.dtype | None,
        calls: bool,
        state: dict[str, Tensor],
        sizes: bool,
        others: OtherValues | None,
        numbers: Numbers | None,
    ) -> Trial:
        copy = self.copies.pop(dtype, None) or TrialCopy.of(self.model, self.loss_fn, dtype)
        types, seen = SameDraws(dtype, sizes, numbers or SameNumbers()), Calls(calls)
        types.comparisons = self.comparisons
        # Dynamo, which `torch.cond` calls, would remember that it may not run below a mode.
        eager = torch.compiler.set_stance("force_eager")
        with eager, copy.alone(), types, others or nullcontext(), seen, functions_as(types.apply):
            found = _called(copy.view, copy.loss_fn, state, arguments, types, seen)
        if copy.is_as_before():
            self.copies[dtype] = copy
        return found


def gradients(trial: Trial, factor: float) -> Tensor:
    """The derivative of so much of the loss by all parameters, as one vector."""
    assert trial.graph is not None
    loss, leaves = trial.graph
    with torch.enable_grad():
        given = factor * loss.sum(), leaves
    grads = torch.autograd.grad(*given, allow_unused=True, materialize_grads=True)
    return torch.cat([real_numbers(grad).flatten() for grad in grads])


def real_numbers(tensor: Tensor) -> Tensor:
    """A complex one as pairs."""
    found = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return found.double()


def _called(
    view: nn.Module,
    loss_fn: Loss | None,
    state: Mapping[str, Tensor],
    arguments: tuple[Any, ...],
    types: "SameDraws",
    seen: "Calls",
) -> Trial:
    given, left = arguments if loss_fn is None else arguments[:-1], dict(state)
    output = run_with(view, left, *split(given))
    before_loss = len(types.sizes)
    found = own_loss(output) if loss_fn is None else loss_fn(output, arguments[-1])
    seen.kept = False
    leaves = [leaf.detach() for leaf in flatten(output)[0] if isinstance(leaf, Tensor)]
    made_by = [types.made_by.get(storage_id(leaf), -1) for leaf in leaves]
    return Trial(
        leaves, found, types.coarsest, seen.results, types.own_derivatives, types.rounded,
        sizes=types.sizes, before_loss=before_loss, made_by=made_by, drawn=types.drawn, left=left,
    )  # fmt: skip


def _moved(tensor: Tensor) -> Tensor:
    """Weights a little beside their first values: a layer that starts at zero hides its inputs."""
    if not tensor.is_floating_point():
        return tensor
    flat, draw = tensor.flatten(), torch.Generator().manual_seed(tensor.numel())
    noise = torch.randn(min(len(flat), TILE), generator=draw).to(tensor.dtype)
    moved = [torch.addcmul(one, 0.03 * one + 0.01, noise[: len(one)]) for one in flat.split(TILE)]
    return torch.cat(moved).view(tensor.shape)


def in_type(tensor: Tensor, dtype: torch.dtype | None, copy: bool = False) -> Tensor:
    stays = dtype is None or not tensor.is_floating_point()
    return tensor.to(tensor.dtype if stays else dtype, copy=copy)


def coarser(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Of two types of results: the one with fewer digits, if both have some."""
    fewer = other.is_floating_point and torch.finfo(other).eps > torch.finfo(one).eps
    return other if fewer else one


class SameDraws(TorchDispatchMode):
    """Random numbers are those that a trial wants. Permutations are never the identity.

    It also remembers the coarsest floating-point type of any result, and derivatives by the user.
    With a `dtype`, conversions to coarser ones convert to it. `sizes`: keep those of all calls.
    """

    supports_higher_order_operators = True

    def __init__(self, dtype: torch.dtype | None, sizes: bool, numbers: Numbers) -> None:
        super().__init__()
        self.numbers, self.drawn = numbers, list[Drawn]()
        self.dtype, self.coarsest, self.own_derivatives = dtype, torch.float64, list[str]()
        self.rounded = dict[torch.dtype, str]()
        self.kept, self.sizes = sizes, list[CallSizes]()
        self.made_by = dict[int, int]()  # the call that made a storage
        self.comparisons = Comparisons()

    def apply(self, function: type, *args: Any) -> Any:
        if function is CheckpointFunction:
            run, _, *rest = args
            return run(*rest)
        self.own_derivatives.append(current_line())
        return apply_function(function, *args)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if isinstance(func, HigherOrderOperator):
            return func(*args, **kwargs)
        if func is aten._to_copy.default and kwargs.get("dtype") in COARSER:
            if (coarse := kwargs["dtype"]) not in self.rounded:
                self.rounded[coarse] = current_line()
            kwargs["dtype"] = self.dtype or coarse  # rounding would hide what differs
        name, found = func.overloadpacket.__name__, func(*args, **kwargs)
        self.comparisons.see(func, args, kwargs)
        if self.kept:
            self._write_down(func, (args, kwargs), found)
        if is_custom(func):
            self.own_derivatives.append(current_line())
        for leaf in tensors(found):
            if leaf.dtype is not self.coarsest:
                self.coarsest = coarser(self.coarsest, leaf.dtype)
        if name in ORDERS and is_tied(args[0]):
            return found[0], turned(func, args, kwargs, found[1])
        if name == "randperm":
            return found.copy_(torch.arange(len(found) - 1, -1, -1))
        if name == "rrelu_with_noise":
            return self._leaky(*args[:4])
        return self._drawn(func, args, kwargs, found) if name in DRAWS else found

    def _drawn(self, func: Any, args: Any, kwargs: Any, found: Tensor) -> Tensor:
        self.drawn.append(Drawn.of(func, found))
        return self.numbers.drawn(len(self.drawn) - 1, func, args, kwargs, found)

    def _leaky(self, x: Tensor, noise: Tensor, lower: float, upper: float) -> Tensor:
        """Its derivative reads the noise."""
        slope = self._drawn(aten.uniform_.default, (noise, lower, upper), {}, noise)
        return x * slope.masked_fill_(x > 0, 1.0)

    def _write_down(self, func: Any, given: Any, found: Any) -> None:
        """The sizes of all calls, and which of them made a tensor: views do not make one."""
        before = set() if writes(func) else {storage_id(one) for one in tensors(given)}
        new = {storage_id(one) for one in tensors(found)} - before
        self.made_by.update(dict.fromkeys(new, len(self.sizes)))
        self.sizes.append(CallSizes.of(func, given, found))


@contextmanager
def computing_in(dtype: torch.dtype | None) -> Iterator[None]:
    """Compute as a trial does: numbers and conversions are of this type, if there is one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        with SameDraws(dtype, False, SameNumbers()):
            yield
    finally:
        torch.set_default_dtype(before)


def is_tied(values: Tensor) -> bool:
    """Random numbers, which are all the same here: any order of them is as good as another."""
    same = values.is_floating_point() and values.dim() > 0 and values.numel() > 1
    return same and bool((values == values.flatten()[0]).all())


def turned(operator: Any, args: Any, kwargs: Any, order: Tensor) -> Tensor:
    """The last ones first, as for permutations."""
    dim = named_arguments(operator, args, kwargs).get("dim", -1)
    last, count = args[0].shape[dim] - 1, order.shape[dim]
    found = torch.arange(last, last - count, -1)
    return found.view(-1, *[1] * ((-1 - dim) % order.dim())).expand_as(order).clone()


class Calls(torch.overrides.TorchFunctionMode):
    """Sees what every call gives, if `kept`. Batch norm takes its running statistics."""

    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.kept, self.results = kept, list[Result]()
        self.places = dict[int, int]()  # of the tensor with this id among the results
        self.alive = list[Tensor]()  # ids are used again for others

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.batch_norm:
            return _batch_norm(*args, **(kwargs or {}))
        if func in (torch.nn.functional.ctc_loss, torch.ctc_loss):
            _refuse_no_class(*args, **(kwargs or {}))
        found = func(*args, **(kwargs or {}))
        if self.kept:
            given = (self.places.get(id(leaf)) for leaf in pytree.tree_leaves((args, kwargs)))
            self._keep(found, tuple(place for place in given if place is not None))
        return found

    def _keep(self, found: Any, inputs: tuple[int, ...]) -> None:
        line = current_line()
        for one in pytree.tree_leaves(found):
            if isinstance(one, Tensor):
                self.places[id(one)] = len(self.results)
                self.alive.append(one)
                self.results.append(Result(line, one.detach().clone(), inputs))


def _batch_norm(
    x: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Everybody knows that rows meet in it."""
    if training or mean is None or var is None:
        mean, var = x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
    return torch.nn.functional.batch_norm(x, mean, var, weight, bias, False, momentum, eps)


def _refuse_no_class(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, *_: Any, **__: Any
) -> None:
    """A trial has labels that other losses leave out, or refuse by themselves."""
    refuse_no_class(targets, torch.as_tensor(target_lengths), log_probs.shape[-1])
