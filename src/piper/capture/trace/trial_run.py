"""Run a model and its loss once on numbers, as a plain loop would, and leave nothing behind."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from piper.capture.python_state.function_caches import forgetting
from piper.capture.python_state.snapshot import Snapshot
from piper.capture.source_lines import current_line
from piper.capture.torch_private import TorchDispatchMode, pytree
from piper.capture.trace.arguments.call_arguments import flatten, own_loss, split
from piper.capture.trace.loss_state import Loss, copied, reach_of_both
from piper.capture.trace.model_copy import throw_away

ONES = frozenset({"bernoulli", "bernoulli_"})
DRAWS = frozenset({
    "cauchy", "cauchy_", "exponential", "exponential_", "geometric", "geometric_", "log_normal",
    "log_normal_", "multinomial", "normal", "normal_", "poisson", "rand", "rand_like", "randint",
    "randint_like", "randn", "randn_like", "random", "random_", "randperm", "uniform", "uniform_",
    "_standard_gamma", "_sample_dirichlet", "binomial", *ONES,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Result:
    """What one call of a torch function gave, and the user's line that called it."""

    line: str
    tensor: Tensor


@dataclass
class Trial:
    """One run: the tensors that the model returned, its loss, and the coarsest type inside."""

    output: list[Tensor]
    loss: Tensor
    coarsest: torch.dtype
    calls: list[Result] = field(default_factory=list)


@dataclass
class TrialRuns:
    """Runs of one model with the same weights, each as if it were the first."""

    model: nn.Module
    loss_fn: Loss | None
    initial: Callable[[str], Tensor]  # the first value of a parameter or buffer, by name

    @cached_property
    def state(self) -> dict[str, Tensor]:
        buffers = {name: self.initial(name).cpu() for name, _ in self.model.named_buffers()}
        parameters = {n: _moved(self.initial(n).cpu()) for n, _ in self.model.named_parameters()}
        return parameters | buffers

    def run(self, arguments: tuple[Any, ...], dtype: torch.dtype | None, calls: bool) -> Trial:
        """`dtype`: what floating-point numbers are converted to. `calls`: keep what calls give."""
        view, loss_fn = throw_away(self.model), copied(self.loss_fn, self.model)
        if isinstance(loss_fn, nn.Module) and loss_fn is not self.loss_fn and dtype is not None:
            loss_fn = loss_fn.to(dtype)
        state = {name: in_type(one.clone(), dtype) for name, one in self.state.items()}
        with _alone(view, loss_fn, dtype), SameDraws() as types, Calls(calls) as seen:
            return _called(view, loss_fn, state, arguments, types, seen)


def _called(
    view: nn.Module,
    loss_fn: Loss | None,
    state: Mapping[str, Tensor],
    arguments: tuple[Any, ...],
    types: "SameDraws",
    seen: "Calls",
) -> Trial:
    given = arguments if loss_fn is None else arguments[:-1]
    output = torch.func.functional_call(view, dict(state), *split(given))
    found = own_loss(output) if loss_fn is None else loss_fn(output, arguments[-1])
    seen.kept = False
    leaves = [leaf.detach() for leaf in flatten(output)[0] if isinstance(leaf, Tensor)]
    return Trial(leaves, found.detach(), types.coarsest, seen.results)


def _moved(tensor: Tensor) -> Tensor:
    """Weights a little beside their first values: a layer that starts at zero hides its inputs."""
    if not tensor.is_floating_point():
        return tensor
    draw = torch.Generator().manual_seed(tensor.numel())
    noise = torch.randn(tensor.shape, generator=draw).to(tensor.dtype)
    return tensor * (1 + 0.03 * noise) + 0.01 * noise


def in_type(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


@contextmanager
def _alone(view: nn.Module, loss_fn: Loss | None, dtype: torch.dtype | None) -> Iterator[None]:
    """Python state, function caches, random numbers and the default type are as before, afterwards.

    Constants of the model are of this type too, so that they do not limit its digits.
    """
    before = Snapshot(reach_of_both(view, loss_fn))
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(dtype or torch.get_default_dtype())
        stack.enter_context(forgetting())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.callback(before.restore)
        yield


class SameDraws(TorchDispatchMode):
    """Random numbers do not depend on how many there are. Permutations are never the identity.

    It also remembers the coarsest floating-point type of any result.
    """

    def __init__(self) -> None:
        super().__init__()
        self.coarsest = torch.float64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, found = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(found):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.coarsest = max(self.coarsest, leaf.dtype, key=lambda t: torch.finfo(t).eps)
        if name == "randperm":
            return found.copy_(torch.arange(len(found) - 1, -1, -1))
        if name in DRAWS:
            return found.fill_(1 if name in ONES else 0.5 if found.is_floating_point() else 0)
        return found


class Calls(torch.overrides.TorchFunctionMode):
    """Sees what every call gives, if `kept`. Batch norm takes its running statistics."""

    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.kept, self.results = kept, list[Result]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.batch_norm:
            return _batch_norm(*args, **(kwargs or {}))
        found = func(*args, **(kwargs or {}))
        if self.kept:
            line, leaves = current_line(), pytree.tree_leaves(found)
            tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
            self.results += [Result(line, one.detach().clone()) for one in tensors]
        return found


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
