"""A complete RL loop on Ray that proves which weights the rollout engine serves."""

import os

# Under `uv run`, Ray would copy the working directory for its workers and start each of them with
# a `uv run` of its own there. They are to run in the driver's environment. Ray reads this when it
# is imported, so it has to be said before that.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
