"""Contracts that a backend can be tested against, and the doubles they are tested with.

Public API, for our packages and for outsiders' alike (extra `testing`: torch, pytest, hypothesis):

* `rl_core.testing.rollout_contract`: `RolloutAdapterContract`;
* `rl_core.testing.train_contract`: `TrainEngineContract`;
* `rl_core.testing.package_contract`: `PackageContract`;
* `rl_core.testing.launcher`: `ProcessLauncher`, objects in subprocesses of their own;
* `rl_core.testing.thread_launcher`: `ThreadLauncher`, the same in threads, for fast tests;
* `rl_core.testing.reference_replica`: `REFERENCE_BACKEND`, a rollout engine in milliseconds;
* `rl_core.testing.weight_set`: `WeightSet`, and leases that spoil their buffer when they end;
* `rl_core.testing.pytest_plugin`: counts what contracts checked; pytest finds it itself.

Nothing heavy is imported here, so that a launched process starts without torch and pytest.
"""

import sys

if "pytest" in sys.modules:
    # Assertions of the contracts then explain themselves as those of a test module do.
    sys.modules["pytest"].register_assert_rewrite(
        *(
            f"{__name__}.{module}"
            for module in (
                "package_contract",
                "rollout_case",
                "rollout_early_contract",
                "rollout_failure_contract",
                "rollout_live_contract",
                "rollout_memory_contract",
                "rollout_pause_contract",
                "rollout_serving_contract",
                "rollout_sync_contract",
                "train_contract",
            )
        )
    )
