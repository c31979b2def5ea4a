"""OpenAI's requests and answers.

fields       how a request is read and judged     requests  what it may say
serving      how answers go out                   answers   how they are written
completions  /v1/completions                      logprobs  log-probabilities
chat         /v1/chat/completions                 tokens    /tokenize and /detokenize
"""
