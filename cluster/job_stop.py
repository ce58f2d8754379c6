"""How long a job may take to end once it is stopped: Ray's head decides, when it starts."""

from __future__ import annotations

import os
from collections.abc import Mapping

from cluster.environment import JOB_STOP_WAIT_S

WAIT_VARIABLE = "RAY_JOB_STOP_WAIT_TIME_S"
"""Read by Ray (2.60) in the process that starts a job, whose environment the job has too."""
JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Set by Ray in the processes of a job."""
RAYS_WAIT_S = 3


def short_stop(environ: Mapping[str, str] = os.environ) -> str | None:
    """What to say where `ray job stop` kills a job before it can have saved; None where it waits, or in no job.

    Args:
        environ: Of a job's process.
    """
    if JOB_VARIABLE not in environ:
        return None
    wait_s = environ.get(WAIT_VARIABLE, str(RAYS_WAIT_S))
    if wait_s.isdecimal() and int(wait_s) >= JOB_STOP_WAIT_S:
        return None
    return (
        f"this head kills a job {wait_s} s after `ray job stop`, finished and saved or not: start it with "
        f"{WAIT_VARIABLE}={JOB_STOP_WAIT_S} in its environment, as `cluster.head up` does"
    )
