"""The front door: which programs there are, their rows, tables and plots, saved runs, the page."""
