"""Find what a trace cannot see. It would be silently wrong later, so it is an error."""

import random
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, fx, nn

from piper.capture import refusals, tensor_refusals
from piper.capture.fx_nodes import line
from piper.capture.hidden_writes import memory_of
from piper.capture.python_state.code_search import line_that_changes
from piper.capture.python_state.reach import Reach
from piper.capture.refusals import refusal
from piper.capture.source_lines import current_line, is_another_thread
from piper.capture.torch_private import (
    FunctionalTensor,
    constant_of,
    has_global_hooks,
    has_hooks,
    is_compiled,
    is_distributed,
    is_lazy,
    is_transformed,
    is_unfinished,
    pytree,
    version_of,
    was_updated,
)
from piper.errors import CaptureError


def refuse_hooks(model: nn.Module) -> None:
    """Explicit backward graphs never call hooks on gradients."""
    if has_global_hooks():
        raise refusals.gradient_hook("torch.nn.modules.module")
    for name, parameter in model.named_parameters():
        if has_hooks(parameter):
            raise refusals.gradient_hook(f"parameter {name}")
    for name, module in model.named_modules():
        if has_hooks(module):
            raise refusals.gradient_hook(f"module {name or type(model).__name__}")


def refuse_untraceable(model: nn.Module) -> None:
    refuse_unready(model)
    refuse_hooks(model)
    refuse_shared_memory(model)


def refuse_unready(model: nn.Module) -> None:
    """What has no shape yet, is compiled, or is divided already, cannot be traced."""
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(parameter):
            raise refusals.lazy_parameter(name)
        if is_distributed(parameter):
            raise refusals.distributed_parameter(name)
    for name, module in model.named_modules():
        if is_compiled(module):
            raise refusals.compiled_module(name)
        if isinstance(module, torch.jit.ScriptModule):
            raise refusals.compiled_module(name, "torch.jit")


def refuse_shared_memory(model: nn.Module) -> None:
    """Two tensors that share memory are tied in eager training, and would not be here."""
    named = [*model.named_parameters(), *model.named_buffers()]
    spans = sorted(span(tensor) + (name,) for name, tensor in named if has_memory(tensor))
    for (memory, _, end, one), (other_memory, start, _, other) in zip(
        spans, spans[1:], strict=False
    ):
        if memory == other_memory and start < end:
            raise refusals.shared_memory(one, other)


def has_memory(tensor: Tensor) -> bool:
    return not tensor.is_meta and tensor.numel() > 0


def span(tensor: Tensor) -> tuple[int, int, int]:
    """The memory of a tensor: its address, and its first and last byte in it."""
    start = tensor.storage_offset()
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    end = start + 1 + sum((size - 1) * stride for size, stride in sizes)
    item = tensor.element_size()
    return tensor.untyped_storage().data_ptr(), start * item, end * item


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """A forward that writes to parameters and buffers by another path would do so only once."""
    versions = tensor_versions(model)
    yield
    for name, version in tensor_versions(model).items():
        if versions.get(name, version) != version:
            raise refusals.changed_tensor(name)


@contextmanager
def no_python_randomness() -> Iterator[None]:
    """Random numbers from Python or numpy would be the same in every step."""
    before = generator_states()
    with refusing_draws() as others:
        yield
    if not others and generator_states() != before:
        raise refusals.drawn_number()


@contextmanager
def refusing_draws() -> Iterator[set[int]]:
    """The functions of `random` and `numpy.random` are errors, which know their line.

    Gives other threads that draw, as loaders do: nobody knows then who changed the generators.
    """
    others = set[int]()
    modules = [random, *filter(None, [sys.modules.get("numpy.random")])]
    drawn = [(one, name, draw) for one in modules for name, draw in drawing_functions(one)]
    for module, name, draw in drawn:
        setattr(module, name, partial(refuse_draw, others, draw))
    try:
        yield others
    finally:
        for module, name, draw in drawn:
            setattr(module, name, draw)


def drawing_functions(module: Any) -> list[tuple[str, Any]]:
    """Methods of the module's own generator."""
    others = ("seed", "getstate", "setstate", "get_state", "set_state", "get_bit_generator")
    owner = type(getattr(module.random, "__self__", None))
    return [
        (name, found)
        for name, found in vars(module).items()
        if callable(found)
        and type(getattr(found, "__self__", None)) is owner
        and name not in others
    ]


def refuse_draw(others: set[int], draw: Any, *args: Any, **kwargs: Any) -> Any:
    """Only the model's draws count: torch draws names and seeds of its own."""
    if is_another_thread():
        others.add(get_ident())
        return draw(*args, **kwargs)
    where = current_line()
    if where and not is_torchs_own(sys._getframe(1).f_code.co_filename):
        raise refusals.drawn_number(where)
    return draw(*args, **kwargs)


def generator_states() -> list[Any]:
    numpy = sys.modules.get("numpy")
    rows = numpy.random.get_state() if numpy is not None else ()
    return [random.getstate(), *(getattr(row, "tobytes", lambda r=row: r)() for row in rows)]


def tensor_versions(model: nn.Module) -> dict[str, int]:
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: version_of(value) for name, value in named}


def refuse_registered_constants(root: fx.GraphModule, model: nn.Module) -> None:
    """A parameter or buffer that the model reaches by another path would never change."""
    registered = [*model.named_parameters(), *model.named_buffers()]
    memories = {span(tensor)[0]: name for name, tensor in registered if has_memory(tensor)}
    for node in root.graph.find_nodes(op="get_attr"):
        tensor = getattr(root, node.target)
        if is_unfinished(tensor):
            raise refusals.transformed(line(node))
        constant = constant_of(tensor) if isinstance(tensor, Tensor) else None
        if constant is not None and has_memory(constant) and span(constant)[0] in memories:
            raise tensor_refusals.registered_tensor(node, memories[span(constant)[0]])


def refuse_transforms(graph: fx.Graph) -> None:
    """Some versions of torch trace through a transform, and leave its wrappers in the graph."""
    for node in graph.nodes:
        leaves = pytree.tree_leaves(node.meta.get("val"))
        if any(isinstance(leaf, Tensor) and leaf.layout != torch.strided for leaf in leaves):
            raise refusals.sparse_tensor(line(node))
        if any(isinstance(leaf, Tensor) and is_transformed(leaf) for leaf in leaves):
            raise refusals.transformed(line(node))


def refuse_guessed_sizes(graph: fx.Graph) -> None:
    """Of a part whose size depends on a value, `x[:, :n]`, beside another tensor, torch assumes
    that both are equally large. If it has size 1, the backward would fail.
    """
    for node in graph.nodes:
        if torch.Tag.pointwise in getattr(node.target, "tags", ()):
            parts = [one for one in node.all_input_nodes if is_part_by_value(one)]
            found = [one.meta.get("val") for one in node.all_input_nodes]
            shapes = [one.shape[::-1] for one in found if isinstance(one, Tensor)]
            if parts and any(map(is_guessed, zip_longest(*shapes, fillvalue=1))):
                raise refusals.guessed_size(line(node))


def is_part_by_value(node: fx.Node) -> bool:
    by_value = any(isinstance(one, fx.Node) for one in node.args[1:])
    return by_value and node.target in (torch.ops.aten.slice.Tensor, torch.ops.aten.narrow.default)


def is_guessed(sizes: tuple[Any, ...]) -> bool:
    known = {size for size in sizes if isinstance(size, int)} - {1}
    return bool(known) and not all(isinstance(size, int) for size in sizes)


@cache
def is_torchs_own(file: str) -> bool:
    """Whether the caller is torch itself. Its decorators call on behalf of the user."""
    path = Path(file)
    return Path(torch.__file__).parent in path.parents and path.name != "_contextlib.py"


def refuse_shared_updates(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], updated: list[str], reach: Reach
) -> None:
    """Buffers that got the memory of something that is updated in place: they follow it."""
    in_place = [name for name in before if name not in updated or was_updated(before[name])]
    changing = {memory_of(before[n]): n for n in in_place if n in updated or is_trained(before[n])}
    for name in updated:
        kept = after[name]
        other = changing.get(memory_of(kept)) if isinstance(kept, FunctionalTensor) else None
        if other is not None and other != name:
            raise _shared(name, other, reach)


def is_trained(tensor: Tensor) -> bool:
    return tensor.requires_grad


def _shared(name: str, other: str, reach: Reach) -> CaptureError:
    return refusal(
        line_that_changes(name.rpartition(".")[2], reach.codes),
        f"the forward keeps {other} itself in {name}, not a copy: in plain PyTorch, {name} changes "
        f"whenever {other} is updated, and in a captured step it would not",
        "keep a copy: .detach().clone()",
    )


def refuse_gradients(names: Iterable[str], tensors: Mapping[str, Tensor], reach: Reach) -> None:
    for name in names:
        if has_gradient(tensors[name]):
            raise refusal(
                line_that_changes("grad", reach.codes) or "model",
                f"the forward sets the gradient of {name}, to which plain PyTorch would add that "
                "of the loss; a captured step would not",
                "add (parameter * gradient.detach()).sum() to the loss, which has this gradient",
            )


def has_gradient(tensor: Tensor) -> bool:
    with warnings.catch_warnings():  # in a trace, no parameter is a leaf
        warnings.simplefilter("ignore")
        return tensor.grad is not None
