"""An order to go on with another engine: who may give one, and what becomes of model.json."""

import contextlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from charonia.config import EngineArgs, KVEventsConfig
from charonia.core.replica.reload import Reload
from charonia.errors import ConfigError
from charonia.serving.hosts.engine import EngineHost
from charonia.serving.messages import reload
from charonia.serving.messages.reload import (
    DrainOrder,
    DrainState,
    NewModelFile,
    ReloadOrder,
    ReloadQuestion,
    ReloadServer,
    ReloadState,
)
from charonia.sockets.local import connect
from charonia.supervision.models.repairs import LOAD_MARK
from charonia.supervision.process_table import start_time
from support.waiting import WAIT_S

OLD, NEW = b'{"model": "old"}', b'{"model": "new"}'


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    file = tmp_path / "model.json"
    file.write_bytes(OLD)
    return file


def names(model_file: Path) -> set[str]:
    return {path.name for path in model_file.parent.iterdir()}


def test_a_new_file_can_be_taken_back_until_it_is_settled(model_file: Path) -> None:
    NewModelFile(model_file, NEW).install()
    assert model_file.read_bytes() == NEW
    assert reload.restore(model_file)
    assert model_file.read_bytes() == OLD
    NewModelFile(model_file, NEW).install()
    NewModelFile(model_file, NEW).settle()
    assert not reload.restore(model_file)
    assert model_file.read_bytes() == NEW
    assert names(model_file) == {"model.json"}


@pytest.mark.parametrize("num_written", [0, 1])
def test_a_full_disk_changes_nothing_and_leaves_nothing_behind(
    model_file: Path, monkeypatch: pytest.MonkeyPatch, num_written: int
) -> None:
    write = Path.write_bytes
    written: list[Path] = []

    def write_until_full(path: Path, content: bytes) -> int:
        if len(written) == num_written:
            write(path, content[:3])
            raise OSError("disk full")
        written.append(path)
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", write_until_full)
    with pytest.raises(OSError, match="disk full"):
        NewModelFile(model_file, NEW).install()
    assert model_file.read_bytes() == OLD
    assert names(model_file) == {"model.json"}


@pytest.mark.parametrize("owner", ["none", "gone", "alive"])
def test_a_change_that_its_scheduler_did_not_live_to_finish_is_undone(
    model_file: Path, owner: str
) -> None:
    loaded: list[str] = []

    def make_runner(args: EngineArgs) -> Any:
        loaded.append(Path(args.model).name)

    log: list[str] = []
    NewModelFile(model_file, NEW).install()
    own_pid = os.getpid()
    marks = {"gone": f"{own_pid} 999", "alive": f"{own_pid} {start_time(own_pid)}"}
    if owner in marks:
        model_file.with_name(LOAD_MARK).write_text(marks[owner], encoding="ascii")
    EngineHost(make_runner, model_file.parent, "MODEL", log=log.append)
    assert loaded == ["new" if owner == "alive" else "old"]
    assert log == ([] if owner == "alive" else ["engine_reload_undone level=warning"])


class Operator:
    """Orders reloads, and the scheduler's end that takes them.

    Attributes:
        taken: what the scheduler has begun; a test says what becomes of it.
    """

    def __init__(self, directory: Path) -> None:
        self.taken: list[Reload] = []
        (directory / reload.TOKENIZER_FILE).write_text("{}", encoding="utf-8")
        self.values = {"model": str(directory)}
        self.model_file = directory / "model.json"
        self.model_file.write_text(json.dumps(self.values), encoding="utf-8")
        self.path = directory / reload.RELOAD_SOCKET
        self.server: ReloadServer | None = None

    def start(self, refusal: str | None = None) -> None:
        self.server = ReloadServer(
            self.path,
            self.model_file,
            self,
            refusal=refusal,
            log=print,
        )

    def reload(self, reload: Reload) -> None:
        self.taken.append(reload)

    def drain(self) -> int:
        return 3

    def ask(self, message: ReloadOrder | ReloadQuestion) -> ReloadState:
        with contextlib.closing(connect(self.path)) as channel:
            channel.send(msgspec.msgpack.encode(message))
            return msgspec.msgpack.decode(channel.receive(WAIT_S) or b"", type=ReloadState)

    def order(self) -> ReloadState:
        return self.ask(ReloadOrder(self.values | {"seed": 1}))


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Operator]:
    one = Operator(tmp_path)
    yield one
    assert one.server is not None
    one.server.close()


def test_an_order_to_drain_says_how_many_requests_are_left(operator: Operator) -> None:
    operator.start(refusal="recovery is off")
    with contextlib.closing(connect(operator.path)) as channel:
        for _ in range(2):
            channel.send(msgspec.msgpack.encode(DrainOrder()))
            reply = channel.receive(WAIT_S) or b""
            assert msgspec.msgpack.decode(reply, type=DrainState) == DrainState(num_live=3)


def test_where_no_engine_can_be_replaced_an_order_is_refused_at_once(operator: Operator) -> None:
    operator.start(refusal="recovery is off")
    assert operator.order() == ReloadState("failed", reason="recovery is off")
    assert operator.taken == []


def test_whoever_orders_hears_of_that_order_alone(operator: Operator) -> None:
    operator.start()
    first = operator.order()
    assert (first.phase, first.number) == ("waiting", 0)
    assert operator.order() == ReloadState("failed", reason="another reload is under way")
    operator.taken[0].fail("no weights")
    second = operator.order()
    assert (second.phase, second.number) == ("waiting", 1)
    assert operator.ask(ReloadQuestion(0)).reason == "no weights"
    assert operator.ask(ReloadQuestion(1, cancel=True)).phase == "waiting"
    assert [one.is_cancelled for one in operator.taken] == [False, True]
    assert "no reload of number 2" in operator.ask(ReloadQuestion(2)).reason


def test_of_orders_that_come_at_once_one_is_taken(operator: Operator) -> None:
    operator.start()
    with ThreadPoolExecutor(8) as pool:
        states = list(pool.map(lambda _: operator.order(), range(8)))
    assert sorted(state.phase for state in states) == ["failed"] * 7 + ["waiting"]
    assert len(operator.taken) == 1


def test_an_engine_that_is_loaded_anew_keeps_the_schedulers_readers_of_kv_events() -> None:
    wanted = KVEventsConfig(enable_kv_cache_events=True)
    before = EngineArgs(model="m", kv_events_config=wanted)
    reload.check_same_kv_events(before, structs.replace(before, model="n"))
    off = structs.replace(before, kv_events_config=KVEventsConfig())
    reload.check_same_kv_events(off, structs.replace(before, kv_events_config=None))
    for config in (None, structs.replace(wanted, topic="b")):
        with pytest.raises(ConfigError, match="kv_events_config differs"):
            reload.check_same_kv_events(before, structs.replace(before, kv_events_config=config))


def test_a_tokenizer_is_read_again_only_when_its_file_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / reload.TOKENIZER_FILE
    args = EngineArgs(model=str(tmp_path))
    file.write_text('{"a": 1, "b": 2}', encoding="utf-8")
    before = reload.fingerprint_tokenizer(args)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path.name} was read"))
        assert reload.fingerprint_tokenizer(args) == before
        reload.check_same_tokenizer(before, args)
    file.write_text('{"b": 2,\n "a": 1}', encoding="utf-8")
    assert reload.fingerprint_tokenizer(args) == before
    file.write_text('{"b": 2, "a": 1, "c": 3}', encoding="utf-8")
    with pytest.raises(ConfigError, match="another tokenizer"):
        reload.check_same_tokenizer(before, args)
    file.write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"tokenizer.json cannot be read"):
        reload.check_same_tokenizer(before, args)
    file.unlink()
    with pytest.raises(ConfigError, match=r"tokenizer.json cannot be read: No such file"):
        reload.check_same_tokenizer(before, args)
