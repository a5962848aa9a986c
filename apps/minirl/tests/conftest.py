"""Settings of all tests here."""

import sys
from pathlib import Path

from rl_core.testing.property_tests import no_time_limits

no_time_limits()
sys.path.append(str(Path(__file__).parent))  # what several modules share
