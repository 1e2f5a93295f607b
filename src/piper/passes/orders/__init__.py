"""Orders that name messages and updates, once these are nodes."""
