"""What the user's code reads that is outside of the program: its environment, files, settings."""
