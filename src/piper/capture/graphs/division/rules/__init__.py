"""How each operator can be divided. An operator without a rule works on whole tensors."""

from piper.capture.graphs.division.rules import (
    conversions,
    convolutions,
    einsum,
    elementwise,
    lookups,
    products,
    reductions,
    ring,
    rows,
    views,
)
from piper.capture.graphs.division.rules.table import RULES, has_rule, localized, options_of

__all__ = ["RULES", "has_rule", "localized", "options_of"]
TABLES = (
    conversions,
    convolutions,
    einsum,
    elementwise,
    lookups,
    products,
    reductions,
    ring,
    rows,
    views,
)  # fmt: skip  each fills RULES
