"""What a GPU did is found in a profile by the ranges in which it was launched."""

import json
from pathlib import Path
from typing import Any

from piper.plan.analyse.trace import MEASURED, Span, Trace
from piper.runtime.observe.device_times import device_times
from piper.runtime.observe.recorder import on_devices

NAMES = ["PP0:F@0", "send h0", "PP0:F@0", "free x"]  # one name twice in a plan


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def test_kernels_belong_to_the_instruction_that_launched_them(tmp_path: Path) -> None:
    """Two steps; the profile's clock is 5000 us ahead of the host's."""
    events = [event("user_annotation", "nccl:send", 5011.5, 2)]
    for step in (0, 100):
        for k, name in enumerate(NAMES):
            events.append(event("user_annotation", name, 5000 + step + 10 * k, 5))
            number = step + k
            events.append(
                event("cuda_runtime", "launch", 5001 + step + 10 * k, 1, correlation=number)
            )
        on = 5030 + step
        events.append(event("kernel", "gemm", on, 7, tid=7, correlation=step))
        events.append(event("gpu_memcpy", "copy", on + 40, 2, tid=7, correlation=step))
        events.append(event("kernel", "nccl", on + 3, 20, tid=9, correlation=step + 1))
        events.append(event("kernel", "gemm", on + 8, 1, tid=7, correlation=step + 2))
    events.append(event("cuda_runtime", "launch", 5003, 1, tid=2, correlation=900))
    events.append(event("kernel", "of another thread", 5003, 1, tid=8, correlation=900))
    path = tmp_path / "run.ops0.json"
    path.write_text(json.dumps({"traceEvents": events}))
    starts = [[1000 * (step + 10 * k) for k in range(4)] for step in (0, 100)]

    found = device_times(path, NAMES, starts)

    assert found == [
        {0: (30_000, 72_000), 1: (33_000, 53_000), 2: (38_000, 39_000)},
        {0: (130_000, 172_000), 1: (133_000, 153_000), 2: (138_000, 139_000)},
    ]


def test_a_profile_without_ranges_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.ops0.json"
    path.write_text(json.dumps({"traceEvents": [event("kernel", "gemm", 1, 1, correlation=1)]}))

    assert device_times(path, NAMES, [[0, 1, 2, 3]]) == [{}]


def test_a_step_takes_the_times_of_its_gpus_where_there_are_any() -> None:
    """The second device's clock is 100 ns behind the first one's; the step began at 1000."""
    host = Span(0, issued=0.0, start=1e-9, end=2e-9), Span(1, issued=2e-9, start=2e-9, end=9e-9)
    trace = Trace("step 3", MEASURED, {0: host, 1: host}, 3)

    found = on_devices(trace, 1000, [({1: (1500, 1700)}, 0), ({0: (1300, 1400)}, 100)])

    assert found.spans[0] == (host[0], Span(1, 2e-9, 500e-9, 700e-9))
    assert found.spans[1] == (Span(0, 0.0, 400e-9, 500e-9), host[1])
