"""Functions for `piper.launch`, where its processes can import them."""

from __future__ import annotations

import os
import time


def rank_and(*values: int) -> tuple[int, ...]:
    return int(os.environ["RANK"]), *values


def fail_on_the_second() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("no more data")
    time.sleep(60)
