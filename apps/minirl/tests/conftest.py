"""Settings of all tests here."""

from rl_core.testing.property_tests import no_time_limits

no_time_limits()
