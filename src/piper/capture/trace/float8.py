"""The linear layers that `Precision(fp8=)` names multiply in float8 while a model is traced."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from piper.capture.kernels.scaled_linear import MULTIPLE, SCALED_LINEAR
from piper.capture.precision import Precision, refused

ABLE = (9, 0)  # the compute capability with kernels that scale every row


@contextmanager
def multiplying_in_float8(layers: Mapping[str, nn.Linear]) -> Iterator[None]:
    """While this is open, calls of these layers multiply in float8."""
    with ExitStack() as stack:
        for layer in layers.values():
            layer.forward = partial(scaled, layer)
            stack.callback(delattr, layer, "forward")
        yield


def scaled(layer: nn.Linear, x: Tensor) -> Tensor:
    found: Tensor = SCALED_LINEAR(x, layer.weight)
    return found if layer.bias is None else found + layer.bias


def linear_layers(
    named: Mapping[str, nn.Module], kept: Mapping[str, nn.Module]
) -> dict[str, nn.Linear]:
    """The linear layers in the modules that `fp8` names, by path."""
    found = {
        ".".join(filter(None, (path, inner))): one
        for path, module in named.items()
        for inner, one in module.named_modules()
        if type(one) is nn.Linear  # other classes may compute something else
    }
    if named and not found:
        raise refused(
            f"fp8: there is no torch.nn.Linear in {', '.join(list(named)[:3])}",
            "name modules that have one",
        )
    inside = {id(one) for module in kept.values() for one in module.modules()}
    for path, layer in found.items():
        if id(layer) in inside:
            raise refused(f"{path} is in both keep and fp8", "take it out of one of them")
        refuse_size(path, layer)
    return found


def refuse_size(path: str, layer: nn.Linear) -> None:
    if layer.in_features % MULTIPLE or layer.out_features % MULTIPLE:
        raise refused(
            f"fp8: the weight of {path} is {layer.out_features} x {layer.in_features}, and products"
            f" in float8 want multiples of {MULTIPLE}",
            "name only modules whose sizes are multiples of it",
        )


def refuse_device(precision: Precision | None, device: str) -> None:
    """A machine without a GPU compiles for others, and does not know theirs."""
    wanted = precision is not None and precision.fp8
    if not wanted or device != "cuda" or not torch.cuda.is_available():
        return
    able = torch.cuda.get_device_capability()
    if able < ABLE:
        raise refused(
            f"fp8: the GPU has compute capability {able[0]}.{able[1]}, and products in float8 with"
            f" a scale for every row need {ABLE[0]}.{ABLE[1]}",
            "leave out fp8, or use an H100 or a later GPU",
        )
