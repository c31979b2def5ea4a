"""Sampling: from logits to tokens.

One call goes down these modules, each of which knows only those below it::

    sampler       one step's rows: edit, draw, log-probabilities, one transfer to the host
    native_draw   edit and draw on a CPU, in C++: what constraints and draw do, and the same tokens
    draw          the highest sum of logit / temperature and noise, without the whole vocabulary
    constraints   what the parameters do to logits (bias, bans, penalties) and to a ranked list
    ranking       the total order of tokens, blocks of 64, sums of probability
    noise         Gumbel noise of (seed, position, token id)
"""
