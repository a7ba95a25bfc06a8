"""How much is tried: so many cases, always the same ones; with ZONEOUT_FUZZ=25 so many times
more, and others.
"""

import os
from typing import Any

from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("ZONEOUT_FUZZ", "1"))


def some(cases: int) -> Any:
    """The settings of a test that tries so many cases."""
    return settings(
        deadline=None,
        derandomize=TIMES == 1,
        database=None,
        max_examples=cases * TIMES,
        suppress_health_check=list(HealthCheck),
    )
