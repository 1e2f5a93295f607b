"""What regions, messages and updates take on a kind of device, measured or estimated."""

from piper.costs.costs import Costs, one_core, read_costs
from piper.costs.modes import mode_of

__all__ = ["Costs", "mode_of", "one_core", "read_costs"]
