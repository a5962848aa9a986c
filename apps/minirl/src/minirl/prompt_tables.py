"""Rows of parquet files and of Hugging Face datasets as `Dataset.save_to_disk` leaves them.

Both are Arrow tables: pyarrow reads them, the library `datasets` is not needed.
"""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_core.errors import ComponentNotFoundError, ConfigError, in_one_line
from rl_core.metadata import nearest

Record = tuple[str, dict[str, Any]]
"""Where a row is, for messages, and its values by column."""

_PARQUET = b"PAR1"
_STATE = "state.json"
_SPLITS = "dataset_dict.json"


def is_table(path: Path) -> bool:
    """Whether this is a parquet file (by name or content) or a directory."""
    if path.is_dir() or path.suffix == ".parquet":
        return True
    try:
        with path.open("rb") as file:
            return file.read(len(_PARQUET)) == _PARQUET
    except OSError:
        return False


def table_records(path: Path, prompt_key: str) -> Iterator[Record]:
    """The rows, numbered from 0.

    Args:
        path: parquet file, or directory of a saved dataset.
        prompt_key: column of the prompts.

    Errors: ConfigError if it is none of these, cannot be read, or has no such column or one that
    holds no prompts; ComponentNotFoundError without pyarrow.
    """
    arrow = _pyarrow(path)
    number = 0
    try:
        for table in _tables(path, arrow):
            _check_schema(table.schema, prompt_key, path, arrow)
            for batch in table.to_batches():
                for row in batch.to_pylist():
                    yield f"{path} row {number}", row
                    number += 1
    except ConfigError:  # is a ValueError, too
        raise
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {_reason(error)}") from error
    except (arrow.ArrowException, ValueError, LookupError) as error:  # such as a time zone
        raise ConfigError(f"{path}: cannot be read: {in_one_line(error)}") from error


def _pyarrow(path: Path) -> Any:
    try:
        arrow = importlib.import_module("pyarrow")
        importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        msg = f"{path}: to read it, install pyarrow: pip install 'rl-minirl[data]'"
        raise ComponentNotFoundError(msg) from error
    return arrow


def _tables(path: Path, arrow: Any) -> Iterator[Any]:
    if not path.is_dir():
        yield arrow.parquet.read_table(path, partitioning=None)
        return
    for file in _saved_files(path):
        with arrow.memory_map(str(file)) as source:
            yield arrow.ipc.open_stream(source).read_all()


def _saved_files(directory: Path) -> list[Path]:
    """Files of a saved dataset, in order."""
    if (directory / _SPLITS).is_file():
        raise ConfigError(f"{directory}: a dataset with splits; give one of {_splits(directory)}")
    try:
        state = json.loads((directory / _STATE).read_text())
        return [directory / item["filename"] for item in state["_data_files"]]
    except FileNotFoundError:
        msg = f"{directory}: no saved dataset (it has no {_STATE}); give a file or what "
        raise ConfigError(msg + "Dataset.save_to_disk made") from None
    except (LookupError, TypeError) as error:
        raise ConfigError(f"{directory / _STATE}: not as save_to_disk writes it") from error


def _splits(directory: Path) -> str:
    try:
        splits = json.loads((directory / _SPLITS).read_text())["splits"]
        return ", ".join(str(directory / split) for split in splits)
    except (LookupError, TypeError) as error:
        raise ConfigError(f"{directory / _SPLITS}: not as save_to_disk writes it") from error


def _check_schema(schema: Any, prompt_key: str, path: Path, arrow: Any) -> None:
    if prompt_key not in schema.names:
        hint = nearest(prompt_key, schema.names)
        msg = f"{path}: no column {prompt_key!r} (data.prompt_key)"
        raise ConfigError(msg + (f"; the nearest is {hint!r}" if hint else "; it has none"))
    kind = schema.field(prompt_key).type
    if not _may_hold_prompts(kind, arrow.types):
        msg = f"{path}: the column {prompt_key!r} has the type {kind}; a prompt is a text or a list"
        raise ConfigError(f"{msg} of messages with role and content")


def _may_hold_prompts(kind: Any, types: Any) -> bool:
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_string(kind) or types.is_large_string(kind):
        return True
    if not (types.is_list(kind) or types.is_large_list(kind)):
        return "string" in str(kind)  # string_view, where this pyarrow knows it
    item = kind.value_type
    if not types.is_struct(item):
        return False
    return {"role", "content"} <= {item.field(at).name for at in range(item.num_fields)}


def _reason(error: OSError) -> str:
    return error.strerror or in_one_line(error)
