"""Whether a job fits in memory, and the choices that make it fit."""
