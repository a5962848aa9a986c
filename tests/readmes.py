"""The commands that the READMEs show, and the files that their examples name."""

import json
import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
READMES = ("README.md", "apps/minirl/README.md", "apps/minirl/README.zh-CN.md")


def commands() -> list[str]:
    """Commands of the shell blocks, in order."""
    found = []
    for name in READMES:
        for block in re.findall(r"```bash\n(.*?)```", (ROOT / name).read_text(), re.DOTALL):
            found += [line.strip() for line in block.splitlines() if line.strip()]
    return list(dict.fromkeys(found))


def app_arguments(command: str) -> list[str]:
    """What a command gives to the app."""
    words = shlex.split(command)
    assert words[:3] == ["uv", "run", "apps/minirl"], command
    return words[3:]


def write_example(directory: Path) -> list[str]:
    """The README's own reward function, and prompts for it; the arguments that name them."""
    text = (ROOT / "apps/minirl/README.md").read_text()
    reward = re.search(r"```python\n# reward.py\n(.*?)```", text, re.DOTALL)[1]
    (directory / "reward.py").write_text(reward)
    lines = [json.dumps({"prompt": f"say {digit}:", "answer": str(digit)}) for digit in range(10)]
    (directory / "prompts.jsonl").write_text("\n".join(lines))
    return [f"data.path={directory}/prompts.jsonl", f"reward.path={directory}/reward.py"]
