"""The front door: list of programs, rows, tables, plots, saved runs, and the page."""
