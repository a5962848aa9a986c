"""Makes `uv run apps/minirl` run the app."""

import signal

# Ctrl-C while the imports below still run: the end, without a trace.
signal.signal(signal.SIGINT, signal.SIG_DFL)

from minirl.main import run  # noqa: E402

if __name__ == "__main__":
    run()
