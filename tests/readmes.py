"""The commands that the READMEs show, and the files that their examples name."""

import json
import re
import shlex
from pathlib import Path

import pyarrow
from pyarrow import parquet

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


def program(name: str) -> str:
    """The Python file that the app's README shows in a block that begins with `# NAME`."""
    text = (ROOT / "apps/minirl/README.md").read_text()
    return re.search(rf"```python\n(# {re.escape(name)}.*?)```", text, re.DOTALL)[1]


def write_example(directory: Path) -> list[str]:
    """The README's own reward functions, and prompts for them; the arguments that name them.

    The prompts are there as JSONL, and as parquet with `question` for their column.
    """
    (directory / "reward.py").write_text(program("reward.py"))
    rows = [{"prompt": f"say {digit}:", "answer": str(digit)} for digit in range(10)]
    (directory / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    table = pyarrow.Table.from_pylist(rows).rename_columns(["question", "answer"])
    parquet.write_table(table, directory / "prompts.parquet")
    return [f"data.path={directory}/prompts.jsonl", f"reward.path={directory}/reward.py"]
