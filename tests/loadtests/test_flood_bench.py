"""In which order a flood and its urgent requests are sent."""

import asyncio

import flood_bench
from flood_bench import MAX_TOKENS, WEIGHTS, Answer, Flood

NUM_REQUESTS, NUM_URGENT = 90, 5


class Client:
    """Stands for that of Triton, of which it has nothing."""

    def __init__(self, url: str) -> None: ...

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def is_server_live(self) -> bool:
        return True


class Served(Flood):
    """By a server that takes requests in one after the other, and does urgent ones at once."""

    def __init__(self) -> None:
        super().__init__("", "scheduler", 0)
        self.intake = asyncio.Lock()
        self.over = asyncio.Event()
        self.num_to_come = NUM_REQUESTS
        self.num_behind = 0  # urgent ones that came while others had yet to be taken in

    async def _ask(self, client: object, sampling: str, answer: Answer) -> None:
        self.num_behind += answer.is_urgent and self.num_to_come > 0
        async with self.intake:
            await asyncio.sleep(0.002)
        if not answer.is_urgent:
            self.num_to_come -= 1
            await self.over.wait()
        answer.num_tokens = MAX_TOKENS
        if sum(one.is_urgent and one.num_tokens > 0 for one in self.answers) == NUM_URGENT:
            self.over.set()


def test_no_urgent_requests_pile_up_behind_a_flood_that_comes_in(monkeypatch) -> None:
    monkeypatch.setattr(flood_bench, "SENDING_S", 0.01)
    monkeypatch.setattr(flood_bench.grpc_aio, "InferenceServerClient", Client)

    async def go() -> Served:
        flood = Served()
        await flood.run(NUM_REQUESTS, NUM_URGENT, every_s=0.01)
        return flood

    flood = asyncio.run(go())
    tenants = [one.tenant for one in flood.answers if not one.is_urgent]
    assert {tenant: tenants.count(tenant) for tenant in WEIGHTS} == dict.fromkeys(WEIGHTS, 30)
    assert sum(one.is_urgent for one in flood.answers) == NUM_URGENT
    assert all(one.num_tokens == MAX_TOKENS for one in flood.answers)
    assert flood.num_behind == 1
