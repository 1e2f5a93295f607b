"""Recorded steps: every instruction, on one clock, and the training as it is without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from pool import run_on
from recorded import Seen, offsets, profile, train, trainer_of
from runtime.test_replicate import stages_of

from piper.errors import InputError, RunError
from piper.job.loop.tracing import EnvironmentRecording
from piper.launcher.trace_window import Window, steps_of
from piper.names import COMPUTE
from piper.plan.analyse.trace import Span, Trace
from piper.plan.instructions import Exchange, Gather, Plan, Recv, Reduce, Run, Send, Total
from piper.runtime.observe.recorder import Notes, merged, messages, title
from piper.strategies import BUILDERS
from piper.trainer import Trainer

SECOND = 10**9
CASES = {
    "pipeline": ("uneven", 2, BUILDERS["1f1b"](pp=2, microbatches=4)),
    "replicas": ("uneven", 2, BUILDERS["1f1b"](pp=1, dp=2, zero=3, microbatches=2)),
    "experts": ("moe spread", 2, BUILDERS["dualpipev"](pp=1, dp=2, ep=2, zero=2, microbatches=2)),
    "all": ("moe spread", 4, BUILDERS["dualpipev"](pp=2, dp=2, ep=2, zero=2, microbatches=4)),
}


def run(case: str, path: str | None, ahead: int = 0) -> list[Seen]:
    name, world, strategy = CASES[case]
    rows = 2 * strategy.microbatches
    return run_on(world, train, name, stages_of(strategy), rows, strategy.to_json(), path, ahead)


@cache
def recorded(case: str, folder: Path) -> tuple[Path, list[Seen]]:
    """Every device's clock an hour ahead of the one before."""
    path = folder / f"{case}.json"
    return path, run(case, str(path), ahead=3600 * SECOND)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorded")


@pytest.fixture(params=CASES)
def seen(request: pytest.FixtureRequest, folder: Path) -> list[Seen]:
    return recorded(request.param, folder)[1]


def steps(seen: list[Seen]) -> list[Trace]:
    assert not any(one.traces for one in seen[1:]), "only the first device has them"
    return seen[0].traces


def test_every_instruction_of_every_device_has_a_span(seen: list[Seen]) -> None:
    assert [trace.step for trace in steps(seen)] == [2, 3]
    for trace in steps(seen):
        for device, one in enumerate(seen):
            assert [span.at for span in trace.spans[device]] == [*range(len(one.plan.instructions))]
            assert all(s.issued <= s.start <= s.end for s in trace.spans[device])


def test_compute_is_in_the_order_of_the_plan_and_does_not_overlap(seen: list[Seen]) -> None:
    for trace in steps(seen):
        for device, one in enumerate(seen):
            spans = trace.spans[device]
            mine = [s for s in spans if one.plan.instructions[s.at].stream == COMPUTE]
            assert all(a.end <= b.start for a, b in pairwise(mine))


def test_nothing_starts_before_what_it_waits_for_has_ended(seen: list[Seen]) -> None:
    waited = 0
    for trace in steps(seen):
        for device, one in enumerate(seen):
            spans = trace.spans[device]
            for k, instruction in enumerate(one.plan.instructions):
                waited += len(instruction.waits)
                assert all(spans[w].end <= spans[k].start for w in instruction.waits)
    assert waited


def test_nothing_arrives_before_it_was_sent_on_aligned_clocks(seen: list[Seen]) -> None:
    """Clocks were an hour apart; what is left is how well offsets are known."""
    for trace in steps(seen):
        for (sender, at), (receiver, there) in messages([one.plan for one in seen]):
            sent, arrived = trace.spans[sender][at], trace.spans[receiver][there]
            doubt = seen[sender].doubt + seen[receiver].doubt
            assert arrived.end >= sent.start - doubt - 1e-9
            assert sent.end <= max(arrived.end, sent.start)


def test_devices_of_a_collective_are_in_it_at_the_same_time(seen: list[Seen]) -> None:
    """Nobody has the sum before the last one gave its part."""
    doubt = 2 * max(one.doubt for one in seen)
    for trace in steps(seen):
        meetings: dict[object, list[Span]] = {}
        for device, one in enumerate(seen):
            count: dict[object, int] = {}
            for k, i in enumerate(one.plan.instructions):
                if isinstance(i, Reduce | Gather | Exchange | Total):
                    team = (i.stream, i.group)
                    count[team] = count.get(team, 0) + 1
                    meetings.setdefault((team, count[team]), []).append(trace.spans[device][k])
        for spans in meetings.values():
            assert min(s.end for s in spans) >= max(s.start for s in spans) - doubt - 1e-9


def test_a_step_is_as_long_as_it_is(seen: list[Seen]) -> None:
    for trace in steps(seen):
        assert min(s.issued for spans in trace.spans.values() for s in spans) == 0.0
        assert 0 < trace.seconds < 60


@pytest.mark.parametrize("case", CASES)
def test_losses_and_parameters_are_the_same_bits_with_and_without(case: str, folder: Path) -> None:
    plain = run(case, None)

    for one, other in zip(plain, recorded(case, folder)[1], strict=True):
        assert one.losses == other.losses
        assert one.bits == other.bits


@pytest.mark.parametrize("case", CASES)
def test_the_file_is_a_chrome_trace_with_what_was_seen(case: str, folder: Path) -> None:
    path, seen = recorded(case, folder)

    found = json.loads(path.read_text())

    assert {"traceEvents", "piper"} <= found.keys()
    assert [Trace.from_dict(t).step for t in found["piper"]["traces"]] == [2, 3]
    assert Trace.from_dict(found["piper"]["traces"][1]).spans.keys() == set(range(len(seen)))


def test_clocks_of_one_host_are_found_to_be_the_same() -> None:
    first, second = run_on(2, offsets, 0)

    assert first.nanoseconds == 0
    assert 0 < second.doubt < SECOND
    assert abs(second.nanoseconds) <= second.doubt


def test_a_clock_that_is_ahead_is_found_out() -> None:
    _, second = run_on(2, offsets, -7 * SECOND)

    assert abs(second.nanoseconds - 7 * SECOND) <= second.doubt


def test_a_send_ends_when_the_peer_has_it() -> None:
    shape = (((2,), "float32"),)
    plans = [
        Plan(0, (), (Send("send a", "a", shape, 1, "pp"),)),
        Plan(1, (), (Recv("send a", "a", shape, 0, "pp"),)),
    ]
    sent = Notes([100], [100], [900], [False])
    got = Notes([1000], [1000], [1500], [True])

    trace = merged(4, plans, [(sent, 0), (got, -1100)])

    assert trace.spans[1] == (Span(0, 0.0, 0.0, 500e-9, late=True),)
    assert trace.spans[0] == (Span(0, 200e-9, 200e-9, 500e-9, late=True),)
    assert Trace.from_dict(trace.to_dict()) == trace


def test_operators_are_in_ranges_called_like_the_nodes(tmp_path: Path) -> None:
    name, world, strategy = CASES["experts"]
    text, path = strategy.to_json(), str(tmp_path / "run.json")

    plans = run_on(world, profile, name, stages_of(strategy), 4, text, path)

    for plan in plans:
        events = json.loads((tmp_path / f"run.ops{plan.device}.json").read_text())["traceEvents"]
        ranges = [e for e in events if e.get("cat") == "user_annotation"]
        assert {title(one) for one in plan.instructions} <= {e["name"] for e in ranges}
        operators = [e for e in events if e.get("cat") == "cpu_op"]
        forwards = {i.node for i in plan.instructions if isinstance(i, Run) and i.phase == "F"}
        idle = [e["name"] for e in ranges if e["name"] in forwards and not within(e, operators)]
        assert forwards
        assert not idle


def within(one: dict, events: list[dict]) -> list[str]:
    """The events of a range, on its thread."""
    return [e["name"] for e in events if e["tid"] == one["tid"] and inside(e, one)]


def inside(event: dict, one: dict) -> bool:
    return one["ts"] <= event["ts"] and event["ts"] + event["dur"] <= one["ts"] + one["dur"]


def alone(path: Path, count: int) -> tuple[Trainer, list]:
    """A Trainer in this process."""
    text = BUILDERS["gpipe"](pp=1, microbatches=2).to_json()
    trainer, batches = trainer_of(0, "uneven", 1, 2, text)
    trainer.record(path, steps=count)
    return trainer, batches


def traces_in(path: Path) -> list[int]:
    return [found["step"] for found in json.loads(path.read_text())["piper"]["traces"]]


def test_a_window_that_is_not_over_is_written_when_the_trainer_is_closed(tmp_path: Path) -> None:
    trainer, batches = alone(tmp_path / "new" / "run.json", 5)
    trainer.step(*batches[0])
    trainer.step(*batches[1])
    assert not (tmp_path / "new").exists()

    trainer.close()

    assert traces_in(tmp_path / "new" / "run.json") == [1, 2]


def test_a_step_that_fails_loses_none_before_it(tmp_path: Path) -> None:
    trainer, batches = alone(tmp_path / "run.json", 5)
    (program,) = trainer._programs.ready.values()
    trainer.step(*batches[0])
    program.watch = lambda bucket: 1 / 0  # type: ignore[method-assign]

    with pytest.raises(RunError, match="stopped at update"):
        trainer.step(*batches[1])

    assert traces_in(tmp_path / "run.json") == [1]


def test_steps_outside_of_the_window_run_the_plain_program(tmp_path: Path) -> None:
    trainer, batches = alone(tmp_path / "run.json", 1)
    (program,) = trainer._programs.ready.values()
    acts = program.acts

    trainer.step(*batches[0])

    assert program.acts is acts
    trainer.step(*batches[1])
    assert traces_in(tmp_path / "run.json") == [1]


def test_a_file_that_cannot_be_written_does_not_stop_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, batches = alone(tmp_path, 1)

    trainer.step(*batches[0])

    assert "the recorded steps are lost" in caplog.text


@pytest.mark.parametrize("text", ["", "0:3", "3:0", "a:b", "3:3:3"])
def test_steps_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="write FIRST:COUNT, for example 3:3 or 10:1"):
        steps_of(text, "--trace-steps")


def test_piper_run_says_when_no_step_was_in_the_window(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('no Trainer here')")

    options = ["--trace", str(tmp_path / "run.json"), "--trace-steps", "9:1"]

    done = subprocess.run(
        [sys.executable, "-m", "piper", "run", str(script), *options],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert "no trace was written: no piper.Trainer reached step 9 of this run" in done.stderr


def test_a_run_that_resumes_counts_its_own_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, batches = alone(tmp_path / "first.json", 1)
    first.step(*batches[0])
    first.step(*batches[1])
    first.save(tmp_path / "saved")
    first.close()
    monkeypatch.setattr(EnvironmentRecording, "taken", False)
    for name, value in Window(tmp_path / "run.json", first=2, count=1).environment().items():
        monkeypatch.setenv(name, value)
    text = BUILDERS["gpipe"](pp=1, microbatches=2).to_json()

    trainer, batches = trainer_of(0, "uneven", 1, 2, text)
    assert trainer.resume(tmp_path / "saved") == 2
    trainer.step(*batches[0])
    trainer.step(*batches[1])
    trainer.close()

    assert traces_in(tmp_path / "run.json") == [4]
