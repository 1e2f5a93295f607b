"""Piper: programmable distributed training for PyTorch.

Names are loaded on first use, so `import piper.ir` does not load torch. Type checkers and editors
read the imports below instead; a test keeps the two lists the same.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from piper.directives.strategy import draw_with as _draw_with
from piper.garbage import importing as _importing
from piper.shown_warnings import show_warnings as _show_warnings

_show_warnings()

if TYPE_CHECKING:
    from piper import errors as errors
    from piper import models as models
    from piper import strategies as strategies
    from piper.capture import LossScale as LossScale
    from piper.capture import Precision as Precision
    from piper.capture import annotate as annotate
    from piper.capture import tag as tag
    from piper.capture import tag_layers as tag_layers
    from piper.directives import Offload as Offload
    from piper.directives import Order as Order
    from piper.directives import Place as Place
    from piper.directives import Remat as Remat
    from piper.directives import Replicate as Replicate
    from piper.directives import Shard as Shard
    from piper.directives import Split as Split
    from piper.directives import Stage as Stage
    from piper.directives import Stream as Stream
    from piper.directives.strategy import Strategy as Strategy
    from piper.ir.filters import where as where
    from piper.job.compile.compiler import compile_strategy as compile_strategy
    from piper.job.drawing import draw as draw
    from piper.job.launching import launch as launch
    from piper.job.programs.rehearsal import rehearse as rehearse
    from piper.pretrained import from_pretrained as from_pretrained
    from piper.runtime.metrics import Metrics as Metrics
    from piper.trainer import Trainer as Trainer

__version__ = "0.1.0"

_HOMES = {
    "annotate": "piper.capture",
    "tag": "piper.capture",
    "tag_layers": "piper.capture",
    "where": "piper.ir.filters",
    "Place": "piper.directives",
    "Replicate": "piper.directives",
    "Shard": "piper.directives",
    "Split": "piper.directives",
    "Offload": "piper.directives",
    "Order": "piper.directives",
    "Stage": "piper.directives",
    "Stream": "piper.directives",
    "Remat": "piper.directives",
    "Strategy": "piper.directives.strategy",
    "LossScale": "piper.capture",
    "Precision": "piper.capture",
    "Trainer": "piper.trainer",
    "Metrics": "piper.runtime.metrics",
    "from_pretrained": "piper.pretrained",
    "launch": "piper.job.launching",
    "draw": "piper.job.drawing",
    "rehearse": "piper.job.programs.rehearsal",
    "compile_strategy": "piper.job.compile.compiler",
}
_MODULES = ("strategies", "models", "errors")

__all__ = [*_HOMES, *_MODULES]  # noqa: PLE0604

if not TYPE_CHECKING:  # a type checker would take any name for one of these

    def __getattr__(name: str) -> object:
        if name in _HOMES:
            with _importing():
                return getattr(import_module(_HOMES[name]), name)
        if name in _MODULES:
            return import_module(f"piper.{name}")
        raise _missing(name)


def _missing(name: str) -> AttributeError:
    """Builders are found one level lower."""
    text = f"module 'piper' has no attribute {name!r}"
    if name[0] == "_":
        return AttributeError(text)
    if name in import_module("piper.strategies").__all__:
        return AttributeError(f"{text}; it is piper.strategies.{name}")
    found = import_module("piper.strategies.other_names").missing_in_piper(name, __all__)
    assert isinstance(found, AttributeError)
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def _html(strategy: "Strategy") -> str | None:
    return str(import_module("piper.pictures").html(strategy))


def _svg(strategy: "Strategy") -> str | None:
    drawn: str | None = import_module("piper.pictures").svg(strategy)
    return drawn


_draw_with(_html, _svg)  # schedules are drawn by a layer that directives do not know
