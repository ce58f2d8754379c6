"""What a user runs: each module is one command, `python -m tasks.NAME`."""
