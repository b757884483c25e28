"""Code of the scheduler, in an actor or in the only frontend: decides what runs when and where."""
