"""Python runs this at the start of each process of a command under test, which has this folder on its PYTHONPATH."""

import os

if "MEGATRAIN_INTERRUPT" in os.environ:
    from support import interrupts

    interrupts.install()
if "MEGATRAIN_INSIDE" in os.environ:
    from support import durability, traps

    traps.install()
    durability.install()
