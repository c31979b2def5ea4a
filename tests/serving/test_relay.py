"""Mailboxes: every answer is collected once, and no collector waits for ever."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from charonia.errors import UnavailableError
from charonia.serving.relay import MailboxOutlet, Relay, RelayBatch, RelayedAnswer


class Clock:
    """A time that stands still until it is moved."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def relay(clock: Clock) -> Iterator[Relay]:
    made = Relay(clock)
    yield made
    made.close()


def batch(outlet: Any) -> RelayBatch:
    (outputs, is_final), *others = outlet.sent
    assert is_final
    assert not others
    return msgspec.msgpack.decode(bytes(outputs["relayed"]), type=RelayBatch)


def test_a_collector_gets_what_is_there(relay: Relay, new_outlet: Any) -> None:
    MailboxOutlet(relay, "m", "a").send({"text_output": ["x"], "output_ids": [1]}, is_final=True)
    MailboxOutlet(relay, "m", "b").fail(UnavailableError("down"))
    MailboxOutlet(relay, "other", "c").send({}, is_final=True)
    collector = new_outlet()
    relay.collect("m", collector)
    assert batch(collector).answers == [
        RelayedAnswer("a", {"text_output": ["x"], "output_ids": [1]}),
        RelayedAnswer("b", error="down", code="UNAVAILABLE"),
    ]


def test_a_collector_waits_for_the_next_answer(relay: Relay, new_outlet: Any) -> None:
    collector, next_collector = new_outlet(), new_outlet()
    relay.collect("m", collector)
    assert not collector.sent
    relay.put("m", RelayedAnswer("a"))
    assert [answer.key for answer in batch(collector).answers] == ["a"]
    relay.put("m", RelayedAnswer("b"))
    relay.collect("m", next_collector)
    assert [answer.key for answer in batch(next_collector).answers] == ["b"]


def test_a_collector_that_waited_long_gets_an_empty_batch(
    relay: Relay, clock: Clock, new_outlet: Any
) -> None:
    collector = new_outlet()
    relay.collect("m", collector)
    relay._tick(patience_s=1.0)
    assert not collector.sent
    clock.now += 1.0
    relay._tick(patience_s=1.0)
    assert batch(collector).answers == []


def test_the_end_of_the_server_waits_for_no_collector(relay: Relay, new_outlet: Any) -> None:
    collector = new_outlet()
    relay.collect("m", collector)
    relay.close()
    assert batch(collector).answers == []


def test_a_second_collector_relieves_the_first(relay: Relay, new_outlet: Any) -> None:
    first, second = new_outlet(), new_outlet()
    relay.collect("m", first)
    relay.collect("m", second)
    assert batch(first).answers == []
    relay.put("m", RelayedAnswer("a"))
    assert [answer.key for answer in batch(second).answers] == ["a"]


def test_a_mailbox_that_nobody_asks_for_is_dropped(
    relay: Relay, clock: Clock, new_outlet: Any
) -> None:
    relay.put("m", RelayedAnswer("a"))
    clock.now += Relay.FORGET_S + 1
    relay._tick(patience_s=1.0)
    collector = new_outlet()
    relay.collect("m", collector)
    assert not collector.sent


def test_every_relay_has_a_name_of_its_own() -> None:
    relays = [Relay(), Relay()]
    owners = [
        msgspec.msgpack.decode(bytes(relay.accepted()["relayed"]), type=RelayBatch).owner
        for relay in relays
    ]
    assert owners[0] != owners[1]
    for relay in relays:
        relay.close()
