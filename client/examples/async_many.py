"""Complete many prompts side by side, and cancel those that are not done after some seconds.

python client/examples/async_many.py
"""

import asyncio

from charonia_client import AsyncClient, Completion, RetryPolicy, Timeout, Timeouts

PROMPTS = [f"def task_{number}(items):" for number in range(32)]


async def complete(client: AsyncClient, prompt: str) -> Completion | None:
    try:
        return await client.generate(prompt, max_tokens=32, temperature=0.8, seed=7)
    except Timeout:
        return None


async def main() -> None:
    timeouts = Timeouts(total_s=20)
    retry = RetryPolicy(max_attempts=5, initial_backoff_s=0.2)  # for a queue that is full
    async with AsyncClient("127.0.0.1:8001", timeouts=timeouts, retry=retry) as client:
        completions = await asyncio.gather(*(complete(client, prompt) for prompt in PROMPTS))
    done = [completion for completion in completions if completion is not None]
    num_tokens = sum(completion.num_output_tokens or 0 for completion in done)
    print(f"{len(done)} of {len(PROMPTS)} completions, {num_tokens} tokens")


if __name__ == "__main__":
    asyncio.run(main())
