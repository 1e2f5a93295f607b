"""Import a large module without garbage collections, whoever imports it."""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from piper.garbage import importing


def import_quickly(name: str) -> None:
    """From now on. If nobody imports the module, nothing happens."""
    sys.meta_path.insert(0, _Finder(name))


class _Finder(MetaPathFinder):
    """Finds one module as Python does, once."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        found = find_spec(name)
        if found is not None and found.loader is not None:
            load = found.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                with importing():
                    load(module)

            found.loader.exec_module = exec_module  # type: ignore[method-assign]
        return found
