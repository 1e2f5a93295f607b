"""What makes a DAG valid at each stage: one rule, one function, named by what is true."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from piper.errors import Problem, Refused
from piper.ir.dag import Dag
from piper.ir.rules.divisions import (
    cut_parameters_are_used_in_divided_regions,
    divided_regions_have_their_devices,
    every_redistribution_fits_its_conversion,
    experts_of_a_team_take_parts_of_its_rows,
    groups_are_the_same_in_every_stage,
    regions_beside_divided_ones_have_whole_teams,
)
from piper.ir.rules.experts import (
    experts_are_where_they_are_placed,
    experts_have_one_replica_on_a_device,
    groups_fit_the_experts,
    neighbours_of_experts_are_with_them,
)
from piper.ir.rules.flow import (
    every_gradient_is_counted_once,
    every_read_has_a_writer,
    every_read_is_local,
    every_value_is_written_once,
    host_memory_is_read_by_copies_only,
    nothing_waits_for_itself,
    orders_name_all_microbatches_or_none,
)
from piper.ir.rules.messages import (
    every_message_fits_what_it_carries,
    every_update_has_all_gradients,
)
from piper.ir.rules.placement import (
    backward_runs_where_forward_ran,
    buffers_that_change_are_on_one_device,
    every_microbatch_of_a_region_is_placed_alike,
    every_region_is_placed,
    every_stream_with_a_share_is_used,
    neighbours_have_equally_many_replicas,
)
from piper.ir.rules.replicas import (
    replicas_are_kept_equal,
    replicas_are_where_they_are_placed,
    replicas_compute_with_no_buffers_they_update,
    replicas_that_update_buffers_have_devices_of_their_own,
    replicas_update_what_they_compute_with_once,
)
from piper.ir.rules.shape import (
    every_node_fits_its_region,
    parameters_are_whole_where_they_are_used,
)

Rule = Callable[[Dag], Iterator[Problem]]

CAPTURED: tuple[Rule, ...] = (
    every_read_has_a_writer,
    every_value_is_written_once,
    every_node_fits_its_region,
    every_message_fits_what_it_carries,
    every_redistribution_fits_its_conversion,
    every_update_has_all_gradients,
    nothing_waits_for_itself,
    every_gradient_is_counted_once,
)
PLACED: tuple[Rule, ...] = (
    every_region_is_placed,
    backward_runs_where_forward_ran,
    every_microbatch_of_a_region_is_placed_alike,
    neighbours_have_equally_many_replicas,
    replicas_are_where_they_are_placed,
    experts_are_where_they_are_placed,
    experts_have_one_replica_on_a_device,
    neighbours_of_experts_are_with_them,
    groups_fit_the_experts,
    divided_regions_have_their_devices,
    regions_beside_divided_ones_have_whole_teams,
    groups_are_the_same_in_every_stage,
    experts_of_a_team_take_parts_of_its_rows,
    cut_parameters_are_used_in_divided_regions,
    replicas_are_kept_equal,
    replicas_compute_with_no_buffers_they_update,
    replicas_update_what_they_compute_with_once,
    replicas_that_update_buffers_have_devices_of_their_own,
    buffers_that_change_are_on_one_device,
    orders_name_all_microbatches_or_none,
)
LOWERABLE: tuple[Rule, ...] = (
    *CAPTURED,
    every_read_is_local,
)
ORDERED: tuple[Rule, ...] = (nothing_waits_for_itself,)
GATHERED: tuple[Rule, ...] = (
    *LOWERABLE,
    parameters_are_whole_where_they_are_used,
)
OFFLOADED: tuple[Rule, ...] = (
    *GATHERED,
    host_memory_is_read_by_copies_only,
)
FINAL: tuple[Rule, ...] = (every_stream_with_a_share_is_used,)


# A new temporal edge can break these, so they are checked again each time.
ABOUT_ORDER = (nothing_waits_for_itself, orders_name_all_microbatches_or_none)


def require(dag: Dag, rules: tuple[Rule, ...]) -> None:
    """Raise if the DAG breaks a rule. The first broken rule reports all its problems."""
    for rule in rules:
        if rule in dag.proven:
            continue
        problems = list(rule(dag))
        if problems:
            raise Refused(*problems)
        if rule not in ABOUT_ORDER:
            dag.proven.add(rule)
