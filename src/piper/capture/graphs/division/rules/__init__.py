"""How each operator can be divided. An operator without a rule works on whole tensors."""

from piper.capture.graphs.division.rules import (
    conversions,
    elementwise,
    lookups,
    products,
    reductions,
    ring,
    views,
)
from piper.capture.graphs.division.rules.table import RULES, has_rule, localized, options_of

__all__ = ["RULES", "has_rule", "localized", "options_of"]
TABLES = (conversions, elementwise, lookups, products, reductions, ring, views)  # each fills RULES
