"""What a user runs: each module is one command, `python -m tasks.NAME`."""

import sys

from tasks.interruption import end_at_signals

if sys.argv[0] == "-m":  # so it is called while Python looks for the module of the command
    end_at_signals()
