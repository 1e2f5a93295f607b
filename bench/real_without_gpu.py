"""For a dry run on CPUs: Megatron-Core says "cuda" where it only needs some device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from gpu_arena import Arena, Contender
from torch.overrides import TorchFunctionMode

Make = Callable[..., Contender]


class OnCpu(TorchFunctionMode):
    """Tensors that are asked for on "cuda" are made on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if name == "type" and len(args) == 1 and not kwargs:  # the name of a tensor's type
            return func(*args).replace("torch.", "torch.cuda.")
        if name == "cuda" and args:
            return args[0]
        args = ["cpu" if isinstance(one, str) and one == "cuda" else one for one in args]
        return func(*args, **kwargs)


class Anything:
    """A stream or an event: calls of its methods do nothing."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Anything]:
        return lambda *args, **options: Anything()


def replace_cuda() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.synchronize = lambda *device: None
    cuda.current_stream = cuda.default_stream = lambda *device: Anything()
    cuda.stream = lambda *stream: nullcontext()
    cuda.Event = cuda.Stream = Anything


def splits_as_lists() -> None:
    """Its all-to-alls get sizes as arrays of NumPy on a GPU, but as tensors on a CPU."""
    from megatron.core.transformer.moe import token_dispatcher

    def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.tolist() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = moved


def as_on_a_gpu(make: Make) -> Make:
    """Makes and steps a contender under OnCpu if there is no GPU."""

    @wraps(make)
    def run(arena: Arena, *args: Any, **options: Any) -> Contender:
        if arena.on_gpu:
            return make(arena, *args, **options)
        replace_cuda()
        splits_as_lists()
        with OnCpu():
            one = make(arena, *args, **options)
        inner = one.step

        def step() -> Any:
            with OnCpu():
                return inner()

        one.step = step
        return one

    return run
