"""The versions of PyTorch that Piper was tested with. Capture reads private parts of it."""

from __future__ import annotations

import torch

from piper.errors import InputError

FIRST, LAST = (2, 11), (2, 13)
FIX = "pip install 'torch>=2.11,<2.14'"


def refuse_untested(version: str) -> None:
    """
    >>> refuse_untested("2.13.0+cu130")
    >>> refuse_untested("2.15.0")
    Traceback (most recent call last):
        ...
    piper.errors.InputError: torch: Piper was not tested with version 2.15.0
      fix: pip install 'torch>=2.11,<2.14'
    """
    major, minor, *_ = version.split(".")
    if not FIRST <= (int(major), int(minor)) <= LAST:
        raise InputError.of("torch", f"Piper was not tested with version {version}", FIX)


refuse_untested(torch.__version__)
