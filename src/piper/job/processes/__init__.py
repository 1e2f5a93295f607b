"""What all processes of a job do together: agree, stop, and find the slowest of them."""
