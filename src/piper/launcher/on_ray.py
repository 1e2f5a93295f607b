"""Start a run on Ray: an actor for each device, all in one placement group, none left behind.

Ray places the processes, starts them, and notices when they die. It takes no part in a step: the
script gets the same environment as under torchrun, and the processes communicate directly.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from piper.errors import InputError, Problem
from piper.launcher.ending import GRACE, Ended, Report, signals_raise, verdict
from piper.launcher.private_folder import private_folder
from piper.launcher.rank_assignment import assign_ranks
from piper.launcher.supervisor import Supervisor, Update
from piper.names import amount

STORE = "PIPER_STORE"  # the file in which the processes of one host meet
LOCAL = "local"  # Ray's name for a new cluster on this machine
PASSED_ON = ("PIPER_", "NCCL_", "GLOO_", "TORCH", "OMP_", "HF_", "PYTHON")
NOTICE = 20.0  # seconds until Ray reports that a node has died
REACH = 10.0  # seconds to wait for a cluster's head
HOW = {  # how to fix it if Ray does not start; by whether the cluster is new
    True: "check what else runs on this machine, and try again",
    False: "run `ray status` on the head, which needs the same Ray and Python as this host",
}


@dataclass(frozen=True, slots=True)
class Worker:
    """The actor that supervises the process of a device, and the address of its node."""

    actor: Any
    address: str


def run_on_ray(
    address: str,
    script: str,
    arguments: Sequence[str],
    processes: int,
    extra: Mapping[str, str] | None = None,
) -> int:
    """Run a script in several actors. Returns the exit code of the one that failed first."""
    ray = load()
    with (
        meeting_place(address) as store,
        joined(ray, address, processes),
        signals_raise(),
        reserved(ray, processes) as actors,
    ):
        given = {**passed_on(os.environ), **store, **(extra or {})}
        workers = start(ray, actors, [str(Path(script).absolute()), *arguments], given)
        return verdict(watch(ray, workers, store.get(STORE)))


@contextmanager
def meeting_place(address: str) -> Iterator[Mapping[str, str]]:
    """How the processes find each other. On this machine: a file that only its user can read."""
    if address != LOCAL:
        yield {"PIPER_STORE_TOKEN": secrets.token_hex(16)}
        return
    with private_folder("piper-") as folder:
        yield {STORE: f"{folder}/store"}


def load() -> Any:
    """Import Ray, which is optional."""
    try:
        import ray
    except ModuleNotFoundError:
        fix = "write `pip install 'ray>=2.60'`, or leave out --on"
        raise InputError.of("--on ray", "Ray is not installed here", fix) from None
    return ray


def address_of(on: str) -> str:
    """Ray's address of the cluster that the user names. Without a name, one on this machine.

    >>> address_of("ray"), address_of("ray:10.0.0.1:6379"), address_of("ray://head:10001")
    ('local', '10.0.0.1:6379', 'ray://head:10001')
    """
    if on == "ray":
        return LOCAL
    if not on.startswith("ray:") or on.endswith((":", "/")):
        fix = "write `ray` (this machine), `ray:auto`, `ray:HOST:PORT` or `ray://HOST:PORT`"
        raise InputError.of("--on", f"{on!r} is not a cluster that Piper can use", fix)
    return on if on.startswith("ray://") else on.removeprefix("ray:")


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of the user that make sense on other hosts too.

    >>> passed_on({"NCCL_DEBUG": "INFO", "HOME": "/root"})
    {'NCCL_DEBUG': 'INFO'}
    """
    return {name: value for name, value in environment.items() if name.startswith(PASSED_ON)}


@contextmanager
def joined(ray: Any, address: str, processes: int) -> Iterator[None]:
    """Inside, this process is a driver of the cluster, or of a new one for this run only."""
    refuse_unreachable(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it sends usage data otherwise
    cores = {"num_cpus": max(processes, os.cpu_count() or 1), "include_dashboard": False}
    try:
        enter(ray, address, cores if address == LOCAL else {})
        yield
    finally:
        ray.shutdown()


def enter(ray: Any, address: str, own: Mapping[str, Any]) -> None:
    """Ray gives a new cluster half a minute to start. On a busy host, try twice."""
    for more in reversed(range(2 if own else 1)):
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", **own)
            return
        except Exception as error:  # Ray raises a plain Exception if a node is too slow
            ray.shutdown()
            if not more:
                raise InputError.of("--on", f"{address}: {error}", HOW[bool(own)]) from error


def refuse_unreachable(address: str) -> None:
    """Fail at once: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH).close()
    except OSError as error:
        fix = "write the address that `ray start --head` printed, and check that it still runs"
        problem = Problem(f"nothing answers at {host}:{port} ({error})", fix)
        raise InputError("--on", problem) from error


@contextmanager
def reserved(ray: Any, processes: int) -> Iterator[list[Any]]:
    """Inside, there is an actor for each process, on its own GPU if the cluster has any."""
    wanted = os.environ.get("PIPER_DEVICE") or "cuda"
    kind = "GPU" if wanted == "cuda" and ray.cluster_resources().get("GPU") else "CPU"
    refuse_too_few(int(ray.cluster_resources().get(kind, 0)), kind, processes)
    group = ray.util.placement_group([{kind: 1}] * processes, strategy="PACK")
    actors: list[Any] = []
    try:
        wait_for(group, f"{processes} {kind}s")
        actors += [actor_in(ray, group, kind, index) for index in range(processes)]
        yield actors
    finally:
        for actor in actors:
            ray.kill(actor)
        ray.util.remove_placement_group(group)


def refuse_too_few(count: int, kind: str, processes: int) -> None:
    if count < processes:
        fix = "add nodes, or use fewer processes"
        fix += "" if kind == "CPU" else "; or set PIPER_DEVICE=cpu to use CPUs"
        raise InputError.of(
            "--on", f"the run needs {amount(processes, kind)}, the cluster has {count}", fix
        )


def wait_for(group: Any, wanted: str) -> None:
    """Wait while other users occupy the resources."""
    if not group.wait(2):
        print(f"piper: waiting for {wanted} of the cluster (Ctrl-C ends it)", file=sys.stderr)
        while not group.wait(5):
            pass


def actor_in(ray: Any, group: Any, kind: str, index: int) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    needs = {"num_cpus": int(kind == "CPU"), "num_gpus": int(kind == "GPU")}
    return ray.remote(Supervisor).options(scheduling_strategy=place, **needs).remote()


def start(
    ray: Any, actors: Sequence[Any], script: Sequence[str], given: Mapping[str, str]
) -> list[Worker]:
    """Assign ranks and start the processes. Returns the workers, by rank."""
    here = ray.get_runtime_context().get_node_id()
    try:
        places = ray.get([actor.place.remote() for actor in actors])
        found = assign_ranks(places, here)
        rendezvous = ray.get(actors[found[0].index].rendezvous.remote())
        own = [{**given, **one.environment(len(actors), *rendezvous)} for one in found]
        workers = [Worker(actors[one.index], places[one.index].address) for one in found]
        ray.get(
            [
                worker.actor.start.remote(script, os.getcwd(), environment)
                for worker, environment in zip(workers, own, strict=True)
            ]
        )
    except ray.exceptions.RayError as error:
        fix = "check that the nodes are up, and that all have the same versions of Piper and torch"
        raise InputError.of("--on", f"actors did not start: {why(error)}", fix) from error
    return workers


def watch(ray: Any, workers: Sequence[Worker], store: str | None = None) -> list[Ended]:
    """Print their output until all have ended. After a failure, wait a few seconds more.

    On this machine, the others see beside the store that a process reached its end.
    """
    asked = {worker.actor.update.remote(): rank for rank, worker in enumerate(workers)}
    ended: list[Ended] = []
    until = float("inf")
    while asked and time.monotonic() < until:
        ready, _ = ray.wait(list(asked), num_returns=1, timeout=1.0)
        for reference in ready:
            rank = asked.pop(reference)
            failed = any(process.code for process in ended)
            update = next_update(ray, reference, workers[rank].address, failed)
            show(rank, update)
            if update.code is None:
                asked[workers[rank].actor.update.remote()] = rank
                continue
            if store and update.code == 0:
                Path(store).with_name(f"ended-{rank}").touch()
            why = update.report
            now = time.monotonic()
            ended.append(Ended(rank, update.code, now, why.reason, why.culprit, line=why.line))
            until = min(until, time.monotonic() + time_after(ended[-1]))
    return ended


def time_after(process: Ended) -> float:
    """Seconds to wait for the others. After a symptom, the cause may come late: a dead node."""
    if not process.code:
        return float("inf")
    known = process.is_cause or process.culprit is not None  # it says who does not answer
    return GRACE if known else NOTICE


def next_update(ray: Any, reference: Any, address: str, failed: bool) -> Update:
    """The next update of an actor, or a final one if the actor or its node is dead.

    An actor that cannot be reached may come back. Ray reports after some seconds whether it is
    dead. If others have already `failed`, the lost actor is the reason.
    """
    try:
        update: Update = ray.get(reference)
    except ray.exceptions.ActorUnavailableError:
        if failed:
            return lost(f"its Ray actor cannot be reached: {address} is down, or not reachable")
        time.sleep(0.2)
        return Update()
    except ray.exceptions.RayError as error:
        return lost(f"its Ray actor on {address} died: {why(error)}")
    return update


def lost(reason: str) -> Update:
    lines = textwrap.fill(reason, 100, initial_indent="  ", subsequent_indent="  ")
    return Update(code=1, report=Report(lines))


def why(error: Exception) -> str:
    """Ray's reason for a death, without its ids.

    >>> why(Exception("It died.\\n\\tactor_id: 8\\n\\tip: 10.0.0.7\\nIts node has died.\\n"))
    'Its node has died.'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else repr(error)


def show(rank: int, update: Update) -> None:
    """Print the lines of a device, with its name unless it is the first."""
    sign = f"[device {rank}] " if rank else ""
    for is_error, line in update.lines:
        print(sign + line, file=sys.stderr if is_error else sys.stdout)
    sys.stdout.flush()
    sys.stderr.flush()
