"""Why plans hang, in the user's words: who waits for whom, and which directive wanted it so."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from piper.errors import BUG, Problem
from piper.ir.dag import Dag
from piper.ir.nodes import Compute
from piper.names import Device, NodeId
from piper.plan.check.excerpts import drawn
from piper.plan.instructions import (
    Plan,
    Run,
    line,
)
from piper.plan.meeting import Channel, Group, Meeting
from piper.plan.rendezvous import Event

PHASES = {
    "F": "forward", "B": "backward", "BI": "backward for inputs", "BW": "backward for weights",
}  # fmt: skip
LEGEND = "    > where it stands, ? what it waits for, ! what another device waits for"


@dataclass(frozen=True, slots=True)
class Wait:
    """A device stands at an instruction, because an earlier one of its own cannot end."""

    device: Device
    at: int
    awaited: int
    mate: Device  # who has not come
    needed: int | None  # where in the plan of the mate it would come; None: nowhere


def explained(
    dag: Dag,
    plans: Mapping[Device, Plan],
    at: Mapping[Device, int],
    awaited: Mapping[Device, int],
    present: Container[Device] | None = None,
) -> Problem:
    """Devices that stand for ever: a circle of them, or one that waits for what nobody does.

    `at`: how far every device is; `awaited`: of those that stand, what has not ended; `present`:
    those that must have a plan (all, unless one of each role is looked at).
    """
    shown, words = walk(plans, at, awaited, present), Words(dag, plans)
    last = shown[-1]
    if last.needed is None:
        head, shown = "something is waited for that never comes", [last]
        story = [words.never(last)]
    else:
        head, story = "these devices wait for each other for ever", list(words.around(shown))
    rest = [device for device in awaited if device not in {wait.device for wait in shown}]
    story += [others_wait(rest)] if rest else []
    text = "".join(f"\n    {row}" for row in story)
    return Problem(f"{head}{text}\n{drawn(plans, marks(shown, at))}\n{LEGEND}", BUG)


def others_wait(devices: Sequence[Device]) -> str:
    names = ", ".join(map(str, devices[:8])) + (", ..." if len(devices) > 8 else "")
    if len(devices) == 1:
        return f"device {names} stands only because of this"
    return f"{len(devices)} other devices stand only because of this: {names}"


def walk(
    plans: Mapping[Device, Plan],
    at: Mapping[Device, int],
    awaited: Mapping[Device, int],
    present: Container[Device] | None,
) -> list[Wait]:
    """Go from a device to one that it waits for, until one comes again (the circle from there on
    is returned) or waits for nothing that will be."""
    seen: dict[Device, int] = {}
    waits: list[Wait] = []
    device = next(iter(awaited))
    while device not in seen:
        seen[device] = len(waits)
        event = device, awaited[device]
        late = (
            (mate, needed)
            for mate, needed in partners(plans, event)
            if (present is None or mate in present) and (needed is None or needed >= at[mate])
        )
        waits.append(Wait(device, at[device], awaited[device], *next(late)))
        if waits[-1].needed is None:
            return waits
        device = waits[-1].mate
    return waits[seen[device] :]


def partners(plans: Mapping[Device, Plan], event: Event) -> Iterator[tuple[Device, int | None]]:
    """The other sides of a meeting: the n-th on a channel meets the n-th, in a group likewise."""
    device, position = event
    meeting = plans[device].instructions[position].meeting(device)
    assert meeting is not None
    number = comings(plans[device], meeting).index(position)
    for mate in meeting.members:
        if mate != device:
            there = comings(plans[mate], meeting) if mate in plans else []
            yield mate, there[number] if number < len(there) else None


def comings(plan: Plan, meeting: Meeting) -> list[int]:
    """Where a device comes to a meeting."""
    ones = enumerate(plan.instructions)
    return [k for k, one in ones if one.meeting(plan.device) == meeting]


def marks(shown: Sequence[Wait], at: Mapping[Device, int]) -> dict[Device, dict[int, str]]:
    found: dict[Device, dict[int, str]] = {wait.device: {} for wait in shown}
    for wait in shown:
        if wait.mate in at:
            found.setdefault(wait.mate, {at[wait.mate]: ">"})
        if wait.needed is not None:
            found[wait.mate][wait.needed] = "!"
    for wait in shown:
        found[wait.device].update({wait.awaited: "?", wait.at: ">"})
    return found


@dataclass(frozen=True, slots=True)
class Words:
    """How a user calls what instructions do."""

    dag: Dag
    plans: Mapping[Device, Plan]

    def never(self, wait: Wait) -> str:
        return f"{self.stands(wait)} for {self.wanted(wait)}, which never {self.verb(wait)} it"

    def around(self, loop: Sequence[Wait]) -> Iterator[str]:
        """The circle as sentences, each of which begins where the one before ended."""
        yield f"{self.stands(loop[0])} for {self.wanted(loop[0])}"
        for before, wait in zip(loop, loop[1:], strict=False):
            yield f"{self.promise(before, wait)}, which waits for {self.wanted(wait)}"
        yield f"{self.promise(loop[-1], loop[0])}, where this began"

    def stands(self, wait: Wait) -> str:
        return f"device {wait.device} waits, before {self.task(wait.device, wait.at)},"

    def promise(self, before: Wait, wait: Wait) -> str:
        """What a device that another one waits for still has to do first."""
        verb, needed = self.verb(before), before.needed
        when = "in" if needed == wait.at else "only after"
        return f"device {wait.device} {verb} it {when} {self.task(wait.device, wait.at)}"

    def verb(self, wait: Wait) -> str:
        match self.meeting(wait):
            case Channel(_, source, _):
                return "receives" if source == wait.device else "sends"
            case Group():
                return "joins"

    def wanted(self, wait: Wait) -> str:
        """What a device waits for, and from whom."""
        mate, one = wait.mate, self.plans[wait.device].instructions[wait.awaited]
        match self.meeting(wait):
            case Channel(_, source, _):
                sends = source == wait.device
                way = "to be received by" if sends else "from"
                return f"{', '.join(one.uses if sends else one.defines)} {way} device {mate}"
            case Group():
                return f"{self.task(wait.device, wait.awaited)} with device {mate}"

    def meeting(self, wait: Wait) -> Meeting:
        found = self.plans[wait.device].instructions[wait.awaited].meeting(wait.device)
        assert found is not None, "only meetings are waited for in vain"
        return found

    def task(self, device: Device, position: int) -> str:
        one = self.plans[device].instructions[position]
        words = self.compute(one) if isinstance(one, Run) else one.task
        return (words or f"«{line(one)}»") + self.signed(one.node)

    def compute(self, run: Run) -> str:
        node = self.dag.nodes.get(run.node)  # type: ignore[call-overload]
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

    def signed(self, node: str) -> str:
        """The directive that put a node where it is, or else the one that made it."""
        orders = [p.maker for p in self.dag.precedences if node in (*p.after, *p.before)]
        made = self.dag.makers.get(NodeId(node))
        found = next((maker for maker in [*orders, *([made] if made else [])] if maker.of), None)
        return f" ({found.name}: directive {found.directive} of {found.of})" if found else ""
