"""Piper: programmable distributed training for PyTorch.

Names are loaded when they are first used, so that `import piper.ir` does not load torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "annotate": "piper.capture",
    "tag": "piper.capture",
    "where": "piper.ir.filters",
    "Place": "piper.directives",
    "Replicate": "piper.directives",
    "Shard": "piper.directives",
    "Split": "piper.directives",
    "Order": "piper.directives",
    "Stream": "piper.directives",
    "Strategy": "piper.directives",
    "Trainer": "piper.trainer",
    "Metrics": "piper.trainer",
    "rehearse": "piper.job.rehearsal",
    "compile_strategy": "piper.job.compiler",
}
_MODULES = ("strategies", "models", "errors")

__all__ = [*_HOMES, *_MODULES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _MODULES:
        return import_module(f"piper.{name}")
    raise AttributeError(f"module 'piper' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
