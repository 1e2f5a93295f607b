"""Settings of torch that the user's code asks for: precision, determinism, the seed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from piper.capture.python_state.reach import Reach

_ASKING = ("get_", "is_", "are_", "initial_seed")
# The Trainer refuses these modes around a step, or sets them itself:
_MODES = {"is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "is_inference",
          "is_autocast_cpu_enabled"}  # fmt: skip
_PLAIN = (bool, int, float, str, torch.dtype, torch.device)
_BACKENDS: dict[str, Any] = {
    "cudnn": torch.backends.cudnn,
    "matmul": torch.backends.cuda.matmul,
    "mkldnn": torch.backends.mkldnn,
    "opt_einsum": torch.backends.opt_einsum,
}
_FLAGS = ("enabled", "benchmark", "deterministic", "allow_tf32", "fp32_precision", "strategy",
          "allow_fp16_reduced_precision_reduction",
          "allow_bf16_reduced_precision_reduction")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setting:
    """How to ask for it, and what it was at first."""

    path: str
    ask: Callable[[], Any]
    first: Any

    def changes(self) -> Iterator[tuple[str, str]]:
        if (now := self.ask()) != self.first:
            yield self.path, repr(now)


def settings(reach: Reach) -> list[Setting]:
    """Those that some code names."""
    return [
        Setting(path, ask, found)
        for path, ask in _named(reach)
        if isinstance(found := _asked(ask), _PLAIN)
    ]


def _named(reach: Reach) -> Iterator[tuple[str, Callable[[], Any]]]:
    for name in sorted(reach.names - _MODES):
        if name.startswith(_ASKING) and callable(ask := getattr(torch, name, None)):
            yield f"torch.{name}()", ask
        elif name.endswith("_enabled") and callable(ask := getattr(torch.backends.cuda, name, 0)):
            yield f"torch.backends.cuda.{name}()", ask
    for name, backend in _BACKENDS.items():
        for flag in _FLAGS:
            if {name, flag} <= reach.names and hasattr(backend, flag):
                yield f"torch.backends.{name}.{flag}", partial(getattr, backend, flag)


def _asked(ask: Callable[[], Any]) -> Any:
    """None: it needs arguments, or cannot say."""
    try:
        return ask()
    except Exception:
        return None
