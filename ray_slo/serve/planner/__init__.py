"""In the planner's actor: how many workers of what, once per period."""
