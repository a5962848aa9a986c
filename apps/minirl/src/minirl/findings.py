"""What `minirl doctor` finds."""

from dataclasses import dataclass

OK, NOTE, MISSING = "ok", "note", "missing"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        state: `OK`; `NOTE` for what some runs need, or what slows them; `MISSING` for what every
            run needs.
        what: one line.
        remedy: what to do about it; empty if nothing.
    """

    state: str
    what: str
    remedy: str = ""
