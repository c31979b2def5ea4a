"""What routers are told of the prefix cache, through real sockets."""

import contextlib
import socket
import threading
from pathlib import Path

import msgspec
import pytest
import zmq

from charonia.config import KVEventsConfig
from charonia.core.recording import kv_events
from charonia.core.recording.kv_events import KVEventPublisher, KVEvents, default_topic
from charonia.errors import ConfigError
from core.bench import Bench
from support.kv_events import (
    CLEARED,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Reader,
    reading,
    replay,
)
from support.waiting import eventually


def key(number: int) -> bytes:
    return b"any bytes" + number.to_bytes(8, "big")


def stored(*numbers: int, parent: int | None = None, tokens_of: int = 2) -> BlockStored:
    token_ids = [10 * number + place for number in numbers for place in range(tokens_of)]
    return BlockStored([*numbers], parent, token_ids, tokens_of, None, "GPU", None)


def tell(told: KVEvents, number: int, parent: int | None = None) -> None:
    told.stored(key(number), parent and key(parent), [10 * number, 10 * number + 1])


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path / 'events'}"


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def make(endpoint, lines):
    """A publisher that runs until the end of the test."""
    with contextlib.ExitStack() as stack:

        def make(**values) -> KVEventPublisher:
            config = KVEventsConfig(**{"endpoint": endpoint} | values)
            publisher = KVEventPublisher(config, "a-model", log=lines.append)
            publisher.start()
            stack.callback(publisher.close)
            return publisher

        yield make


def joined(reader: Reader, publisher: KVEventPublisher) -> Reader:
    """The reader, once it is sent what is published from now on."""
    mark = 0
    while True:
        mark += 1
        publisher.publish([kv_events.BlockRemoved([mark])])
        with contextlib.suppress(TimeoutError):
            while reader.read(timeout_s=0.05).events[0].block_hashes != [mark]:
                pass
            reader.numbers.clear()
            return reader


def test_a_batch_is_what_vllm_sends_byte_for_byte(make, endpoint):
    publisher = make()
    told = KVEvents(publisher.publish)
    with reading(endpoint) as reader:
        joined(reader, publisher)
        tell(told, 1)
        tell(told, 2, parent=1)
        told.removed(key(9))
        told.flush()
        told.cleared()
        _, number, batch = reader._sub.recv_multipart()
        assert len(number) == 8
        ts, *rest = msgspec.msgpack.decode(batch)
        assert isinstance(ts, float)
        assert rest == [
            [
                ["BlockStored", [1, 2], None, [10, 11, 20, 21], 2, None, "GPU", None],
                ["BlockRemoved", [9], "GPU"],
            ],
            0,
        ]
        *_, batch = reader._sub.recv_multipart()
        assert msgspec.msgpack.decode(batch)[1] == [["AllBlocksCleared"]]


def test_a_reader_gets_all_batches_in_order_with_numbers_and_a_topic(make, endpoint, monkeypatch):
    monkeypatch.setenv("POD_NAME", "a-pod")
    publisher = make()
    told = KVEvents(publisher.publish)
    with reading(endpoint) as reader:
        joined(reader, publisher)
        for number in range(1, 101):
            tell(told, number)
            told.flush()
            told.flush()  # there is nothing more
        assert [reader.read().events for _ in range(100)] == [[stored(n)] for n in range(1, 101)]
        first = reader.numbers[0]
        assert reader.numbers == [*range(first, first + 100)]
        assert reader.topic == "kv@a-pod@a-model"
    assert told.num_dropped == 0


def test_the_topic_names_the_pod_as_well_as_it_can(monkeypatch):
    monkeypatch.delenv("POD_NAME", raising=False)
    monkeypatch.setenv("POD_IP", "10.1.2.3")
    assert default_topic("m") == "kv@10.1.2.3@m"
    monkeypatch.delenv("POD_IP")
    assert default_topic("m") == f"kv@{socket.gethostname()}@m"


def test_another_topic_can_be_asked_for(make, endpoint):
    publisher = make(topic="")
    with reading(endpoint, topic="") as reader:
        joined(reader, publisher)
        assert reader.topic == ""


def collected(*calls) -> list:
    """The events of one batch, as a reader has them."""
    batches = []
    told = KVEvents(lambda events: batches.append(events) or 0)
    for name, *arguments in calls:
        getattr(told, name)(*arguments)
    told.flush()
    text = msgspec.msgpack.encode(batches)
    return msgspec.msgpack.decode(
        text, type=list[list[BlockStored | BlockRemoved | AllBlocksCleared]]
    )


def test_blocks_that_follow_each_other_are_one_event_and_no_others():
    def block(number: int, parent: int | None = None):
        return "stored", key(number), parent and key(parent), [10 * number, 10 * number + 1]

    assert collected(block(1), block(2, 1), block(3, 2)) == [[stored(1, 2, 3)]]
    assert collected(block(2, 1), block(3, 2)) == [[stored(2, 3, parent=1)]]
    assert collected(block(1), block(2)) == [[stored(1), stored(2)]]
    assert collected(block(1), block(3), block(2, 1), block(4, 2)) == [
        [stored(1), stored(3), stored(2, 4, parent=1)]
    ]
    gone = BlockRemoved([7, 8], "GPU")
    assert collected(block(1), ("removed", key(7)), ("removed", key(8)), block(2, 1)) == [
        [stored(1), gone, stored(2, parent=1)]
    ]
    assert collected(block(1), ("flush",), block(2, 1)) == [[stored(1)], [stored(2, parent=1)]]


def test_what_is_cleared_is_told_at_once_and_what_was_before_it_is_nobodys_business():
    assert collected(("stored", key(1), None, [1]), ("cleared",), ("removed", key(2))) == [
        [CLEARED],
        [BlockRemoved([2], "GPU")],
    ]


def test_batches_that_a_reader_has_missed_are_sent_again(make, tmp_path):
    endpoint = f"ipc://{tmp_path / 'replay'}"
    publisher = make(replay_endpoint=endpoint, buffer_steps=2000, hwm=10)
    told = KVEvents(publisher.publish)
    for number in range(1, 2501):
        tell(told, number)
        told.flush()
    eventually(lambda: not publisher._queue)
    found = replay(endpoint, 600)
    assert [(number, batch.events) for number, batch in found] == [
        (number, [stored(number + 1)]) for number in range(600, 2500)
    ]
    assert [number for number, _ in replay(endpoint, 0)] == [*range(500, 2500)], "the last ones"
    assert replay(endpoint, 2500) == []


def test_who_asks_for_nonsense_gets_no_answer_and_others_do(make, tmp_path, lines):
    endpoint = f"ipc://{tmp_path / 'replay'}"
    make(replay_endpoint=endpoint)
    with zmq.Context() as context, context.socket(zmq.DEALER) as asker:
        asker.setsockopt(zmq.LINGER, 0)
        asker.connect(endpoint)
        for frames in ([b"what?"], [b"", b"1"], [b""] * 9):
            asker.send_multipart(frames)
        eventually(lambda: any("kv_events_bad_replay" in line for line in lines))
        assert replay(endpoint, 0) == []
        assert not asker.poll(0)


def test_what_is_published_too_fast_is_dropped_and_never_believed_in(
    make, endpoint, lines, monkeypatch
):
    may_send = threading.Event()
    may_send.set()
    take = KVEventPublisher._take

    def take_when_allowed(publisher):
        may_send.wait()
        return take(publisher)

    monkeypatch.setattr(KVEventPublisher, "_take", take_when_allowed)
    publisher = make(max_queue_size=3)
    told = KVEvents(publisher.publish)
    with reading(endpoint) as reader:
        joined(reader, publisher)
        publisher.publish([])
        reader.read()
        may_send.clear()
        for number in range(1, 21):
            tell(told, number)
            told.flush()
        may_send.set()
        batches = []
        while not batches or batches[-1][-1] != stored(20):
            batches.append(reader.read().events)
    assert told.num_dropped + len(batches) == 20
    assert reader.numbers[-1] - reader.numbers[0] == 20, "what was dropped leaves a gap"
    (after,) = [place for place, events in enumerate(batches) if events[0] == CLEARED]
    assert len(batches) - after <= 3
    assert [events[-1] for events in batches[after:]] == [
        stored(number) for number in range(21 - len(batches) + after, 21)
    ]
    assert any(line.startswith("kv_events_dropped level=warning batches=") for line in lines)


def test_before_it_is_started_and_without_readers_nothing_is_kept(endpoint, lines):
    config = KVEventsConfig(endpoint=endpoint, max_queue_size=1)
    publisher = KVEventPublisher(config, "m", log=lines.append)
    assert not [publisher.publish([]) for _ in range(9)].count(1)
    publisher.close()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.mark.parametrize("name", ["endpoint", "replay_endpoint"])
def test_an_endpoint_that_cannot_be_had_is_named_and_the_other_is_let_go(name, lines):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = {"endpoint": free_port(), "replay_endpoint": free_port()}
        ports[name] = taken.getsockname()[1]
        values = {one: f"tcp://127.0.0.1:{port}" for one, port in ports.items()}
        publisher = KVEventPublisher(KVEventsConfig(**values), "m", log=lines.append)
        message = f"{name} = '{values[name]}' cannot be bound: Address already in use$"
        with pytest.raises(ConfigError, match=message):
            publisher.bind()
    publisher.bind()
    publisher.close()


def test_a_file_in_the_place_of_a_socket_stays(lines, tmp_path):
    file = tmp_path / "notes"
    file.write_text("kept", encoding="ascii")
    publisher = KVEventPublisher(KVEventsConfig(endpoint=f"ipc://{file}"), "m", log=lines.append)
    with pytest.raises(ConfigError, match=r"endpoint = 'ipc://.* is there and no socket$"):
        publisher.bind()
    assert file.read_text(encoding="ascii") == "kept"
    publisher.close()


def test_at_its_end_nothing_is_cached_and_the_endpoint_is_free(lines):
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with reading(endpoint) as reader:
        for _ in range(3):
            publisher = KVEventPublisher(KVEventsConfig(endpoint=endpoint), "m", log=lines.append)
            publisher.start()
            joined(reader, publisher)
            publisher.publish([kv_events.BlockRemoved([1])])
            publisher.close()
            assert reader.read().events == [BlockRemoved([1], "GPU")]
            assert reader.read().events == [CLEARED]


def test_an_endpoint_of_another_machine_is_connected_to(lines):
    """A reader of all pods binds; 2130706433 is 127.0.0.1 as nobody spells it."""
    port = free_port()
    config = KVEventsConfig(endpoint=f"tcp://2130706433:{port}")
    publisher = KVEventPublisher(config, "m", log=lines.append)
    with reading(f"tcp://127.0.0.1:{port}", binds=True) as reader:
        publisher.start()
        joined(reader, publisher)
        publisher.close()
        assert reader.read().events == [CLEARED]


def test_a_core_publishes_a_batch_per_step_that_changes_the_cache():
    batches: list[list] = []
    bench = Bench(kv_events=KVEvents(lambda events: batches.append(events) or 2))
    assert batches == [[kv_events.AllBlocksCleared()]], "nothing is left of what was before"
    batches.clear()
    prompt = [ord("a")] * 40
    bench.add("a", prompt=prompt, max_tokens=20)
    bench.run()
    whole = prompt + bench.tokens("a")
    first, second = [one for batch in batches for one in batch]
    assert (first.parent_block_hash, first.token_ids) == (None, whole[:32])
    assert len(first.block_hashes) == 2
    assert (second.parent_block_hash, second.token_ids) == (first.block_hashes[-1], whole[32:48])
    bench.add("b", prompt=prompt)
    batches.clear()
    bench.run()
    assert batches == [], "what is cached is not stored again"
    bench.core._replica.show_metrics(num_held=0)
    assert bench.core.metrics.counters["charonia_kv_event_batches_dropped_total", ""] == 6


@pytest.mark.parametrize("fault", ["fail_next", "die_next"])
def test_when_an_engine_fails_nothing_is_cached_any_more_and_then_all_is_again(fault):
    batches: list[list] = []
    bench = Bench(kv_events=KVEvents(lambda events: batches.append(events) or 0))
    bench.add("a", prompt=[ord("a")] * 40, max_tokens=30)
    bench.run(5)
    num_before = len(batches)
    setattr(bench.executor, fault, 1)
    bench.run()
    assert len(bench.tokens("a")) == 30
    after = batches[num_before:]
    while after[0] != [kv_events.AllBlocksCleared()]:
        after.pop(0)
    view: set[int] = set()
    for one in (one for batch in after for one in batch):
        if isinstance(one, kv_events.BlockStored):
            view.update(one.block_hashes)
        else:
            view.clear()
    assert len(view) == (40 + 29) // 16
