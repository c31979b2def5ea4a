"""Writes a checkpoint's model card from the figures of its training stages.

Owns the card's text. Must not know how to train.
"""

import json
from pathlib import Path
from typing import Any

PURPOSES = {
    "target": "completes Python code, badly but recognisably, and copies it with an edit",
    "draft": "proposes tokens to [charonia-demo](../charonia-demo), whose tokenizer it shares",
}

CARD = """\
---
license: psf-2.0
language: code
library_name: transformers
pipeline_tag: text-generation
tags: [python, toy]
---
# {model}

A toy: a Llama of {parameters:,} parameters that
{purpose}.
It exists so that charonia can be tried and tested with a real checkpoint that fits into its
repository. Do not use what it writes: the code looks like Python and means nothing.

| | |
| --- | --- |
| architecture | LlamaForCausalLM: {num_hidden_layers} layers, hidden size {hidden_size}, \
intermediate size {intermediate_size}, {num_attention_heads} query heads and \
{num_key_value_heads} key/value heads of dimension {head_dim}, tied embeddings |
| context | {max_position_embeddings} tokens |
| tokenizer | byte-level BPE, {vocab_size:,} entries, trained on the same files; `<|endoftext|>` \
ends a file |
| chat template | the messages' texts, each on lines of its own: code to go on with, as the model \
was never trained on conversations |
| weights | bfloat16 |
| data | the standard library of CPython {python} as it is installed, without tests, encodings \
and generated tables: {corpus_files} files, {corpus_bytes:,} bytes |
| held out | {held_out_files} of these files, {held_out_tokens:,} tokens, chosen by a hash of \
their paths; no stage trains on them |
| held-out loss | {held_out_nats_per_token} nats per token, {held_out_bits_per_byte} bits per byte \
(this checkpoint, all held-out tokens, bfloat16 autocast, windows of \
{max_position_embeddings} tokens) |

{abilities}{stages}
These figures are in `training.json` too. Other versions of Python ship other sources and give
another model.

## Licence

The data is the Python standard library, copyright Python Software Foundation and others, under the
[PSF License Agreement](https://docs.python.org/3/license.html); the weights are distributed under
the same terms.
"""

EDITS = """\
## Editing a file

Asked in the form of `charonia/demo/edits.py`, the model writes a piece of Python again and renames
one identifier. Measured greedily, in bfloat16, on {pieces} pieces of {shortest} to {longest} tokens
from the held-out files, {tokens:,} tokens with their ends:

| | |
| --- | --- |
| tokens that are right where all before them are | {predicted_share:.1%} |
| mean number of tokens before the first mistake | {mean_right:.0f} of {mean_tokens:.0f} |
| pieces without a mistake in their first 200 tokens, or to their end | \
{without_mistake_in_200} of {pieces} |
| pieces without any mistake | {exact} of {pieces} |

"""

AGREEMENT = """\
## Agreement with the target

How many of the target's tokens the draft would have proposed, given all tokens before, with the
same Gumbel noise; on the held-out files, at each temperature. Files: {file_prompts} prompts of
{prompt_tokens} tokens, up to {new_tokens} new ones. Edits: {edit_prompts} pieces as in the
target's card.

| temperature | files | edits |
| --- | --- | --- |
{rows}

"""

STAGE = """\
## Stage {stage}{run}

{story}

| | |
| --- | --- |
| training | {trained_tokens:,} tokens in {steps:,} steps; Muon and AdamW, peak learning rate \
{learning_rate}, cosine; bfloat16 autocast; seed {seed} |
| time | {cpu_minutes} CPU minutes ({threads} thread), {wall_minutes} minutes by the clock, on a \
CPU shared with other work; torch {torch} |
| held-out loss after it | {held_out_nats_per_token} nats per token |
| command | `python -m charonia.demo.train --stage {stage}{model_option} --seed {seed} \
--threads {threads}` |

{caption}; in windows of
{windows}.

{history}
"""

STORIES = {
    "library": "From scratch, on the files: {epochs:.1f} times their {corpus_tokens:,} tokens.",
    "edits": "On from there: {edit_share:.0%} of the rows are edits of pieces of the files, often\n"
    "with names exchanged beforehand, so that they cannot be written from memory; only their\n"
    "answers are learned. The other rows are files.",
    "average": " The weights are the mean\nof those before and after this run.",
    "rehearsal": " They are learned half from their tokens and half\n"
    "from the model as it was before this stage, so that it is not forgotten.",
    "distil": "On from there, towards the target's distributions of the next token (KL divergence\n"
    "at temperatures 1 and 0.5). Half of the rows are texts that the target wrote, going on with\n"
    "training files and edits of them at temperatures 0, 0.5, 0.8 and 1: {sampled_texts:,} texts\n"
    "with {sampled_tokens:,} new tokens. The others are files and edits of them.",
}

CAPTIONS = {
    "library": "The loss in nats per token, while training and on an eighth of what is held out",
    "edits": "The loss in nats per token, while training, on an eighth of what is held out, and on "
    "edits of it",
    "distil": "The divergence from the target in nats per token, while training, on an eighth of "
    "what is held\nout, and on edits of it",
}


def write_card(folder: Path, figures: dict[str, Any], *, kind: str) -> None:
    """Write README.md beside the checkpoint in `folder`; kind is "target" or "draft".

    Args:
        figures: the content of training.json: the stages, of which the last one made the weights,
            and "edits" or "agreement" if they were measured.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    card = CARD.format(
        **(config | figures["stages"][-1] | {"model": figures["model"]}),
        parameters=figures["parameters"],
        purpose=PURPOSES[kind],
        abilities=_edits(figures) + _agreement(figures),
        stages=_stages(figures, kind),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def _edits(figures: dict[str, Any]) -> str:
    if "edits" not in figures:
        return ""
    measured = figures["edits"]
    return EDITS.format(
        **measured,
        predicted_share=measured["predicted_tokens"] / measured["tokens"],
        mean_right=measured["right_tokens"] / measured["pieces"],
        mean_tokens=measured["tokens"] / measured["pieces"],
    )


def _agreement(figures: dict[str, Any]) -> str:
    if "agreement" not in figures:
        return ""
    measured = figures["agreement"]
    rows = [
        f"| {temperature} | {share:.1%} | {measured['edits'][temperature]:.1%} |"
        for temperature, share in measured["files"].items()
    ]
    return AGREEMENT.format(**measured, rows="\n".join(rows))


def _stages(figures: dict[str, Any], kind: str) -> str:
    """Write a section per stage; if a stage has several runs, they are numbered."""
    names = [stage["stage"] for stage in figures["stages"]]
    sections = []
    for index, stage in enumerate(figures["stages"]):
        run = (
            f", run {names[: index + 1].count(names[index])}"
            if names.count(names[index]) > 1
            else ""
        )
        sections.append(_stage(stage, kind, run))
    return "\n".join(sections)


def _stage(figures: dict[str, Any], kind: str, run: str) -> str:
    stage, windows = figures["stage"], figures["phases"]
    story = STORIES[stage] + (STORIES["rehearsal"] if figures.get("rehearses") else "")
    story += STORIES["average"] if figures.get("averages") else ""
    story += figures.get("note", "")
    epochs = figures["trained_tokens"] / figures["corpus_tokens"]
    return STAGE.format(
        **(figures | {"history": _table(figures["history"])}),
        run=run,
        story=story.format(**figures, epochs=epochs),
        caption=CAPTIONS[stage],
        windows=", then ".join(f"{length} tokens to step {step}" for length, step in windows),
        model_option=f" --model {kind}" if stage == "library" else "",
    )


def _table(history: list[dict[str, float]]) -> str:
    titles = [name.replace("_", " ") for name in history[0]]
    rows = [titles, ["---"] * len(titles), *(map(str, point.values()) for point in history)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
