"""Code of the scheduler, which decides what runs when and where. It runs in an actor, or in the
only frontend."""
