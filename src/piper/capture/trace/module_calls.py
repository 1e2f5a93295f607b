"""Run a model once on tensors without values, and list the calls of its modules."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from piper.capture import tracing_private
from piper.capture.marks.annotate import recorded_names, recording
from piper.capture.python_state.function_caches import forgetting
from piper.capture.torch_private import fake_errors_unlogged, new_fake_mode, pytree
from piper.capture.trace.arguments.fakes import fake
from piper.capture.trace.decisions.random_decisions import RandomDecisions
from piper.capture.trace.model_copy import throw_away
from piper.capture.trace.replaced.calls import ReplacedCalls
from piper.capture.trace.replaced.numbers import numbers_as_text, numbers_of_python
from piper.capture.trace.replaced.transformer_private import masks_as_given


@dataclass
class Call:
    """One call of a module, and the calls inside it. Tensors are named by number."""

    path: str
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    inside: list["Call"] = field(default_factory=list)

    def count(self) -> int:
        return 1 + sum(call.count() for call in self.inside)


@dataclass
class Run:
    """A model's run: the call of the model itself, and the names that it annotated."""

    root: Call
    annotated: frozenset[str]


def run_once(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Run:
    """The calls of a model's modules, in order of execution. The model stays as it is.

    Only the order matters, so a model that does not run in its own types is tried in bfloat16:
    some operators for experts have no other type on tensors without values.
    """
    try:
        with fake_errors_unlogged():
            return _run(model, args, kwargs)
    except Exception as error:
        with suppress(Exception), fake_errors_unlogged():
            return _run(model, args, kwargs, torch.bfloat16)
        raise error


def _run(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dtype: torch.dtype | None = None,
) -> Run:
    """Random decisions are tried both ways: one of them runs all layers."""
    decisions = RandomDecisions()
    found = _decided(model, args, kwargs, dtype, decisions)
    if not decisions.marks:
        return found
    other = _decided(model, args, kwargs, dtype, RandomDecisions(default=True))
    return max(found, other, key=lambda run: run.root.count())


def _decided(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dtype: torch.dtype | None,
    decisions: RandomDecisions,
) -> Run:
    view = throw_away(model).eval()  # layers that training drops at random run, too
    with ExitStack() as stack:
        root = stack.enter_context(_recorded(view))
        stack.enter_context(recording())
        stack.enter_context(new_fake_mode())
        stack.enter_context(forgetting())
        stack.enter_context(torch.no_grad())
        stack.enter_context(masks_as_given())
        stack.enter_context(tracing_private.unchecked_distributions())
        stack.enter_context(numbers_as_text())
        stack.enter_context(numbers_of_python())
        stack.enter_context(ReplacedCalls())
        stack.enter_context(decisions)
        named = (*model.named_parameters(), *model.named_buffers())
        state = {name: _without_values(tensor, dtype) for name, tensor in named}
        given = pytree.tree_map(lambda leaf: _without_values(leaf, dtype), (args, dict(kwargs)))
        torch.func.functional_call(view, state, *given)
        return Run(root.inside[0], recorded_names())


def _without_values(leaf: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    empty = fake(leaf, "cpu")
    return empty.to(dtype) if dtype and leaf.is_floating_point() else empty


@contextmanager
def _recorded(view: nn.Module) -> Iterator[Call]:
    """While this is open, every call of a module is noted under the call around it."""
    root = Call("")
    open_calls, numbers = [root], _Numbers()
    hooks: list[Any] = []
    for path, module in view.named_modules():
        enter, leave = _noting(path, open_calls, numbers)
        hooks.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
        hooks.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield root
    finally:
        for hook in hooks:
            hook.remove()


def _noting(
    path: str, open_calls: list[Call], numbers: "_Numbers"
) -> tuple[Callable[..., None], Callable[..., None]]:
    def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
        call = Call(path, numbers.of((args, kwargs)))
        open_calls[-1].inside.append(call)
        open_calls.append(call)

    def leave(_: nn.Module, __: Any, output: Any) -> None:
        open_calls.pop().writes = numbers.of(output)

    return enter, leave


class _Numbers:
    """Numbers of tensors. It keeps them alive, so that no id is used twice."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def of(self, values: Any) -> frozenset[int]:
        tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
        self.kept += tensors
        return frozenset(map(id, tensors))
