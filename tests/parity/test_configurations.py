"""Random configurations, as they may stand in a checkpoint, against transformers in float32.

Each is computed as transformers computes it, or refused for something that was put into it. A few
per architecture; as many as the environment variable CHARONIA_CONFIGURATIONS says for more.
"""

import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from charonia.data.model.config_keys import GENERATION
from charonia.data.model.loader import stored_dtype
from charonia.data.model.spec import ModelSpec
from charonia.errors import CheckpointError
from charonia.protocol import RowSampling, RowStep
from parity.driver import Driver, blocks_for, make_runner, new_row
from parity.reference import greedy, prompt_logprobs, random_prompt
from support import configurations
from support.checkpoints import ARCHITECTURES
from support.configurations import TOKENS, Configuration, base, some

NUM_PROMPT = 9
NUM_NEW = TOKENS - NUM_PROMPT
LOGPROB_TOLERANCE = 1e-4
MARGIN = 1e-3
"""Tokens are compared up to where another one is as likely as that, in log-probability."""
LOGPROBS = RowSampling(seed=0, temperature=0.0, num_logprobs=0, num_prompt_logprobs=0)
NUM_CONFIGURATIONS = int(os.environ.get("CHARONIA_CONFIGURATIONS", "6"))


@pytest.mark.parametrize("seed", range(NUM_CONFIGURATIONS))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_configuration_means_what_transformers_makes_of_it_or_is_refused(
    architecture: str, seed: int, tmp_path: Path
) -> None:
    configuration = some(architecture, seed)
    if configuration.refused is not None:
        with pytest.raises(CheckpointError, match=configuration.refused):
            ModelSpec.from_dir(configuration.write(tmp_path))
        return
    assert_as_in_transformers(configuration.make(tmp_path, seed), seed)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_keys_without_effect_have_none_in_transformers(architecture: str, tmp_path: Path) -> None:
    """All of them at once, beside generation_config.json and without it."""
    prompt = random_prompt(NUM_PROMPT)
    plain = Configuration(base(architecture)).make(tmp_path / "plain", seed=1)
    expected = greedy(plain, prompt, NUM_NEW)
    sampling = configurations.SAMPLING | {"repetition_penalty": 1.0}
    values = base(architecture, **configurations.WITHOUT_EFFECT, **sampling)
    greedily = {key: configurations.REFUSED[key] for key in GENERATION}
    for name, generation in {"alone": None, "beside": {}}.items():
        values |= greedily if generation is not None else {}
        loud = Configuration(values, generation).write(tmp_path / name)
        shutil.copy(plain / "model.safetensors", loud)
        found = greedy(loud, prompt, NUM_NEW)
        assert found.token_ids == expected.token_ids
        assert found.logprobs == pytest.approx(expected.logprobs, abs=LOGPROB_TOLERANCE)
        assert_as_in_transformers(loud, seed=1)


def assert_as_in_transformers(model_dir: Path, seed: int) -> None:
    """Compare tokens, log-probabilities, dtype and the end of a text."""
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    spec = ModelSpec.from_dir(model_dir)
    assert model.dtype is getattr(torch, spec.dtype or stored_dtype(model_dir))
    ends = model.generation_config.eos_token_id
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    assert list(spec.eos_token_ids) == [token_id for token_id in ends if token_id < spec.vocab_size]
    prompt = random_prompt(NUM_PROMPT, seed)
    expected = greedy(model_dir, prompt, NUM_NEW)
    driver = Driver(make_runner(model_dir))
    row = new_row(0, prompt, blocks_for(TOKENS), sampling=LOGPROBS)
    driver.step(RowStep(0, NUM_PROMPT), joins=(row,))
    driver.decode(0, NUM_NEW - 1)
    certain = next((i for i, margin in enumerate(expected.margins) if margin < MARGIN), NUM_NEW)
    assert driver.tokens[0][:certain] == expected.token_ids[:certain]
    logprobs = driver.prompt_logprobs[0] + driver.logprobs[0][:certain]
    assert logprobs == pytest.approx(
        prompt_logprobs(model_dir, prompt) + expected.logprobs[:certain], abs=LOGPROB_TOLERANCE
    )
