"""Runs on Ray: they train, fail with one message, and leave nothing behind on the cluster."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from piper.cli import app
from piper.errors import InputError
from piper.launcher.ending import Ended, verdict
from piper.launcher.on_ray import LOCAL, NOTICE, joined, load, refuse_unreachable, time_after
from piper.launcher.rank_assignment import Place, assign_ranks
from piper.launcher.supervisor import Supervisor, interface

pytestmark = pytest.mark.processes
TESTS = Path(__file__).parent.parent
TRAINING = TESTS / "scripts" / "two_stages.py"
WAITING = """
import os, pathlib, sys, time
pids = f"{os.getpid()} {os.getppid()}"
pathlib.Path(sys.argv[1], "new").mkdir(exist_ok=True)
pathlib.Path(sys.argv[1], "new", os.environ["RANK"]).write_text(pids)
pathlib.Path(sys.argv[1], "new", os.environ["RANK"]).rename(sys.argv[1] + "/" + os.environ["RANK"])
time.sleep(600)
"""
Start = Callable[..., "subprocess.Popen[str]"]


# What needs no Ray


def test_ranks_follow_the_nodes_and_see_the_gpus_of_their_node() -> None:
    places = [
        Place("b", "10.0.0.2", ("1",)), Place("a", "10.0.0.1", ("10",)),
        Place("b", "10.0.0.2", ("0",)), Place("a", "10.0.0.1", ("9",)),
    ]  # fmt: skip

    found = assign_ranks(places, here="a")

    assert [one.index for one in found] == [3, 1, 2, 0]
    assert [(one.rank, one.local_rank) for one in found] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert found[1].environment(4, "10.0.0.1", 29500) == {
        "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "CUDA_VISIBLE_DEVICES": "9,10",
    }  # fmt: skip


def test_without_gpus_nothing_is_said_of_them() -> None:
    (one,) = assign_ranks([Place("a", "10.0.0.1")])

    assert "CUDA_VISIBLE_DEVICES" not in one.environment(1, "10.0.0.1", 29500)


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)

    with pytest.raises(InputError, match="pip install 'ray>=2.60'"):
        load()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--on", "ray", "--share-gpu"], "leave out --share-gpu"),
        (["--on", "slurm"], "'slurm' is not a cluster"),
        (["--on", "ray:"], "'ray:' is not a cluster"),
    ],
)
def test_what_makes_no_sense_is_refused(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["run", str(TRAINING), *options])

    assert isinstance(result.exception, InputError)
    assert message in str(result.exception)


@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:9"])
def test_an_address_where_nobody_is_is_refused_at_once(address: str) -> None:
    with pytest.raises(InputError, match="nothing answers at 127.0.0.1:9"):
        refuse_unreachable(address)


class Slow:
    """Stands for Ray on a busy machine: some clusters do not start in time."""

    def __init__(self, failures: int) -> None:
        self.failures, self.calls = failures, list[str]()

    def init(self, **_: object) -> None:
        self.calls.append("init")
        if self.calls.count("init") <= self.failures:
            raise Exception("The current node timed out during startup.")

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def test_a_cluster_of_its_own_that_does_not_start_in_time_is_started_once_more() -> None:
    ray = Slow(failures=1)

    with joined(ray, LOCAL, 2):
        assert ray.calls == ["init", "shutdown", "init"]

    assert ray.calls[-1] == "shutdown"


@pytest.mark.parametrize(("address", "tries"), [(LOCAL, 2), ("auto", 1)])
def test_a_cluster_that_does_not_start_is_told_in_one_message(address: str, tries: int) -> None:
    ray = Slow(failures=9)

    with pytest.raises(InputError, match="timed out during startup") as refused:
        joined(ray, address, 2).__enter__()

    assert ray.calls.count("init") == tries
    assert ("on this machine" in str(refused.value)) == (address == LOCAL)


def test_a_symptom_waits_for_its_cause_and_a_cause_does_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    symptom, cause = Ended(0, 75, when=1.0), Ended(1, -9, when=2.0)

    assert time_after(symptom) == NOTICE > time_after(cause)
    assert time_after(replace(symptom, culprit=1)) == time_after(cause)
    assert verdict([symptom, cause]) == 137
    assert "device 1 failed\n  it was ended by signal SIGKILL" in capsys.readouterr().err


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    monkeypatch.setattr(Supervisor, "place", lambda _: Place("a", "127.0.0.1"))
    monkeypatch.setenv("PYTHONPATH", str(TESTS.parent / "src"))
    return Supervisor()


def test_a_supervisor_forwards_what_is_printed_and_why_it_failed(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nos.write(1, b'from C\\n')\nprint(os.getcwd(), sys.argv[1:])\n"
        "print('no newline', end='', file=sys.stderr)\nraise ValueError(os.environ['RANK'])\n"
    )
    supervisor.start([str(script), "--x"], str(tmp_path), {"RANK": "7"})

    lines, code, reason = [], None, ""
    while code is None:
        update = supervisor.update()
        lines, code, reason = [*lines, *update.lines], update.code, update.report.reason

    assert [text for is_error, text in lines if not is_error] == ["from C", f"{tmp_path} ['--x']"]
    assert [text for is_error, text in lines if is_error] == ["no newline"]
    assert code == 1 and reason.endswith("ValueError: 7")


def test_a_supervisor_says_that_its_node_has_no_such_script(supervisor: Supervisor) -> None:
    supervisor.start(["/nowhere/train.py"], "/nowhere", {})

    update = supervisor.update()

    assert update.code == 1
    assert "there is no /nowhere/train.py on the node 127.0.0.1\n  fix: " in update.report.reason


def test_gloo_is_told_the_interface_that_has_the_address() -> None:
    assert interface("127.0.0.1") == "lo"


# Two nodes


def enter(pid: int) -> list[str]:
    """A command that follows runs in the network of a process."""
    return ["nsenter", "--preserve-credentials", "-U", "-n", "-t", str(pid)]


def two_nodes(environment: dict[str, str]) -> tuple[subprocess.Popen[str], str]:
    """Where very much else runs, Ray may not start within its own time limits: once more, then."""
    command = ["unshare", "-Urn", sys.executable, str(TESTS / "scripts" / "ray_nodes.py")]
    for _ in range(2):
        nodes = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for line in nodes.stdout:
            if line.startswith("address "):
                return nodes, line.split()[1]
    raise AssertionError("Ray did not start")


@pytest.fixture(scope="module")
def on_ray() -> Iterator[Start]:
    """Starts `piper run --on ray...` beside a cluster of two nodes that is alone in its network."""
    pytest.importorskip("ray")
    if shutil.which("nsenter") is None or subprocess.run(["unshare", "-Urn", "true"]).returncode:
        pytest.skip("needs a network of its own (unshare -Urn, nsenter)")
    folder = tempfile.mkdtemp(prefix="pr", dir="/tmp")  # short: Ray makes sockets in it
    source = str(TESTS.parent / "src")
    environment = {
        **os.environ, "RAY_TMPDIR": folder, "PYTHONPATH": source, "OMP_NUM_THREADS": "1",
        "PIPER_DEVICE": "cpu",
    }  # fmt: skip
    nodes, address = two_nodes(environment)

    def start(on: str, *command: str) -> subprocess.Popen[str]:
        piper = [sys.executable, "-m", "piper", "run", "--on", on.format(address), "-n", "2"]
        return subprocess.Popen(
            [*enter(nodes.pid), *piper, *command], env=environment, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    yield start
    nodes.communicate()
    shutil.rmtree(folder, ignore_errors=True)


def processes_of(folder: Path, run: subprocess.Popen[str]) -> dict[int, list[int]]:
    """By rank, the process of the script and that of its actor."""
    end = time.monotonic() + 240
    while not all((folder / str(rank)).exists() for rank in range(2)):
        assert run.poll() is None and time.monotonic() < end, run.communicate()
        time.sleep(0.05)
    return {rank: [int(pid) for pid in (folder / str(rank)).read_text().split()] for rank in (0, 1)}


def all_end(pids: list[int], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(is_alive, pids))


def is_alive(pid: int) -> bool:
    try:
        return stat(pid)[0] != "Z"
    except FileNotFoundError:
        return False


def stat(pid: int) -> list[str]:
    """State and parent of a process, and more."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


@pytest.fixture
def waiting(tmp_path: Path) -> list[str]:
    (tmp_path / "waiting.py").write_text(WAITING)
    (tmp_path / "pids").mkdir()
    return [str(tmp_path / "waiting.py"), str(tmp_path / "pids")]


@pytest.mark.soak  # within seconds, on a machine with nothing else to do
def test_a_run_that_is_interrupted_leaves_nothing_behind(on_ray: Start, waiting: list[str]) -> None:
    run = on_ray("ray:{}", *waiting)
    processes = processes_of(Path(waiting[1]), run)

    os.killpg(run.pid, signal.SIGINT)
    run.communicate(timeout=60)

    assert run.returncode == 130
    assert all_end([*processes[0], *processes[1]])


@pytest.mark.soak
@pytest.mark.parametrize("on", ["ray:{}", "ray"])
def test_an_actor_that_dies_ends_the_run_within_seconds(
    on_ray: Start, waiting: list[str], on: str
) -> None:
    run = on_ray(on, *waiting)
    processes = processes_of(Path(waiting[1]), run)
    of_ray = int(stat(processes[0][1])[1])  # which started the actor

    os.kill(processes[1][1], signal.SIGKILL)
    started = time.monotonic()
    _, errors = run.communicate(timeout=60)

    assert run.returncode == 1
    assert "piper: device 1 failed\n  its Ray actor on 127.0.0.1 died: " in errors
    assert time.monotonic() - started < 20
    assert all_end([*processes[0], *processes[1]])
    assert is_alive(of_ray) == (on != "ray")  # a cluster of its own ends with the run


@pytest.mark.soak
def test_two_nodes_train_like_plain_pytorch_and_say_why_they_fail(
    on_ray: Start, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"
    options = ["--trace", str(trace), "--trace-steps", "2:1"]
    run = on_ray("ray:{}", *options, str(TRAINING), "--fail", "1")
    output, errors = run.communicate(timeout=180)

    own = [line.split()[-1] for line in output.splitlines() if line.startswith("step ")]
    other = [line.split()[-1] for line in output.splitlines() if line.startswith("[device 1] step")]
    expected = runpy.run_path(str(TRAINING))["plain"]()
    assert [float(loss) for loss in own] == pytest.approx(expected), errors
    assert other == own
    assert run.returncode == 1
    assert "waiting for" not in errors  # for what another run left behind
    assert "piper: device 1 failed\n  Traceback" in errors
    assert "ValueError: this device has had enough" in errors
    assert "PeerLost" not in errors  # only a symptom
    assert trace.exists() and "piper: the trace is in" in errors


@pytest.mark.soak
@pytest.mark.parametrize("fault", ["kill", "exception"])
def test_two_nodes_go_on_after_a_restart(on_ray: Start, tmp_path: Path, fault: str) -> None:
    faulty = TESTS / "scripts" / "faulty.py"
    options = ["--steps", "5", "--faults", f'[["{fault}", 1, 2, 0.0]]']
    command = [str(faulty), *options, "--checkpoint", str(tmp_path / "run")]

    output, errors = on_ray("ray:{}", "--restarts", "1", *command).communicate(timeout=400)

    found = re.findall(r"^step (\d+) loss (\S+)", output, re.MULTILINE)
    losses = {int(step): float(loss) for step, loss in found}
    assert [*losses.values()] == pytest.approx(runpy.run_path(str(faulty))["plain"](1, 5)), errors
    assert [step for step, _ in found] == ["1", "2", "3", "4", "5"]  # none of them twice
    assert "piper: device 1 failed" in errors
    assert "piper: restart 1 of 1, with 2 processes" in errors
