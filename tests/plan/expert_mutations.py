"""Mutations of plans with experts: the all-to-all, what experts read, which device holds which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from plan.all_to_all_mutations import (
    all_groups,
    changed_everywhere,
    ends_before_it_is_read,
    ends_while_it_travels,
    ep_streams,
    groups_of_others,
    left_out_everywhere,
    more_or_less,
    of_another_microbatch,
    one_overtakes,
    other_rows,
    other_ways,
    permuted,
    read_of_another_microbatch,
    read_of_another_microbatch_everywhere,
    two_exchanged,
    two_swapped,
)  # fmt: skip
from plan.devices import positions
from plan.mutants import (
    Mutation,
    Plans,
    at_random,
    changed,
    other,
)
from plan.mutations import (
    MUTATIONS,
    doubled,
    dropped,
    moved_to_another_device,
    started_before_it_is_made,
    state_changed,
    wait_removed,
    wrong_field,
)  # fmt: skip
from plan.replica_mutations import REPLICA_MUTATIONS, misused

from piper.plan.instructions import (
    Exchange,
    Free,
    Gather,
    Plan,
    Reduce,
    Run,
    Update,
)  # fmt: skip

READERS = (Run, Exchange, Reduce)


def run_with(
    wanted: Callable[[str], bool],
) -> Callable[[Plans, Random], tuple[Plan, int, str] | None]:
    """A pass that reads a certain value."""

    def find(plans: Plans, random: Random) -> tuple[Plan, int, str] | None:
        found = [
            (plan, k, read)
            for plan in plans
            for k in positions(plan, Run)
            for read in plan.instructions[k].reads
            if wanted(read)
        ]
        return random.choice(found) if found else None

    return find


def reads_instead(plans: Plans, plan: Plan, at: int, old: str, new: str) -> Plans:
    reads = tuple(new if read == old else read for read in plan.instructions[at].reads)
    return changed(plans, plan, at, reads=reads)


def rows_that_stayed_at_home(plans: Plans, random: Random) -> Plans | None:
    """Experts compute on the rows, or with the counts, of their own device."""
    found = run_with(lambda read: "~" in read)(plans, random)
    if found is None:
        return None
    plan, at, read = found
    return reads_instead(plans, plan, at, read, read.partition("~")[0])


def rows_that_are_still_away(plans: Plans, random: Random) -> Plans | None:
    away = {
        w for plan in plans for one in plan.instructions if isinstance(one, Run) for w in one.writes
    }
    found = run_with(lambda read: f"{read}~" in away)(plans, random)
    if found is None:
        return None
    plan, at, read = found
    return reads_instead(plans, plan, at, read, f"{read}~")


def rows_of_another_microbatch(plans: Plans, random: Random) -> Plans | None:
    found = run_with(lambda read: "~" in read)(plans, random)
    if found is None:
        return None
    plan, at, read = found
    wrong = other(random, of_another_microbatch(plan, read))
    return wrong and reads_instead(plans, plan, at, read, wrong)


def shares_exchanged(plans: Plans, random: Random) -> Plans | None:
    """Two devices swap their experts."""
    first, second = random.sample(plans, 2)
    pairs = [
        (a, b)
        for a in first.states
        for b in second.states
        if a.bucket == b.bucket and a.share != b.share
    ]
    if not pairs:
        return None
    a, b = random.choice(pairs)
    now = {first.device: (a, b.share), second.device: (b, a.share)}
    return tuple(
        with_share(plan, *now[plan.device]) if plan.device in now else plan for plan in plans
    )


def with_share(plan: Plan, old: object, share: int) -> Plan:
    states = [replace(s, share=share) if s is old else s for s in plan.states]
    return replace(plan, states=tuple(states))


def all_experts(plans: Plans, random: Random) -> Plans | None:
    """A device has all experts, or those of the group as one shard of ZeRO."""
    plan = random.choice(plans)
    found = [state for state in plan.states if state.shares > 1]
    if not found:
        return None
    old = random.choice(found)
    new = random.choice(
        [
            replace(old, share=0, shares=1),
            replace(old, share=0, shares=1, shard=old.share, ways=old.shares),
            replace(old, shares=2 * old.shares),
        ]
    )
    states = tuple(new if state is old else state for state in plan.states)
    return tuple(replace(p, states=states) if p is plan else p for p in plans)


@at_random(Update)
def updated_by_another_layer(plans: Plans, random: Random, plan: Plan, at: int) -> Plans | None:
    """A share is updated by the gradient of other experts, or of dense parameters."""
    grads = [plan.instructions[k].grad for k in positions(plan, Update)]
    wrong = other(random, grads, plan.instructions[at].grad)
    return None if wrong is None else changed(plans, plan, at, grad=wrong)


EXPERT_MUTATIONS: dict[str, Mutation] = {
    "an Exchange is dropped": dropped(Exchange),
    "an Exchange is dropped everywhere": left_out_everywhere,
    "an Exchange is doubled": doubled(Exchange),
    "an Exchange is on another device": moved_to_another_device(Exchange),
    "an Exchange is another node": wrong_field(Exchange, "node"),
    "an Exchange is in another group": misused(Exchange, "group", all_groups),
    "an Exchange is in another group everywhere": changed_everywhere("group", all_groups),
    "an Exchange is on another stream": misused(Exchange, "stream", ep_streams),
    "an Exchange is on another stream everywhere": changed_everywhere("stream", ep_streams),
    "an Exchange goes another way": misused(Exchange, "way", other_ways),
    "an Exchange goes another way everywhere": changed_everywhere("way", other_ways),
    "an Exchange has other shapes": misused(Exchange, "shapes", other_rows),
    "an Exchange has other shapes everywhere": changed_everywhere("shapes", other_rows),
    "an Exchange reads in another order": permuted("reads"),
    "an Exchange writes in another order": permuted("writes"),
    "an Exchange reads more or less": more_or_less("reads"),
    "an Exchange writes more or less": more_or_less("writes"),
    "an Exchange reads what another one reads": wrong_field(Exchange, "reads"),
    "an Exchange writes what another one writes": wrong_field(Exchange, "writes"),
    "two of a communicator are swapped on one device": two_swapped,
    "two exchanges change places on one device": two_exchanged,
    "an Exchange overtakes another one on one device": one_overtakes,
    "rows of another microbatch are sent": read_of_another_microbatch(0, "counted", "out", "back"),
    "counts of another microbatch are sent": read_of_another_microbatch(-1, "counted"),
    "a route of another microbatch is taken": read_of_another_microbatch(-1, "out", "back"),
    "rows of another microbatch are sent everywhere": read_of_another_microbatch_everywhere(
        0, "counted", "out", "back"
    ),
    "counts of another microbatch are sent everywhere": read_of_another_microbatch_everywhere(
        -1, "counted"
    ),
    "a route of another microbatch is taken everywhere": read_of_another_microbatch_everywhere(
        -1, "out", "back"
    ),
    "experts read rows that stayed at home": rows_that_stayed_at_home,
    "experts read rows of another microbatch": rows_of_another_microbatch,
    "a Run reads rows that are still away": rows_that_are_still_away,
    "nothing waits for an Exchange": wait_removed(Exchange, *READERS),
    "a buffer ends while it is exchanged, a wait is missing": wait_removed(Exchange, Free),
    "a buffer ends right behind its Exchange": ends_while_it_travels,
    "what was exchanged ends before its last use": ends_before_it_is_read,
    "an Exchange does not wait for its rows": started_before_it_is_made(Exchange),
    "a state is another share": state_changed("share"),
    "a state has other shares": state_changed("shares"),
    "two devices have each other's experts": shares_exchanged,
    "a state has all experts": all_experts,
    "a Reduce is among others": misused(Reduce, "group", groups_of_others),
    "a Gather is among others": misused(Gather, "group", groups_of_others),
    "an Update takes another gradient": updated_by_another_layer,
    **{
        f"with experts, {name}": {**MUTATIONS, **REPLICA_MUTATIONS}[name]
        for name in (
            "a Run is dropped", "a Run is doubled", "two Runs are swapped",
            "a Run reads another buffer", "a Run reads in another order", "a Run is another node",
            "a buffer ends before its last use", "a buffer ends twice", "a buffer never ends",
            "a gradient is missing in the Total", "a gradient is in the Total twice",
            "a state is another shard", "a state is missing", "a Reduce is dropped",
            "a Reduce is read before it is there",
        )
    },
}  # fmt: skip
