"""The brain of the planners `herd` and `partition`: it plans groups, and moves workers to them."""
