"""How torch traces: the private APIs for it. The same in 2.11 and 2.13."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch._dynamo  # torch would load it at the first optimizer, or in the middle of a trace
from torch import Tensor, fx
from torch._C import DispatchKey
from torch._dispatch.python import enable_python_dispatcher as enable_python_dispatcher
from torch._library.autograd import Info
from torch._library.custom_ops import OPDEFS
from torch._ops import reset_cached_ops
from torch._subclasses.fake_tensor import UnsupportedOperatorException
from torch._subclasses.functional_tensor import (
    FunctionalTensorMode,
    dispatch_functionalize,
)
from torch.backends import opt_einsum
from torch.fx import _symbolic_trace, traceback
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import (
    PythonKeyTracer,
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
)

from piper.capture import autograd_refusals, complex_writes
from piper.capture.device_layouts import as_in_eager
from piper.capture.fx_nodes import values_described_once
from piper.capture.hidden_writes import Families
from piper.capture.source_lines import current_line
from piper.capture.torch_private import (
    IS_PARAMETER,
    LINE,
    VALUE_WANTED,
    FunctionalTensor,
    OpOverload,
    inside_trace,
    is_mutable,
    is_users_operator,
    is_view,
    mark_backward,
    named_arguments,
    pytree,
)

UNSUPPORTED = UnsupportedOperatorException  # what has no kernel for tensors without values
_COMPILER = torch._dynamo.__path__[0]
# torch has derivatives for these, and in traces takes a decomposition instead, which is slower and,
# of margins with several labels, wrong (at torch 2.13).
_OWN_DERIVATIVES = (
    torch.ops.aten.hardshrink.default,
    torch.ops.aten.softshrink.default,
    torch.ops.aten.multi_margin_loss.default,
    torch.ops.aten.multilabel_margin_loss_forward.default,
)
_GENERATED = "GeneratedBackwardFor_"  # before the name of an operator
_INFOS: WeakKeyDictionary[type, Info | None] = WeakKeyDictionary()  # of autograd's Functions
# Have a fused kernel, but tracing would decompose them: slower, and rounded differently.
_KEPT_WHOLE = (torch.ops.aten.silu_backward.default, torch.ops.aten._fused_rms_norm.default)


def trace_forward(function: Callable, *args: Any) -> fx.GraphModule:
    """The functional graph of `function`: no in-place operations, marks and lines on its nodes.

    Traced above autograd, so that each region can be differentiated separately later.
    """
    functional = dispatch_functionalize(
        function, FunctionalTensorMode(pre_dispatch=True, export=True)
    )
    traced = make_fx(
        functional,
        decomposition_table=complex_writes.INSTEAD,
        pre_dispatch=True,
        tracing_mode="real",
        _allow_non_fake_inputs=True,
        _disable_torch_fn_metadata_mode=True,
    )
    grad = torch.is_grad_enabled()
    with (
        _tracing(grad),
        _as_if_exporting(),
        _lines_recorded(),
        _products_in_any_order(),
        _hidden_writes_refused(),
    ):
        return traced(*args)


def node_of(tensor: Tensor) -> fx.Node | None:
    """What computes a tensor of a trace, with all that was written to it. None: not known."""
    mode = get_proxy_mode()
    if mode is None or not isinstance(tensor, FunctionalTensor):
        return None
    torch._sync(tensor)
    slot = get_proxy_slot(inside_trace(tensor), mode.tracer, None)
    return None if slot is None else slot.proxy.node


@contextmanager
def _hidden_writes_refused() -> Iterator[None]:
    original, families = FunctionalTensorMode.__torch_dispatch__, Families()

    def __torch_dispatch__(
        self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        written = written_by(func, args, kwargs or {}) if isinstance(func, OpOverload) else []
        if families.are_passed_by(written):
            raise autograd_refusals.hidden_write(current_line())
        since, call = families.count, partial(original, self, types=types)
        found = call(func=func, args=args, kwargs=kwargs)  # from here: its caller's line counts
        found = as_in_eager(func, args, kwargs or {}, found, call)
        if torch.is_grad_enabled():
            families.written(written)
        families.computed(func, args, found, since)
        return found

    FunctionalTensorMode.__torch_dispatch__ = __torch_dispatch__
    try:
        yield
    finally:
        FunctionalTensorMode.__torch_dispatch__ = original


@contextmanager
def _tracing(gradients: bool = True) -> Iterator[None]:
    # torch keeps a list of operators, and when a trace begins clears for each what it never keeps
    reset_cached_ops()
    grad = torch.set_grad_enabled(gradients)
    with (
        _use_lazy_graph_module(True),
        _modules_unpatched(),
        values_described_once(),
        traceback.preserve_node_meta(),
        grad,
    ):
        yield


@contextmanager
def _modules_unpatched() -> Iterator[None]:
    """fx would see each call of a module and each read of its attributes, and do nothing.

    To patch `nn.Module` takes time for every class of modules that the program has.
    """
    patcher = _symbolic_trace._Patcher
    original = patcher.patch_method
    skipped = iter(("__getattr__", "__call__"))  # the first ones; a model may trace by itself

    def patch_method(self: Any, cls: type, name: str, *args: Any, **kwargs: Any) -> None:
        if next(skipped, None) != name:
            original(self, cls, name, *args, **kwargs)

    patcher.patch_method = patch_method
    try:
        yield
    finally:
        patcher.patch_method = original


def trace_joint(function: Callable, args: Sequence[Any], backward: bool) -> fx.GraphModule:
    """(args, gradients of differentiable outputs) -> (outputs, gradients of args) as one graph."""
    from torch._functorch.aot_autograd import aot_export_joint_simple  # slow, and seldom needed

    with _tracing(), _kept_whole():
        return aot_export_joint_simple(function, tuple(args), trace_joint=backward)


class _Writes(Exception):
    """A function that is traced without a mode for it writes to a tensor."""


def trace_functional_joint(
    function: Callable, args: Sequence[Tensor], tangents: Sequence[Tensor]
) -> fx.GraphModule | None:
    """The same graph in half the time; None if a kernel that torch calls writes to a tensor.

    `tangents`: like the outputs that get a gradient, which are the ones with a history.
    """
    forward: list[fx.Node] = []

    def joint(primals: list[Tensor], tangents: list[Tensor]) -> list[Tensor | None]:
        outputs = function(*primals)
        forward.extend(get_proxy_mode().tracer.graph.nodes)
        if not all(map(_has_functional_form, filter(is_mutable, forward))):
            raise _Writes
        return [*outputs, *_gradients(outputs, primals, tangents)]

    traced = make_fx(joint, _disable_torch_fn_metadata_mode=True)
    with _tracing(bool(tangents)), _kept_whole(), enable_python_dispatcher():
        try:
            module = traced(list(args), list(tangents))
        except _Writes:
            return None
    _mark_backward(module.graph, forward, len(args))
    module.graph.eliminate_dead_code()
    writes = [node for node in module.graph.nodes if is_mutable(node)]
    if not all(map(_has_functional_form, writes)):
        return None
    for node in writes:
        node.target = _functional_form(node.target)
        node.meta["val"] = torch.empty_like(node.meta["val"])  # its own memory
    return module


def _has_functional_form(node: fx.Node) -> bool:
    """Whether it changes, by numbers, floats that a kernel has just made and nothing else reads.

    As in rms_norm, which is `x.pow(2).mean(-1).add_(eps)` and more.
    """
    written: Any = node.args[0]
    return (
        isinstance(written, fx.Node)
        and isinstance(written.target, OpOverload)
        and list(written.users) == [node]
        and written.meta["val"].is_floating_point()
        and node.all_input_nodes == [written]
        and not any(map(is_view, [written, *node.users]))
        and _functional_form(node.target) is not None
    )


def _functional_form(target: OpOverload) -> OpOverload | None:
    """`aten.add.Scalar` of `aten.add_.Scalar`."""
    name = target.overloadpacket.__name__
    packet = getattr(torch.ops.aten, name[:-1], None) if name.endswith("_") else None
    return getattr(packet, target._overloadname, None)


def _gradients(
    outputs: Sequence[Tensor], primals: Sequence[Tensor], tangents: Sequence[Tensor]
) -> list[Tensor | None]:
    wanted = [one for one in primals if one.requires_grad]
    if not tangents or not wanted:
        return [None for _ in primals]
    given = [one for one in outputs if one.requires_grad]
    found = iter(torch.autograd.grad(given, wanted, tangents, allow_unused=True))
    return [next(found) if one.requires_grad else None for one in primals]


def _mark_backward(graph: fx.Graph, forward: Sequence[fx.Node], arguments: int) -> None:
    own = {node for node in forward if node.op != "placeholder"}.union(forward[:arguments])
    for node in graph.nodes:
        if node not in own and node.op != "output":
            mark_backward(node)


@contextmanager
def _as_if_exporting() -> Iterator[None]:
    """Make the model think that it is being exported: libraries then avoid reading values.

    Unlike in an export, a model may write to the result of a dropout.
    """
    flags, freeze = torch.compiler, torch._freeze_functional_tensor
    before = flags._is_compiling_flag, flags._is_exporting_flag
    flags._is_compiling_flag = flags._is_exporting_flag = True
    torch._freeze_functional_tensor = lambda _: None
    try:
        yield
    finally:
        flags._is_compiling_flag, flags._is_exporting_flag = before
        torch._freeze_functional_tensor = freeze


@contextmanager
def _products_in_any_order() -> Iterator[None]:
    """opt_einsum, if installed, plans by sizes, which may be unknown: then, from left to right."""
    original = opt_einsum.get_opt_einsum
    opt_einsum.get_opt_einsum = lambda: SimpleNamespace(contract_path=contract_path)

    def contract_path(equation: str, *operands: Tensor, **options: Any) -> tuple[Any, ...]:
        try:
            return original().contract_path(equation, *operands, **options)
        except VALUE_WANTED:
            return [(0, 1)] * (len(operands) - 1), None

    try:
        yield
    finally:
        opt_einsum.get_opt_einsum = original


@contextmanager
def unchecked_distributions() -> Iterator[None]:
    """torch.distributions looks at the values of its parameters, which a trace does not have."""
    distribution = torch.distributions.Distribution
    before = distribution._validate_args
    distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        distribution.set_default_validate_args(before)


@contextmanager
def _lines_recorded() -> Iterator[None]:
    """torch can record stacks too, but slowly, as text, and only in functions named forward."""
    original = PythonKeyTracer.create_node

    def create_node(self: PythonKeyTracer, *args: Any, **kwargs: Any) -> fx.Node:
        node = original(self, *args, **kwargs)
        node.meta[LINE] = current_line()
        return node

    PythonKeyTracer.create_node = create_node
    try:
        yield
    finally:
        PythonKeyTracer.create_node = original


@contextmanager
def _kept_whole() -> Iterator[None]:
    for op in _KEPT_WHOLE:
        op.decompose = lambda *args, **kwargs: NotImplemented
    try:
        with own_derivatives_kept():
            yield
    finally:
        for op in _KEPT_WHOLE:
            del op.decompose


@contextmanager
def own_derivatives_kept() -> Iterator[None]:
    """Trace these operators as they are."""
    decompositions = [_swapped_kernel(op, None) for op in _OWN_DERIVATIVES]
    try:
        yield
    finally:
        for op, kernel in zip(_OWN_DERIVATIVES, decompositions, strict=True):
            _swapped_kernel(op, kernel)


def _swapped_kernel(op: OpOverload, kernel: Callable | None) -> Callable | None:
    """Give it another Python kernel for autograd, or none. Returns the one that it had."""
    found: Callable | None = op.py_kernels.pop(DispatchKey.Autograd, None)
    if kernel is not None:
        op.py_kernels[DispatchKey.Autograd] = kernel
    op._dispatch_cache.clear()
    return found


def mark_parameter(tensor: Tensor) -> None:
    """While a model is traced, tensors of the trace are its parameters: `isinstance` says so."""
    setattr(tensor, IS_PARAMETER, True)


def written_by(operator: OpOverload, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors among its arguments that it changes."""
    given = named_arguments(operator, args, kwargs)
    changed = [given.get(one.name) for one in operator._schema.arguments if one.is_write]
    return [one for one in pytree.tree_leaves(changed) if isinstance(one, Tensor)]


def registered_backwards() -> list[tuple[str, dict[str, Any]]]:
    """Of operators that the user's code made, with the fields that hold their functions.

    torch makes a Function for each, which knows them.
    """
    made = [(name, vars(found)) for name, found in OPDEFS.items() if is_users_operator(found)]
    for function in torch.autograd.Function.__subclasses__():
        if function not in _INFOS:
            generated = function.__name__.startswith(_GENERATED)
            _INFOS[function] = _info_of(function.backward) if generated else None
        info = _INFOS[function]
        if info is not None and not _is_ours_or_torchs(info._backward_fn):
            made.append((function.__name__.removeprefix(_GENERATED), vars(info)))
    return made


def _info_of(backward: Any) -> Info | None:
    """What a generated backward calls. A wrapper for lists of tensors may be around it."""
    held = [cell.cell_contents for cell in getattr(backward, "__closure__", None) or ()]
    inner = (_info_of(one) for one in held if isinstance(one, FunctionType))
    return next((one for one in (*held, *inner) if isinstance(one, Info)), None)


def _is_ours_or_torchs(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith(("torch.", "piper."))


def is_compilers_wrapper(now: Any, before: Any) -> bool:
    """Whether torch.compile has put it around a function of torch, which it still calls.

    It does so when it is first used, to count modules or to leave a function alone. What
    `torch.compile(function)` returns is not meant: a program puts that in place by itself.
    """
    if not isinstance(now, FunctionType) or not now.__code__.co_filename.startswith(_COMPILER):
        return False
    is_compiled = hasattr(now, "_torchdynamo_orig_callable")
    is_left_alone = hasattr(now, "_torchdynamo_disable")
    held = (cell.cell_contents for cell in now.__closure__ or ())
    return (is_left_alone or not is_compiled) and any(one is before for one in held)
