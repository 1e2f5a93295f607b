"""Mailboxes are large enough: a sender waits for a slot at most until the receive starts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pytest
from draws import one_of
from synthetic import chain

from piper import strategies
from piper.job.compile.compiler import compile_strategy
from piper.plan.analyse.mailbox_sizes import Link, mailbox_sizes
from piper.plan.instructions import Plan, Recv, is_dynamic
from piper.plan.instructions.sizes import shape_bytes

TWO_EACH = ("zbv", "dualpipev", "interleaved-1f1b", "interleaved-zb")  # stages per device


def plans(name: str, pp: int, parts: int) -> list[Plan]:
    stages = pp * (2 if name in TWO_EACH else 1)
    strategy = strategies.BUILDERS[name](pp=pp, microbatches=parts)
    return list(compile_strategy(chain(stages), strategy.directives).plans)


def overtaken(plan: Plan, slots: dict[Link, int]) -> Iterator[Recv]:
    """Receives that start while a tensor that nobody has taken is still in their slot."""
    order, taken = defaultdict[Link, list[int]](list), set[int]()
    for k, one in enumerate(plan.instructions):
        taken |= {*one.waits}
        if isinstance(one, Recv):
            link = one.stream, one.peer, plan.device
            before = order[link]
            for _ in one.shapes:
                if len(before) >= slots[link] and before[-slots[link]] not in taken:
                    yield one
                before.append(k)


@one_of(3)
@pytest.mark.parametrize("name", sorted(strategies.BUILDERS))
@pytest.mark.parametrize(("pp", "parts"), [(2, 4), (4, 8)])
def test_slots_are_free_when_a_receive_starts_and_one_less_would_not_be(
    name: str, pp: int, parts: int
) -> None:
    for plan in plans(name, pp, parts):
        sizes = mailbox_sizes(plan)
        recvs = [one for one in plan.instructions if isinstance(one, Recv)]
        assert {(one.stream, one.peer, plan.device) for one in recvs} == set(sizes)
        for one in recvs:
            size = sizes[one.stream, one.peer, plan.device]
            assert all(shape_bytes(shape) <= size.slot_bytes for shape in one.shapes)
        slots = {link: size.slots for link, size in sizes.items()}
        assert not list(overtaken(plan, slots))
        for link, count in slots.items():
            if count > 1:
                assert list(overtaken(plan, {**slots, link: count - 1}))


def test_messages_of_dynamic_size_have_no_mailbox() -> None:
    plan = plans("1f1b", 2, 4)[1]
    first = next(one for one in plan.instructions if isinstance(one, Recv))
    unknown = Recv(first.node, first.value, (((None, 2), "float32"),), 0, first.stream)
    assert is_dynamic(unknown.shapes[0])

    assert not mailbox_sizes(Plan(1, (), (unknown,)))
