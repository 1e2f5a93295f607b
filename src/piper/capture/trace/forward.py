"""Trace the whole forward pass, up to the loss, into one graph. Weights need no memory."""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from piper.capture import torch_private
from piper.capture.precision import TYPES, Precision
from piper.capture.regions.annotate import recording
from piper.capture.regions.tags import tagging
from piper.capture.trace import functions, refusals, side_effects
from piper.capture.trace.call_arguments import own_loss, split
from piper.capture.trace.conversions import converting, in_type, parameter_types
from piper.capture.trace.inputs import Inputs, inputs_of
from piper.capture.trace.outputs import Output, joined
from piper.capture.trace.source_lines import is_transformed, line_of
from piper.errors import CaptureError
from piper.ir.placements import Placement
from piper.ir.values import TensorSpec

Loss = Callable[[Any, Any], Tensor]


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
    random: fx.Node | None = None  # the placeholder of the random seed, behind the batch
    rank: fx.Node | None = None  # the placeholder of the rank in a divided graph, the last one
    placements: dict[str, Placement] = field(default_factory=dict)  # of parameters that are divided
    whole: dict[str, TensorSpec] = field(default_factory=dict)  # of parameters that are cut

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
) -> Traced:
    side_effects.refuse_hooks(model)
    side_effects.refuse_shared_memory(model)
    inputs = inputs_of(example)
    mode = torch_private.new_fake_mode()
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    types, view = parameter_types(model, precision), throw_away(model)
    output = TYPES[precision.output] if precision else None
    updated, seen = list[str](), list[Output]()

    def forward(weights: list[Tensor], states: list[Tensor], batch: list[Tensor]) -> list[Tensor]:
        before = dict(zip([*parameters, *buffers], [*weights, *states], strict=True))
        after = dict(before)  # torch puts new values here that the model assigns to attributes
        loss = _loss(view, after, loss_fn, inputs.join(batch), seen, output)
        updated[:] = [
            name
            for name, tensor in before.items()
            if after[name] is not tensor or torch_private.was_updated(tensor)
        ]
        _refuse_updated_parameters([name for name in updated if name in parameters])
        _refuse_updated_inputs(batch)
        return [loss, *(after[name] for name in updated)]

    with _tracing(model, view, mode, precision):
        root = _trace(
            forward,
            [fake(tensor, device, types[name]) for name, tensor in parameters.items()],
            [fake(tensor, device) for tensor in buffers.values()],
            [_fake_input(spec, device) for spec in inputs.tensors],
        )
    side_effects.refuse_registered_constants(root, model)
    return Traced(
        root=root,
        mode=mode,
        parameters={name: tensor.requires_grad for name, tensor in parameters.items()},
        buffers=tuple(buffers),
        updated=tuple(updated),
        aliases=_aliases(model, {**parameters, **buffers}),
        inputs=inputs,
        device=device,
        output=seen[-1],
        precision=precision,
    )


@contextmanager
def _tracing(
    model: nn.Module, view: nn.Module, mode: Any, precision: Precision | None
) -> Iterator[None]:
    """While this is open, the view can be traced, and the model must not change."""
    with ExitStack() as stack:
        stack.enter_context(functions.intercepted())
        stack.enter_context(side_effects.unchanged(model, view))
        stack.enter_context(side_effects.no_python_randomness())
        stack.enter_context(side_effects.no_inference_mode())
        stack.enter_context(recording())
        stack.enter_context(converting(view, precision))  # first, to end inside the tags
        stack.enter_context(tagging(view))
        stack.enter_context(mode)
        stack.enter_context(side_effects.DataIsDetached())
        stack.enter_context(side_effects.DropoutIsCopied())
        yield


def _refuse_updated_inputs(batch: list[Tensor]) -> None:
    for index, tensor in enumerate(batch):
        if torch_private.was_updated(tensor):
            raise refusals.changed_input(index)


def _trace(forward: Callable, *args: list[Tensor]) -> fx.GraphModule:
    try:
        root = torch_private.trace_forward(forward, *args)
        side_effects.refuse_transforms(root.graph)
        return root
    except CaptureError:
        raise
    except torch_private.VALUE_WANTED as error:
        raise refusals.value_wanted(error) from error
    except Exception as error:
        if is_transformed(error.__traceback__):
            raise refusals.transformed(line_of(error.__traceback__)) from error
        at = line_of(error.__traceback__)
        error.add_note(f"{at}: raised while Piper traced the model on tensors without values")
        raise


def _loss(
    view: nn.Module,
    state: dict[str, Tensor],
    loss_fn: Loss | None,
    arguments: tuple[Any, ...],
    seen: list[Output],
    dtype: torch.dtype | None,
) -> Tensor:
    """The loss as a scalar of float32 or float64, in which its gradient starts.

    `dtype`: the type of the output that loss_fn reads; None: as the model returns it.
    """
    given = arguments if loss_fn is None else arguments[:-1]
    output = torch.func.functional_call(view, state, *split(given))
    output = output if dtype is None or loss_fn is None else in_type(output, dtype)
    leaves, spec = torch_private.pytree.tree_flatten(output)
    seen.append(([_described(leaf) for leaf in leaves], spec))
    loss = own_loss(output) if loss_fn is None else loss_fn(output, arguments[-1])
    if loss_fn is joined:
        return loss
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise refusals.not_a_loss(loss, given=loss_fn is not None)
    scalar = loss.reshape(())
    return scalar if scalar.dtype == torch.float64 else scalar.float()


def _described(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf


def throw_away(model: nn.Module) -> nn.Module:
    """A copy of all modules that shares all tensors. What a trace caches dies with it."""
    shared = {
        id(value): value
        for module in model.modules()
        for value in (*torch_private.own_tensors(module), *vars(module).values())
        if isinstance(value, Tensor)
    }
    try:
        return copy.deepcopy(model, shared)
    except Exception as error:
        raise refusals.cannot_copy(model, error) from error


def fake(tensor: Tensor, device: str, dtype: torch.dtype | None = None) -> Tensor:
    """Contiguous, even if the original is not: kernels get their parameters contiguous."""
    fake = torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=device)
    return fake.requires_grad_(tensor.requires_grad)


def _fake_input(spec: TensorSpec, device: str) -> Tensor:
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)


def _aliases(model: nn.Module, first: dict[str, Tensor]) -> dict[str, str]:
    names = {id(tensor): name for name, tensor in first.items()}
    every = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {name: names[id(tensor)] for name, tensor in every if name not in first}


def _refuse_updated_parameters(names: list[str]) -> None:
    if names:
        raise refusals.updated_parameters(names)
