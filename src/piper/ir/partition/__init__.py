"""Cut weights into stages, and choose options within a limit."""
