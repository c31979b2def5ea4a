"""/tokenize and /detokenize, as vLLM has them.

Owns their answers. Must not know connections.
"""

import msgspec

from charonia.gateway.errors import invalid
from charonia.gateway.fields import read
from charonia.gateway.openai.answering import render
from charonia.gateway.openai.answers import DetokenizeAnswer, TokenizeAnswer
from charonia.gateway.openai.requests import DetokenizeRequest, TokenizeRequest
from charonia.gateway.serving import Serving
from charonia.gateway.watching import Reply


async def tokenize(serving: Serving, body: bytes, reply: Reply) -> None:
    """Answer with the token ids of a text or a conversation."""
    request = await serving.prompts.run(len(body), lambda: read(TokenizeRequest, body))
    serving.check_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise invalid("prompt or messages must be given, and not both", "prompt")
    if request.prompt is not None:
        adds = request.add_special_tokens is not False
        prompt = await serving.prompts.of_text(
            request.prompt, None, add_special_tokens=adds, body_bytes=len(body)
        )
    else:
        prompt = await render(serving, request, len(body))
    tokenizer = serving.prompts.tokenizer
    limit = await serving.upstream.max_model_len()

    def answer() -> msgspec.Raw:
        names = None
        if request.return_token_strs:
            spelled = tokenizer.tokens()
            names = [spelled.get(token_id, "") for token_id in prompt.ids]
        found = TokenizeAnswer(len(prompt.ids), limit, list(prompt.ids), names)
        return msgspec.Raw(msgspec.json.encode(found))

    size = max(len(prompt.ids), tokenizer.vocab_size if request.return_token_strs else 0)
    await reply.whole(await serving.prompts.run(size, answer))


async def detokenize(serving: Serving, body: bytes, reply: Reply) -> None:
    """Answer with the text of token ids."""
    request = await serving.prompts.run(len(body), lambda: read(DetokenizeRequest, body))
    serving.check_model(request.model)
    ids = request.tokens
    tokenizer = serving.prompts.tokenizer
    text = await serving.prompts.run(
        len(body), lambda: tokenizer.decode(ids, skip_special_tokens=False)
    )
    await reply.whole(DetokenizeAnswer(text))
