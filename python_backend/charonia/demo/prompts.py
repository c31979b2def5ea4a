"""The prompts that show the demo model: for `make demo` and the README.

Owns their texts and settings. Must not import anything heavy.
"""

from typing import NamedTuple


class DemoPrompt(NamedTuple):
    """A prompt and its sampling; temperature 0 is greedy and needs no seed."""

    text: str
    max_tokens: int
    temperature: float
    seed: int


# Chosen, with their seeds, for completions with little repetition; each ends with a line.
DEMO_PROMPTS = (
    DemoPrompt(
        'def copy_file(source, target):\n    """Copy a file."""\n',
        max_tokens=87,
        temperature=0.5,
        seed=34,
    ),
    DemoPrompt(
        "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n"
        "    def __repr__(self):\n",
        max_tokens=78,
        temperature=0.5,
        seed=36,
    ),
    DemoPrompt(
        "def main():\n    parser = argparse.ArgumentParser(",
        max_tokens=98,
        temperature=0.5,
        seed=17,
    ),
)
