"""The Python files that the app's README shows."""

import re
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "apps" / "minirl" / "README.md"


def readme_program(name: str) -> str:
    """The block that begins with `# NAME`."""
    return re.search(rf"```python\n(# {re.escape(name)}.*?)```", README.read_text(), re.DOTALL)[1]
