"""What a plan says before it runs: memory, traffic, communicators, segments."""
