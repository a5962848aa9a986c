"""Contracts that a backend can be tested against, and the doubles they are tested with.

Public API, for our packages and for outsiders' alike (extra `testing`: torch, pytest, hypothesis):

* `rl_core.testing.launcher`: `ProcessLauncher`, objects in subprocesses of their own.

Nothing is imported here, so that a launched process starts without torch and pytest.
"""
