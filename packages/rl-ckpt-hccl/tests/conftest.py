from rl_core.testing.contract_counts import (
    pytest_collection_modifyitems,
    pytest_terminal_summary,
)

__all__ = ["pytest_collection_modifyitems", "pytest_terminal_summary"]
