"""Measurements of this machine with the real parts: `python -m tasks.bench --help`."""
