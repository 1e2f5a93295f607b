"""The machine that a job is compiled for: stages are cut and work is ordered by its costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from piper.costs import Costs, mode_of, read_costs
from piper.costs.device_lists import devices_by_name
from piper.costs.devices import DEVICES, DeviceKind, costs_of_device
from piper.costs.links import NETWORKS, Network
from piper.costs.modes import Mode
from piper.errors import StrategyError
from piper.ir.model import Model
from piper.job.options import Options
from piper.names import Device

Kind = Costs | DeviceKind  # costs that were given, or a data sheet


@dataclass(frozen=True, slots=True)
class TargetMachine:
    """Kinds of devices. What a data sheet means needs the model: types differ in speed."""

    kinds: tuple[tuple[Kind, tuple[Device, ...]], ...]  # no devices are listed for a single kind
    mode: Mode

    def costs(self, model: Model) -> Costs:
        """Those of the first kind, which know those of all devices."""
        each = tuple((devices, self.of_kind(kind, model)) for kind, devices in self.kinds)
        first = each[0][1]
        return first if len(each) == 1 else replace(first, kinds=each)

    def of_kind(self, kind: Kind, model: Model) -> Costs:
        if isinstance(kind, Costs):
            return kind.in_mode(self.mode)
        return costs_of_device(kind, model, self.network(kind)).in_mode(self.mode)

    def network(self, kind: DeviceKind) -> Network:
        """Messages between kinds go over the slowest of their networks."""
        sheets = [other for other, _ in self.kinds if isinstance(other, DeviceKind)]
        networks = [NETWORKS[one.name] for one in sheets or [kind]]
        return min(networks, key=lambda one: one.between.bandwidth)


def target_machine(options: Options, device: torch.device) -> TargetMachine:
    """Given costs if there are any; else the data sheet that is named or that of the GPU, if it is
    known; else estimates for one CPU core. Several kinds are named with their devices."""
    costs, mode = options.costs, mode_of(options.compiled, options.graphs)
    given = kind_of(device) if costs is None else costs
    if isinstance(given, str) and not Path(given).is_file():
        named = devices_by_name(given)
        kinds = tuple((kind_named(name, mode), devices) for name, devices in named.items())
        return TargetMachine(kinds, mode)
    refuse_missing(costs)
    return TargetMachine(((read_costs(costs, mode), ()),), mode)


def kind_named(name: str, mode: Mode) -> Kind:
    """A data sheet, or a file of costs."""
    if name in DEVICES:
        return DEVICES[name]
    refuse_missing(name)
    return read_costs(name, mode)


def refuse_missing(costs: object) -> None:
    if isinstance(costs, str | Path) and not Path(costs).is_file():
        fix = (
            f"give a file that `tune` or --profile wrote, or one of {', '.join(DEVICES)}, or "
            "several with their devices: h200:0-3,a100:4-7"
        )
        raise StrategyError.of("costs", f"there is no file {str(costs)!r}", fix)


def kind_of(device: torch.device) -> str | None:
    """Its name in the data sheets, if it has one."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device).lower()
    return next((kind for kind in DEVICES if kind in name), None)
