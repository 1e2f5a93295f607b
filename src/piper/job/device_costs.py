"""Costs of the device of this process, for choices that depend on how fast it is."""

from __future__ import annotations

from dataclasses import replace

import torch

from piper.costs import Costs
from piper.costs.devices import DEVICES, costs_of_device
from piper.costs.links import NETWORKS
from piper.ir.model import Model


def device_costs(device: torch.device, costs: Costs, model: Model) -> Costs:
    """Measured costs if there are any, else those of the GPU's data sheet, if it is known.

    Bytes are counted operator by operator: repeating one that only moves bytes takes time, too.
    """
    kind = kind_of(device)
    if costs.figures or kind is None:
        return replace(costs, ahead=True)
    return costs_of_device(DEVICES[kind], model, NETWORKS[kind]).in_mode(costs.mode)


def kind_of(device: torch.device) -> str | None:
    """Its name in the data sheets, if it has one."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device).lower()
    return next((kind for kind in DEVICES if kind in name), None)
