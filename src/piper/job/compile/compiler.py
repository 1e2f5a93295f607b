"""Compile a strategy: directives, passes, lowering, check."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from piper.costs import Costs, one_core
from piper.directives import Directive
from piper.garbage import collector_off
from piper.ir.by_device.roles import Roles, own_roles, roles
from piper.ir.dag import Dag
from piper.ir.model import Model
from piper.job.compile.replica_sizes import scheduled_dag
from piper.names import Device
from piper.plan.binding import JobGroups, RolePlan, bind
from piper.plan.check.check import check
from piper.plan.check.hardware_queues import first_blocked
from piper.plan.instructions import Plan
from piper.plan.lower.lowering import lower
from piper.plan.lower.role_plans import role_plans
from piper.strategies.cuts import with_cuts


def adam() -> float:
    """The size of Adam's state, in multiples of the parameters."""
    return 2.0


@dataclass(frozen=True)
class Compiled:
    """The final DAG and the checked plans of all devices, or of one device per role."""

    dag: Dag
    plans: tuple[Plan, ...]
    roles: Roles
    costs: Costs  # by which overlapping work was ordered, and stages were cut
    program: tuple[Directive, ...]  # with all that the compiler has chosen
    state: Callable[[], float] = field(
        default=adam, compare=False, repr=False
    )  # tries the optimizer, so only reports call it
    cuts: bool = False  # whether stages were cut by `costs`, not as the strategy says

    @cached_property
    def optimizer(self) -> float:
        """The size of the optimizer's state, in multiples of the parameters."""
        return self.state()

    @cached_property
    def by_role(self) -> tuple[JobGroups, Mapping[Device, RolePlan]]:
        """The groups of all devices, and the plan of each role, to be bound to its devices."""
        return role_plans(self.dag, self.plans, self.roles)

    def plan(self, device: Device) -> Plan:
        groups, found = self.by_role
        return bind(found[self.roles.of[device]], groups, device)

    @cached_property
    def device_plans(self) -> tuple[Plan, ...]:
        """The plans of all devices, in rising order."""
        return tuple(map(self.plan, sorted(self.roles.of)))


def compile_strategy(
    model: Model,
    strategy: Sequence[Directive],
    *,
    clip: bool = False,
    costs: Costs | None = None,
    by_role: bool = False,
    late: bool = False,
    state: Callable[[], float] = adam,
) -> Compiled:
    """Compile a model and a strategy to plans.

    `by_role`: make and check plans for one device of each role only. Other devices make theirs from
    it (`Compiled.plan`), so that a job with very many devices costs what its roles cost. `late`:
    post receives when their messages are about to be sent, as is best on GPUs. `state`: the size
    of the optimizer's, in multiples of the parameters, for reports.
    """
    with collector_off():  # very many objects, no cycles
        known = one_core() if costs is None else costs
        program = with_cuts(strategy, model, known)
        cuts = program != tuple(strategy)
        dag = scheduled_dag(model, program, clip, known)
        known.require(dag.devices)
        found = roles(dag) if by_role else own_roles(dag.devices)
        plans = lowered(dag, found, late)
        check(dag, plans, found.first)
    return Compiled(dag, plans, found, known, program, state, cuts)


def lowered(dag: Dag, found: Roles, late: bool = False) -> tuple[Plan, ...]:
    """The fastest plans that finish with one hardware queue, or plans that need several."""
    fast = lower(dag, found.first, late=late)
    if first_blocked(fast) is None:
        return fast
    if late:
        return lowered(dag, found)
    safe = lower(dag, found.first, careful=True)
    return safe if first_blocked(safe) is None else fast
