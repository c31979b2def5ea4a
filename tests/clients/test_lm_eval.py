"""lm-eval's `local-completions`: log-likelihoods through echo are transformers' in float32."""

import json
import shutil
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import torch
import transformers
from lm_eval.tasks import TaskManager

from clients.calls import FOLDER

CLIENT = "lm-eval local-completions"
TOLERANCE = 1e-4
SETTINGS = [
    "num_concurrent=1",
    "num_concurrent=4",
    "num_concurrent=1,tokenized_requests=False",
]


class Reference:
    """The checkpoint in transformers."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32
        )

    def continuation(self, context: str, continuation: str) -> tuple[float, bool]:
        """The log-likelihood of a continuation, and whether it is the greedy one.

        Spaces at the context's end belong to the continuation, as in lm-eval.
        """
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + continuation
        ids = self.tokenizer.encode(stripped + continuation)
        return self._scored(ids, len(self.tokenizer.encode(stripped)))

    def greedy_choice(self, contexts: list[str]) -> dict[str, Any]:
        """A line of the task whose first choice is the greedy token."""
        for context in contexts:
            ids = self.tokenizer.encode(context)
            with torch.inference_mode():
                best = int(self.model(torch.tensor([ids])).logits[0, -1].argmax())
            choice = self.tokenizer.decode([best])
            if self.tokenizer.encode(context + choice) == [*ids, best]:
                return {"question": context, "choices": [choice, " snail"], "answer": 0}
        raise AssertionError("no context has a greedy token that is a whole text")

    def text(self, text: str) -> float:
        """The log-likelihood of a text after the end-of-text token."""
        ids = [self.tokenizer.eos_token_id, *self.tokenizer.encode(text)]
        return self._scored(ids, 1)[0]

    def _scored(self, ids: list[int], begin: int) -> tuple[float, bool]:
        with torch.inference_mode():
            logits = self.model(torch.tensor([ids])).logits[0, begin - 1 : -1]
        wanted = torch.tensor(ids[begin:])
        taken = logits.log_softmax(-1).gather(1, wanted[:, None])
        return float(taken.sum()), bool((logits.argmax(-1) == wanted).all())


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


@pytest.fixture(scope="module", params=SETTINGS)
def samples(
    request: pytest.FixtureRequest,
    base_url: str,
    model: Path,
    reference: Reference,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, list[dict[str, Any]]]:
    """What lm-eval logs of both tasks, with one greedy choice among the choices."""
    output = tmp_path_factory.mktemp("lm-eval")
    shutil.copytree(FOLDER / "tasks", output / "tasks")
    contexts = [f"{letter} sea snail" for letter in "abcdefghijklmnopqrstuvwxyz"]
    with (output / "tasks" / "choices.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(reference.greedy_choice(contexts)) + "\n")
    arguments = f"model=small,base_url={base_url}/completions,tokenizer={model},{request.param}"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(output)  # the tasks name their data from here
        found = lm_eval.simple_evaluate(
            model="local-completions",
            model_args=arguments,
            tasks=["small_choices", "small_texts"],
            task_manager=TaskManager(include_path="tasks", include_defaults=False),
            log_samples=True,
            bootstrap_iters=0,
        )
    assert found is not None
    samples: dict[str, list[dict[str, Any]]] = found["samples"]
    return samples


def test_log_likelihoods_of_choices(samples: dict[str, Any], reference: Reference) -> None:
    """And whether each choice is the greedy one."""
    assert len(samples["small_choices"]) == 5
    num_greedy = 0
    for sample in samples["small_choices"]:
        doc = sample["doc"]
        for choice, ((found, is_greedy),) in zip(doc["choices"], sample["resps"], strict=True):
            wanted, is_wanted_greedy = reference.continuation(doc["question"], choice)
            assert float(found) == pytest.approx(wanted, abs=TOLERANCE, rel=0)
            assert str(is_greedy) == str(is_wanted_greedy)
            num_greedy += is_wanted_greedy
    assert num_greedy > 0


def test_log_likelihoods_of_texts(samples: dict[str, Any], reference: Reference) -> None:
    """As for perplexities."""
    assert len(samples["small_texts"]) == 2
    for sample in samples["small_texts"]:
        ((found,),) = sample["resps"]
        found = found[0] if isinstance(found, list) else found
        assert float(found) == pytest.approx(
            reference.text(sample["doc"]["text"]), abs=TOLERANCE, rel=0
        )
