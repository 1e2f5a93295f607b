"""The arguments of one microbatch: tensors, and constants of the program."""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from piper.capture.torch_private import pytree
from piper.capture.trace.arguments.call_arguments import flatten
from piper.errors import CaptureError, InputError
from piper.ir.values import TensorSpec
from piper.names import with_article

CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum)


@dataclass(frozen=True)
class Inputs:
    """What an example shows: the structure of the arguments, their types, their constants."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]  # a TensorSpec in place of each tensor
    whole: frozenset[int] = frozenset()  # tensors that are the same for all microbatches

    @property
    def rows(self) -> int | None:
        """Samples of the microbatch. None: no tensor has rows."""
        known = enumerate(self.tensors)
        return next((s.shape[0] for k, s in known if s.shape and k not in self.whole), None)

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorSpec))

    @property
    def constants(self) -> dict[int, Any]:
        """Python values baked into the graphs, by position among all leaves."""
        return {
            position: leaf
            for position, leaf in enumerate(self.leaves)
            if not isinstance(leaf, TensorSpec)
        }

    def with_rows(self, rows: int) -> "Inputs":
        """The same for a microbatch of so many samples."""
        cut = iter(k not in self.whole for k in range(len(self.tensors)))
        leaves = (
            replace(leaf, shape=(rows, *leaf.shape[1:]))
            if isinstance(leaf, TensorSpec) and next(cut) and leaf.shape
            else leaf
            for leaf in self.leaves
        )
        return replace(self, leaves=tuple(leaves))

    def join(self, tensors: list[Tensor]) -> tuple[Any, ...]:
        """The arguments, with these tensors in place."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, TensorSpec) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)

    def flatten(self, arguments: tuple[Any, ...]) -> list[Tensor]:
        """The tensors of a batch, in the order of the graph's inputs. The structure must match."""
        leaves, spec = flatten(arguments)
        if spec != self.spec:
            raise InputError.of(
                "batch",
                f"its structure is {spec}, but the example's was {self.spec}",
                "pass what the example passed, or capture again with this batch",
            )
        for position, constant in self.constants.items():
            _require_same(position, leaves[position], constant)
        return [
            leaf
            for leaf, known in zip(leaves, self.leaves, strict=True)
            if isinstance(known, TensorSpec)
        ]


def inputs_of(example: tuple[Any, ...], whole: frozenset[int] = frozenset()) -> Inputs:
    if not isinstance(example, tuple):
        raise CaptureError.of(
            "example",
            f"it is {with_article(type(example).__name__)}, not a tuple",
            "pass the arguments of one microbatch as a tuple: example=(tokens, labels)",
        )
    leaves, spec = flatten(example)
    return Inputs(spec, tuple(_leaf(leaf) for leaf in leaves), whole)


def spec_of(tensor: Tensor) -> TensorSpec:
    shape = tuple(size if isinstance(size, int) else None for size in tensor.shape)
    return TensorSpec(shape, name_of(tensor.dtype))


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return spec_of(leaf)
    if isinstance(leaf, CONSTANTS):
        return leaf
    raise CaptureError.of(
        "example",
        f"an argument holds {with_article(type(leaf).__name__)}",
        "pass tensors, numbers, strings, and lists, tuples or dicts of these",
    )


def _require_same(position: int, value: Any, constant: Any) -> None:
    if isinstance(value, Tensor) or value != constant:
        raise InputError.of(
            "batch",
            f"argument {position} is {value!r}, but the model was captured with {constant!r}",
            "pass it as a tensor if it changes, or capture again",
        )
