"""Sampling: from logits to tokens.

A call passes through these modules from top to bottom. Each knows only those below it::

    sampler       one step's rows: edit, draw, log-probabilities, one transfer to the host
    native_draw   edit and draw on a CPU, in C++; the same tokens as constraints and draw
    draw          the highest sum of logit / temperature and noise, without the whole vocabulary
    constraints   effects of the parameters on logits (bias, bans, penalties) and on a ranked list
    ranking       the total order of tokens, blocks of 64, sums of probability
    noise         Gumbel noise of (seed, position, token id)
"""
