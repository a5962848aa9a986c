"""`minirl`, but every weight sync after the first one is left out: a negative control."""

from minirl.fused_sync import FusedWeightSync
from minirl.main import run

_sync = FusedWeightSync.sync


def _only_the_first(self, version, phase):
    if self.records:
        return self.records[0]
    return _sync(self, version, phase)


FusedWeightSync.sync = _only_the_first

if __name__ == "__main__":
    run()
