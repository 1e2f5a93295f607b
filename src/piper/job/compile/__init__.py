"""From a captured model and a strategy to plans, their price, and what each device gets."""
