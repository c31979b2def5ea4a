"""Writes a checkpoint's model card from the figures of its training run.

Owns the card's words. Must not know how to train.
"""

import json
from pathlib import Path
from typing import Any

PURPOSES = {
    "target": "completes Python code, badly but recognisably",
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
| weights | bfloat16 |
| data | the standard library of CPython {python} as it is installed, without tests, encodings \
and generated tables: {corpus_files} files, {corpus_bytes:,} bytes |
| held out | {held_out_files} of these files, {held_out_tokens:,} tokens, chosen by a hash of \
their paths |
| training | {trained_tokens:,} tokens ({epochs:.1f} times the {corpus_tokens:,} tokens of the \
data) in {steps:,} steps; Muon and AdamW, peak learning rate {learning_rate}, cosine; bfloat16 \
autocast; seed {seed} |
| time | {cpu_minutes} CPU minutes ({threads} thread), {wall_minutes} minutes by the clock, on a \
CPU shared with other work; torch {torch} |
| held-out loss | {held_out_nats_per_token} nats per token, {held_out_bits_per_byte} bits per byte \
(this checkpoint, all held-out tokens, bfloat16 autocast, windows of \
{max_position_embeddings} tokens) |
| command | `python -m charonia.demo.train --model {kind} --seed {seed} --threads {threads}` |

These figures are in `training.json` too. Other versions of Python ship other sources and give
another model.

## The course of the loss

In nats per token; held out on an eighth of the windows, with the context that is being trained:
256 tokens for three quarters of the steps, then all of it.

| step | train | held out |
| --- | --- | --- |
{history}

## Licence

The data is the Python standard library, copyright Python Software Foundation and others, under the
[PSF License Agreement](https://docs.python.org/3/license.html); the weights are distributed under
the same terms.
"""


def write_card(folder: Path, figures: dict[str, Any], *, kind: str) -> None:
    """Write README.md beside the checkpoint in `folder`; kind is "target" or "draft"."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    rows = [f"| {row['step']} | {row['train']} | {row['held_out']} |" for row in figures["history"]]
    card = CARD.format(
        **(config | figures | {"history": "\n".join(rows)}),
        purpose=PURPOSES[kind],
        kind=kind,
        epochs=figures["trained_tokens"] / figures["corpus_tokens"],
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
