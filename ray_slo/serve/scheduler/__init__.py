"""In the scheduler, an actor or inside the only frontend: when what runs where."""
