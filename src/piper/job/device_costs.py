"""The machine that a job is compiled for: stages are cut and work is ordered by its costs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from piper.costs import Costs, mode_of, read_costs
from piper.costs.devices import DEVICES, DeviceKind, costs_of_device
from piper.costs.links import NETWORKS
from piper.costs.modes import Mode
from piper.errors import StrategyError
from piper.ir.model import Model
from piper.job.options import Options


@dataclass(frozen=True, slots=True)
class TargetMachine:
    """Costs that were given, or a data sheet, which needs the model: types differ in speed."""

    given: Costs
    sheet: DeviceKind | None = None

    @property
    def mode(self) -> Mode:
        return self.given.mode

    def costs(self, model: Model) -> Costs:
        if self.sheet is None:
            return self.given
        network = NETWORKS[self.sheet.name]
        return costs_of_device(self.sheet, model, network).in_mode(self.mode)


def target_machine(options: Options, device: torch.device) -> TargetMachine:
    """Given costs if there are any; else the data sheet that is named or that of the GPU, if it is
    known; else estimates for one CPU core."""
    costs, mode = options.costs, mode_of(options.compiled, options.graphs)
    kind = kind_of(device) if costs is None else costs
    if isinstance(kind, str) and kind in DEVICES:
        return TargetMachine(Costs(mode=mode), DEVICES[kind])
    refuse_missing(costs)
    return TargetMachine(read_costs(costs, mode))


def refuse_missing(costs: object) -> None:
    if isinstance(costs, str | Path) and not Path(costs).is_file():
        fix = f"give a file that `tune` or --profile wrote, or one of {', '.join(DEVICES)}"
        raise StrategyError.of("costs", f"there is no file {str(costs)!r}", fix)


def kind_of(device: torch.device) -> str | None:
    """Its name in the data sheets, if it has one."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device).lower()
    return next((kind for kind in DEVICES if kind in name), None)
