"""What a forward calls for a microbatch and for the whole batch, and what that does to rows."""
