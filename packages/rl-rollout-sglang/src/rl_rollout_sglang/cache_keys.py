"""Which prefixes a request may share: those of the same epoch of the cache.

SGLang looks prefixes up by their tokens and a key. A flush of its cache is refused while a request
holds a part of it, as those do that are paused in place. A new epoch makes what was cached before
unreachable all the same, for everybody but those who hold it.
"""

SEPARATOR = "|"


def keyed(epoch: int, key: str | None) -> str:
    """The key of a request that came in `epoch` and brought `key` (`extra_key`) itself."""
    return f"{epoch}{SEPARATOR}{key or ''}"


def rekeyed(epoch: int, key: str) -> str:
    """The same in another epoch."""
    return keyed(epoch, key.partition(SEPARATOR)[2])
