"""Code of the planner's actor: decides the workers and their models, once per period."""
