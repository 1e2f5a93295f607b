"""Run plans on a clock."""
