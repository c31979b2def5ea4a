"""The prompts that show the demo model: for `make demo` and the README.

Owns their texts and settings. Must not import anything heavy.
"""

from typing import NamedTuple


class DemoPrompt(NamedTuple):
    """A prompt and how it is completed; temperature 0 is greedy and needs no seed."""

    text: str
    max_tokens: int
    temperature: float
    seed: int


DEMO_PROMPTS = (
    DemoPrompt("class Queue:\n    def __init__(self, maxsize=0):\n", 96, 0.0, 0),
    DemoPrompt("def read_config(path):\n", 96, 0.0, 0),
    DemoPrompt("import os\nimport sys\n", 96, 0.4, 1),
)
