"""DAPO's dynamic sampling: which groups of a step are trained on.

Yu et al. 2025, "DAPO" (arXiv:2503.14476), section 3.2: a group whose samples are all right or all
wrong has no advantage and no gradient; such groups are left out, and further prompts are asked
until the batch is full.
"""

from collections.abc import Sequence

from minirl.sampling import Sample


def informative_groups(rewards: Sequence[float | None], groups: Sequence[int]) -> list[int]:
    """Groups whose samples do not all have the same reward, in the order of their first sample.

    Args:
        rewards: one per sample; None where a sample is not rewarded.
        groups: group of each sample.
    """
    found: dict[int, set[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        values = found.setdefault(group, set())
        if reward is not None:
            values.add(reward)
    return [group for group, values in found.items() if len(values) > 1]


def keep_informative(samples: Sequence[Sample], wanted: int) -> int:
    """Mark which samples are trained on: those of the first `wanted` informative groups.

    Looks at rewards as they were scored, not as shaped by length. Returns how many groups that are.
    """
    groups = [sample.group for sample in samples]
    kept = informative_groups([sample.raw_reward for sample in samples], groups)[:wanted]
    chosen = frozenset(kept)
    for sample in samples:
        sample.kept = sample.group in chosen
    return len(kept)
