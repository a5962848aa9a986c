"""How property tests run: without limits of time, which a busy machine would break."""

from hypothesis import HealthCheck, settings

_PROFILE = "rl-core"


def no_time_limits() -> None:
    """Call it in a `conftest.py`: examples may take, and be made, as slowly as they like."""
    slow = [HealthCheck.too_slow]
    settings.register_profile(_PROFILE, deadline=None, suppress_health_check=slow)
    settings.load_profile(_PROFILE)
