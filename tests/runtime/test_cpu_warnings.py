"""On a CPU without bfloat16 instructions, torch's pages about it are not shown."""

from __future__ import annotations

import warnings

from piper.runtime.hardware import chosen_device


def test_only_the_warning_about_bfloat16_is_left_out() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        chosen_device("cpu")
        warnings.warn("mkldnn_matmul failed, switching to BLAS gemm: needs a cpu", stacklevel=1)
        warnings.warn("something else failed", stacklevel=1)

    assert [str(one.message) for one in seen] == ["something else failed"]
