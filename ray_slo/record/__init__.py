"""The decision logs of schedulers and the plan logs of planners: rows, encoding, reading."""
