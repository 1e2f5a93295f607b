"""What the commands print about a strategy or a simulated step."""
