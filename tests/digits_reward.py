"""A reward that is learned within a few steps: the share of a completion that is digits.

An untrained policy gets 0.1, as 10 of the embedded model's 95 characters are digits.
"""


def reward(prompts, completions, **columns):
    return [sum(map(str.isdigit, text)) / max(1, len(text)) for text in completions]
