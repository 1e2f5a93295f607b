"""Settings of torch and Python that the user's code asks for: precision, determinism, the seed."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from piper.capture.outside.environment import changed_elsewhere
from piper.capture.outside.python_settings import of_python
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


def settings(reach: Reach, held: Iterable[Any] = ()) -> list[Setting]:
    """Those that some code names, or whose function it holds."""
    asked = {**dict(_named(reach)), **dict(_held(held))}
    found = [Setting(path, ask, _asked(ask)) for path, ask in asked.items()]
    found += [Setting(path, ask, ask()) for path, ask in of_python(reach.names)]
    return [one for one in found if one.first is not None]


@contextmanager
def settings_kept(reach: Reach) -> Iterator[None]:
    """An error if a forward changes a setting that it asks for."""
    before = settings(reach)
    yield
    for path, _ in (change for one in before for change in one.changes()):
        raise changed_elsewhere(path)


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


def _held(values: Iterable[Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Functions of torch that are kept in attributes, closures and globals."""
    for one in values:
        if isinstance(one, FunctionType | BuiltinFunctionType):
            name, module = one.__name__, str(one.__module__)
            asks = name.startswith(_ASKING) or name.endswith("_enabled")
            if asks and name not in _MODES and module.split(".")[0] == "torch":
                yield f"torch.{name}()", one


def _asked(ask: Callable[[], Any]) -> Any:
    """None: it needs arguments, or cannot say."""
    try:
        found = ask()
    except Exception:
        return None
    return found if isinstance(found, _PLAIN) else None
