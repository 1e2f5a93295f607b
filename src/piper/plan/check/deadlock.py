"""Explain a deadlock: which device waits for which, and which directives led to it."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from piper.errors import BUG, Problem
from piper.ir.by_device.local_dags import shared_nodes
from piper.ir.dag import Dag
from piper.ir.nodes import Compute
from piper.names import Device, NodeId
from piper.plan.check.excerpts import side_by_side
from piper.plan.instructions import Plan, Run, line
from piper.plan.instructions.communicator import Channel, Communicator, Group
from piper.plan.rendezvous import Event

PHASES = {
    "F": "forward", "B": "backward", "BI": "backward for inputs", "BW": "backward for weights",
}  # fmt: skip
LEGEND = "    > where it is blocked, ? what it waits for, ! what another device waits for"


@dataclass(frozen=True, slots=True)
class Wait:
    """A device is blocked at an instruction, because an earlier message of it cannot complete."""

    device: Device
    at: int
    awaited: int  # the earlier message
    peer: Device  # a device that has not issued its side of the message
    needed: int | None  # where the peer's plan issues it; None: nowhere


def explained(
    dag: Dag,
    plans: Mapping[Device, Plan],
    at: Mapping[Device, int],
    awaited: Mapping[Device, int],
    present: Container[Device] | None = None,
) -> Problem:
    """A cycle of blocked devices, or a device that waits for a message that never comes.

    `at` is the position of every device. `awaited` is the message that each blocked device waits
    for. `present` are the devices that must have a plan (None: all).
    """
    shown, sentences = walk(plans, at, awaited, present), Sentences(dag, plans, shared_nodes(dag))
    last = shown[-1]
    if last.needed is None:
        head, shown = "deadlock: a device waits for a message that never comes", [last]
        lines = [sentences.never(last)]
    else:
        head, lines = "deadlock: these devices wait for each other", list(sentences.around(shown))
    rest = [device for device in awaited if device not in {wait.device for wait in shown}]
    lines += [others_wait(rest)] if rest else []
    text = "".join(f"\n    {line}" for line in lines)
    return Problem(f"{head}{text}\n{side_by_side(plans, marks(shown, at))}\n{LEGEND}", BUG)


def others_wait(devices: Sequence[Device]) -> str:
    names = ", ".join(map(str, devices[:8])) + (", ..." if len(devices) > 8 else "")
    if len(devices) == 1:
        return f"device {names} is blocked only because of this"
    return f"{len(devices)} other devices are blocked only because of this: {names}"


def walk(
    plans: Mapping[Device, Plan],
    at: Mapping[Device, int],
    awaited: Mapping[Device, int],
    present: Container[Device] | None,
) -> list[Wait]:
    """Follow blocked devices from one to the next.

    Stops at a device that was seen before, and returns the cycle from there on; or at a device that
    waits for a message that never comes.
    """
    seen: dict[Device, int] = {}
    waits: list[Wait] = []
    device = next(iter(awaited))
    while device not in seen:
        seen[device] = len(waits)
        event = device, awaited[device]
        late = (
            (peer, needed)
            for peer, needed in partners(plans, event)
            if (present is None or peer in present) and (needed is None or needed >= at[peer])
        )
        waits.append(Wait(device, at[device], awaited[device], *next(late)))
        if waits[-1].needed is None:
            return waits
        device = waits[-1].peer
    return waits[seen[device] :]


def partners(plans: Mapping[Device, Plan], event: Event) -> Iterator[tuple[Device, int | None]]:
    """The other sides of a message: the n-th on a communicator matches the n-th of every member."""
    device, position = event
    communicator = plans[device].instructions[position].communicator(device)
    assert communicator is not None
    number = arrivals(plans[device], communicator).index(position)
    for peer in communicator.members:
        if peer != device:
            there = arrivals(plans[peer], communicator) if peer in plans else []
            yield peer, there[number] if number < len(there) else None


def arrivals(plan: Plan, communicator: Communicator) -> list[int]:
    """The positions at which a plan uses a communicator."""
    ones = enumerate(plan.instructions)
    return [k for k, one in ones if one.communicator(plan.device) == communicator]


def marks(shown: Sequence[Wait], at: Mapping[Device, int]) -> dict[Device, dict[int, str]]:
    found: dict[Device, dict[int, str]] = {wait.device: {} for wait in shown}
    for wait in shown:
        if wait.peer in at:
            found.setdefault(wait.peer, {at[wait.peer]: ">"})
        if wait.needed is not None:
            found[wait.peer][wait.needed] = "!"
    for wait in shown:
        found[wait.device].update({wait.awaited: "?", wait.at: ">"})
    return found


@dataclass(frozen=True, slots=True)
class Sentences:
    """Sentences about instructions, in the user's words."""

    dag: Dag
    plans: Mapping[Device, Plan]
    nodes: Mapping[NodeId, NodeId]  # of the DAG, by what devices call them

    def never(self, wait: Wait) -> str:
        return f"{self.blocked(wait)} for {self.wanted(wait)}, which never {self.verb(wait)} it"

    def around(self, loop: Sequence[Wait]) -> Iterator[str]:
        """One sentence per device of the cycle. Each begins where the one before it ended."""
        yield f"{self.blocked(loop[0])} for {self.wanted(loop[0])}"
        for before, wait in zip(loop, loop[1:], strict=False):
            yield f"{self.promise(before, wait)}, which waits for {self.wanted(wait)}"
        yield f"{self.promise(loop[-1], loop[0])}, which closes the cycle"

    def blocked(self, wait: Wait) -> str:
        return f"device {wait.device} waits, before {self.task(wait.device, wait.at)},"

    def promise(self, before: Wait, wait: Wait) -> str:
        """What a device must do first before it does what another device waits for."""
        verb, needed = self.verb(before), before.needed
        when = "in" if needed == wait.at else "only after"
        return f"device {wait.device} {verb} it {when} {self.task(wait.device, wait.at)}"

    def verb(self, wait: Wait) -> str:
        match self.communicator(wait):
            case Channel(_, source, _):
                return "receives" if source == wait.device else "sends"
            case Group():
                return "joins"

    def wanted(self, wait: Wait) -> str:
        """What a device waits for, and from which device."""
        peer, one = wait.peer, self.plans[wait.device].instructions[wait.awaited]
        match self.communicator(wait):
            case Channel(_, source, _):
                sends = source == wait.device
                way = "to be received by" if sends else "from"
                return f"{', '.join(one.uses if sends else one.defines)} {way} device {peer}"
            case Group():
                return f"{self.task(wait.device, wait.awaited)} with device {peer}"

    def communicator(self, wait: Wait) -> Communicator:
        found = self.plans[wait.device].instructions[wait.awaited].communicator(wait.device)
        assert found is not None, "only messages can block a device"
        return found

    def task(self, device: Device, position: int) -> str:
        one = self.plans[device].instructions[position]
        sentences = self.compute(one) if isinstance(one, Run) else one.task
        return (sentences or f"«{line(one)}»") + self.directive(one.node)

    def compute(self, run: Run) -> str:
        node = self.dag.nodes.get(self.nodes.get(NodeId(run.node), NodeId(run.node)))
        if not isinstance(node, Compute):
            return run.node
        return f"{PHASES[node.phase]} of {self.region(node)}{self.part(node)}"

    def region(self, node: Compute) -> str:
        split = dict(self.dag.dimensions)
        tags = [f"{key}={index}" for key, index in node.tags if key not in split]
        run = self.dag.model.by_id[node.region].run
        return ", ".join([*tags, *([f"RUN={run}"] if run else [])]) or node.region

    def part(self, node: Compute) -> str:
        tags = dict(node.tags)
        split = [name for name, _ in self.dag.dimensions if name in tags]
        if len(split) == 1:
            return f" on microbatch {tags[split[0]]}"
        return f" on {', '.join(f'{name}={tags[name]}' for name in split)}" if split else ""

    def directive(self, node: str) -> str:
        """The directive that ordered a node, or else the one that made it."""
        name = self.nodes.get(NodeId(node), NodeId(node))
        orders = [p.maker for p in self.dag.precedences if name in (*p.after, *p.before)]
        made = self.dag.makers.get(name)
        found = next((maker for maker in [*orders, *([made] if made else [])] if maker.of), None)
        return f" ({found.name}: directive {found.directive} of {found.of})" if found else ""
