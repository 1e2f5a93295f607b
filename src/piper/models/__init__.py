"""Annotated reference models, used by tests, examples and benchmarks; Hugging Face models.

Each is imported when it is first needed: `piper.models.qwen3_moe`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from piper.models import hugging_face as hugging_face
    from piper.models import llama as llama
    from piper.models import qwen3_moe as qwen3_moe
else:

    def __getattr__(name: str) -> object:
        if name in ("hugging_face", "llama", "qwen3_moe"):
            return import_module(f"piper.models.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
