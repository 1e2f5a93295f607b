"""Private APIs of PyTorch that capture and the models use. The same in 2.11 and 2.13.

Those of tracing are in tracing_private.
"""

import logging
import operator
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._library.custom_ops import OPDEFS
from torch._ops import HigherOrderOperator, OperatorBase, OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.amp import autocast_mode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    PendingUnbackedSymbolNotFound,
    ShapeEnv,
)
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [  # re-exported
    "FunctionalTensor", "HigherOrderOperator", "OpOverload", "TorchDispatchMode", "is_lazy",
    "pytree",
]  # fmt: skip

IS_PARAMETER = "_is_param"  # the attribute by which `isinstance(x, nn.Parameter)` tells
LINE = "piper_line"  # the key of the user's line in a node's meta

ENTER_AUTOCAST = autocast_mode._enter_autocast
EXIT_AUTOCAST = autocast_mode._exit_autocast
SET_GRAD_ENABLED = torch._C._set_grad_enabled
MODE_SWITCHES = frozenset({ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD_ENABLED})

# Errors of torch if Python code asks for the value of a tensor without one.
VALUE_WANTED = (
    GuardOnDataDependentSymNode,
    DataDependentOutputException,
    DynamicOutputShapeException,
    PendingUnbackedSymbolNotFound,
)

outside_of_traces = _disable_current_modes
FOREIGN_WRITE = "mutating a non-functional tensor"  # in the text of a RuntimeError
TRACED = FakeTensor, FunctionalTensor  # classes of tensors without values
FROM_ANOTHER_TRACE = "FunctionalTensor on its own"  # in an error
HIDDEN_UPDATE = "does not support input mutations"  # in the text of a RuntimeError


def new_fake_mode() -> FakeTensorMode:
    """torch would read the lines of the whole stack for a message, which takes the most time."""
    original = traceback.extract_stack
    traceback.extract_stack = lambda f=None, limit=None: traceback.StackSummary()
    try:
        return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    finally:
        traceback.extract_stack = original


@contextmanager
def fake_errors_unlogged() -> Iterator[None]:
    """An operator that fails on tensors without values is not logged, for a run that may fail."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def was_updated(tensor: Tensor) -> bool:
    """Whether an argument of a function under `trace_forward` was written to."""
    return bool(torch._functionalize_has_data_mutation(tensor.elem))


def graph_module(root: nn.Module | dict[str, Any], graph: fx.Graph) -> fx.GraphModule:
    """A module whose Python code is written when it is first called: most graphs are only read."""
    return _LazyGraphModule(root, graph)


def function_of(module: fx.GraphModule) -> Callable[..., Any]:
    """What a module computes, as written Python code."""
    _LazyGraphModule.force_recompile(module)
    return module.forward


def is_backward(node: fx.Node) -> bool:
    """Whether autograd made this node of a joint graph."""
    return node.meta.get("partitioner_tag") == "is_backward" or bool(
        node.meta.get("autograd_backward")
    )


def mark_backward(node: fx.Node) -> None:
    node.meta["autograd_backward"] = True


def is_unfinished(value: object) -> bool:
    """Whether it was computed while tracing and left the trace, as forward-mode derivatives do."""
    return isinstance(value, FunctionalTensor)


def is_real(tensor: Tensor) -> bool:
    """Whether a tensor has values, or could have them: it is neither fake nor being traced."""
    return not isinstance(tensor, TRACED)


def has_values(tensor: Tensor) -> bool:
    """Whether its values can be read now: it is a plain tensor, also not one inside of a trace, or
    of `vmap` and its like."""
    plain = type(tensor) in (Tensor, nn.Parameter) and not torch._is_functional_tensor(tensor)
    plain = plain and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return plain and not tensor.is_meta and tensor.layout == torch.strided


def inside_trace(tensor: Tensor) -> Tensor:
    """The tensor behind the one that a model sees while it is traced. It has a history."""
    if isinstance(tensor, FunctionalTensor):
        return torch._from_functional_tensor(tensor.elem)
    return tensor


def constant_of(tensor: Tensor) -> Tensor | None:
    """The real tensor behind a fake one that was made from Python numbers, if any."""
    if isinstance(tensor, FakeTensor):
        return tensor.constant
    return tensor


def argument_types(operator: OpOverload) -> dict[str, str]:
    """The types of an operator's arguments, by name. If it takes any number of them, "str" too."""
    schema = operator._schema
    more = {"...": "str"} if "..." in str(schema) else {}
    return {**{one.name: str(one.type) for one in schema.arguments}, **more}


def result_names(operator: OpOverload) -> list[str]:
    """The names of an operator's results; those without one are empty."""
    return [one.name for one in operator._schema.returns]


def is_custom(operator: OpOverload) -> bool:
    """Whether the user's code made it with torch.library.custom_op."""
    return is_users_operator(OPDEFS.get(operator._schema.name))


def is_users_operator(found: Any) -> bool:
    return found is not None and not str(found._init_fn.__module__).startswith("torch.")


safe_softmax = torch.ops.aten._safe_softmax.default  # zeros for a row of -inf
below_autograd = torch._C._AutoDispatchBelowAutograd
scaled_mm = torch._scaled_mm  # of factors in float8
fast_grouped_mm: Any = getattr(torch, "_grouped_mm", None)  # None: not in this build of torch


def is_plain(graph: fx.Graph) -> bool:
    """Whether it calls only operators of torch and Piper, whose kernels never use autograd.

    Custom operators may use it, and so may the graphs inside higher-order operators.
    """
    return all(is_plain_call(node.target) for node in graph.nodes if node.op == "call_function")


def is_plain_call(target: Any) -> bool:
    if isinstance(target, OpOverload):
        return target.namespace in ("aten", "prims", "piper")
    return not isinstance(target, OperatorBase)


def unknown_size(mode: Any) -> Any:
    """A size that is known only when the graph runs. It may be 0."""
    with mode.shape_env.ignore_fresh_unbacked_symbols():
        size = mode.shape_env.create_unbacked_symint()
    torch._check(size >= 0)
    return size


@contextmanager
def fresh_symbols_ignored(mode: FakeTensorMode) -> Iterator[None]:
    """Allow new sizes that depend on data, without an error if they stay unused."""
    with mode, mode.shape_env.ignore_fresh_unbacked_symbols():
        yield


def is_view(node: fx.Node) -> bool:
    """Whether a node of a traced graph is a view of its argument, with no kernel or memory."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and is_view(node.args[0])
    if node.target is torch.ops.aten._unsafe_view.default:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(
        result.alias_info is not None and not result.alias_info.is_write
        for result in schema.returns
    )


def named_arguments(operator: OpOverload, args: Any, kwargs: Any) -> dict[str, Any]:
    """Those of a call, without defaults."""
    names = [one.name for one in operator._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def writes(operator: OpOverload) -> bool:
    """Whether it changes a tensor that it is given."""
    return bool(operator._schema.is_mutable)


def is_mutable(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def is_functional(graph: fx.Graph) -> bool:
    """Whether all it does is to compute results: it writes to no tensor and checks no values.

    Sizes are known, and operators are those of torch and Piper.
    """
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    return is_plain(graph) and all(map(_is_functional_call, nodes))


def _is_functional_call(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return node.target is operator.getitem or node.target in MODE_SWITCHES
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return bool(leaves) and not is_mutable(node) and all(map(_has_known_sizes, leaves))


def _has_known_sizes(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and all(type(size) is int for size in leaf.shape)


def argument_names(node: fx.Node) -> list[str]:
    """The names of an operator's arguments, in order."""
    return [argument.name for argument in node.target._schema.arguments]


def argument_defaults(node: fx.Node) -> dict[str, Any]:
    """The defaults of an operator's arguments, by name."""
    arguments = node.target._schema.arguments
    return {one.name: one.default_value for one in arguments if one.has_default_value()}


def schema_text(node: fx.Node) -> str:
    return str(getattr(node.target, "_schema", ""))


def own_tensors(module: nn.Module) -> tuple[Tensor | None, ...]:
    """A module's parameters and buffers, without those of its children."""
    return (*module._parameters.values(), *module._buffers.values())


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The buffers of a module, without those of its children. Changes are those of the module."""
    return module._buffers


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """The children of a module, by name. Changes of this dict are changes of the module."""
    return module._modules


GLOBAL_HOOKS = [  # those that a trace calls, too
    (vars(nn.modules.module), "_global_forward_hooks"),
    (vars(nn.modules.module), "_global_forward_pre_hooks"),
]


def has_global_hooks() -> bool:
    """Whether autograd would call hooks of the user's on the gradients of all modules."""
    known = nn.modules.module
    return bool(known._global_backward_hooks or known._global_backward_pre_hooks)


def has_hooks(owner: nn.Module | Tensor) -> bool:
    """Whether autograd would call the user's hooks on its gradients."""
    if isinstance(owner, nn.Module):
        kept = vars(
            owner
        )  # called in every step, and modules are slow to say what they do not have
        return bool(kept.get("_backward_hooks") or kept.get("_backward_pre_hooks"))
    return bool(owner._backward_hooks or getattr(owner, "_post_accumulate_grad_hooks", None))


def is_compiled(module: nn.Module) -> bool:
    """By the name of the class: to import it takes seconds."""
    named = any(kind.__name__ == "OptimizedModule" for kind in type(module).__mro__)
    return named or module._compiled_call_impl is not None


def is_generator_error(error: Exception) -> bool:
    """Whether torch 2.11 could not record a random operation that has its own generator."""
    return isinstance(error, NotImplementedError) and "torch._C.Generator" in str(error)


def is_distributed(tensor: Tensor) -> bool:
    """By the name of the class, as above."""
    return any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__)


def has_effects(graph: fx.Graph) -> bool:
    """Whether it checks values while it runs: then it has an argument that orders the checks."""
    return any(str(node.target).endswith("with_effects") for node in graph.nodes)


def version_of(tensor: Tensor) -> int:
    """How often a tensor has been written to."""
    return tensor._version


def memory_of(tensor: Tensor) -> tuple[int, int]:
    """Where its elements begin, and how many bytes later they end. No mode sees that it is asked.

    Without memory that this process can read: 0 bytes.
    """
    with torch._C.DisableTorchFunction():
        if not has_values(tensor) or not tensor.numel() or not tensor.untyped_storage().nbytes():
            return 0, 0
        last = sum((n - 1) * by for n, by in zip(tensor.shape, tensor.stride(), strict=True))
        readable = tensor.device.type == "cpu"
        return tensor.data_ptr(), (last + 1) * tensor.element_size() if readable else 0


def is_view_tensor(tensor: Tensor) -> bool:
    """Whether autograd sees a tensor as a view of another."""
    return tensor._is_view()


def is_transformed(tensor: Tensor) -> bool:
    """Whether a tensor belongs to a transform of torch.func: it has no memory of its own."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def storage_id(tensor: Tensor) -> int:
    """What identifies a tensor's memory, for fake tensors as well."""
    return tensor.untyped_storage()._cdata


@contextmanager
def checkpoints_as(mark: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """While this is open, functions in torch.utils.checkpoint run inside a `mark()`."""
    original = checkpoint._checkpoint_without_reentrant_generator

    def marked(*_: Any, **__: Any) -> Iterator[None]:
        with mark():
            yield

    checkpoint._checkpoint_without_reentrant_generator = marked
    try:
        yield
    finally:
        checkpoint._checkpoint_without_reentrant_generator = original


def as_plain_tensors() -> AbstractContextManager[None]:
    """Subclasses of tensors do not see what is called."""
    return torch._C.DisableTorchFunctionSubclass()


def is_symbolic(one: Any) -> bool:
    """Whether it is a number that follows from values, which a trace does not know."""
    return isinstance(one, torch.SymInt | torch.SymFloat)


def symbols_of(one: Any) -> Iterable[Any]:
    return one.node.expr.free_symbols if is_symbolic(one) else ()
