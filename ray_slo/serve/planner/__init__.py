"""Code of the planner's actor, which decides the workers and their models once per period."""
