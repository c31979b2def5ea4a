"""The service goes on after bugs, lost engines and reloads, and every request is answered."""

import threading

from charonia.core.generation_request import GenerationRequest
from charonia.core.output.outputs import OutputStream
from charonia.core.replica.opening import EngineOpening
from charonia.core.replica.reload import Reload
from charonia.protocol import SamplingParams
from core.bench import Unchanged
from core.service_bench import FOR_EVER, Client, make_service, wait_until_up
from support.echo import EchoExecutor
from support.sockets import refuse_threads
from support.waiting import WAIT_S, eventually


def test_a_bug_in_a_step_fails_the_live_requests_and_the_service_goes_on():
    class Buggy(EchoExecutor):
        def execute(self, plan):
            if self.num_steps == 5:
                self.num_steps += 1
                raise KeyError("a bug")
            return super().execute(plan)

    service = make_service(Buggy())
    wait_until_up(service)
    client = Client(service)
    client.submit("a", max_tokens=100)
    assert str(client.wait("a")[-1].error) == "internal error: KeyError"
    wait_until_up(service)
    client.submit("b")
    assert client.wait("b")[-1].finish_reason == "length"
    service.close()


def test_a_bug_on_the_way_in_loses_nobody(service, monkeypatch):
    """One request cannot even be taken in; those that came with it must be answered as well."""
    client = Client(service)
    add = service._core.add
    has_all, may_go_on = threading.Event(), threading.Event()

    def add_or_raise(request, events, arrived_at):
        if request.key == "first":
            has_all.set()
            assert may_go_on.wait(WAIT_S)
        if request.key == "bad":
            raise KeyError("a bug")
        return add(request, events, arrived_at)

    monkeypatch.setattr(service._core, "add", add_or_raise)
    client.submit("first")
    assert has_all.wait(WAIT_S)
    for key in ("good", "bad", "after"):
        client.submit(key)
    may_go_on.set()
    for key in ("first", "good", "bad", "after"):
        last = client.wait(key)[-1]
        assert last.finish_reason == "length" or "KeyError" in str(last.error)
    assert str(client.chunks["bad"][-1].error) == "internal error: KeyError"
    wait_until_up(service)
    client.submit("next")
    assert client.wait("next")[-1].finish_reason == "length"


def test_a_request_that_cannot_be_failed_either_ends_nobody_elses_service(service, monkeypatch):
    """Its output is broken, so that neither its tokens nor its error can be taken."""
    client = Client(service)
    take, fail = OutputStream.take, OutputStream.fail

    def broken(call):
        def take_or_raise(stream, *args):
            if stream.request.group.key == "broken":
                raise KeyError("a bug")
            return call(stream, *args)

        return take_or_raise

    monkeypatch.setattr(OutputStream, "take", broken(take))
    monkeypatch.setattr(OutputStream, "fail", broken(fail))
    client.submit("before", max_tokens=FOR_EVER)
    client.submit("broken", max_tokens=FOR_EVER)
    client.submit("after", max_tokens=FOR_EVER)
    for key in ("before", "broken", "after"):
        assert str(client.wait(key)[-1].error) == "internal error: KeyError"
    wait_until_up(service)
    client.submit("next")
    assert client.wait("next")[-1].finish_reason == "length"


def test_a_sink_that_raises_ends_nobody_elses_service(service):
    def raising(chunk):
        raise KeyError("a bug")

    client = Client(service)
    client.submit("before", max_tokens=FOR_EVER)
    params = SamplingParams(max_tokens=FOR_EVER, seed=1)
    service.submit(GenerationRequest(key="broken", prompt_ids=[1], params=params), raising)
    client.submit("after", max_tokens=FOR_EVER)
    for key in ("before", "after"):
        assert str(client.wait(key)[-1].error) == "internal error: KeyError"
    wait_until_up(service)
    client.submit("next")
    assert client.wait("next")[-1].finish_reason == "length"


def order(*, drain: bool = False) -> Reload:
    return Reload(Unchanged(), drain=drain)


def wait_over(reload: Reload) -> None:
    eventually(lambda: reload.is_over, "the reload is over")


def test_an_order_that_a_bug_hinders_fails_and_the_next_is_carried_out(service, monkeypatch):
    client = Client(service)
    add = service._core.add
    is_in_bug, may_go_on = threading.Event(), threading.Event()

    def add_and_raise(request, events, arrived_at):
        is_in_bug.set()
        assert may_go_on.wait(WAIT_S)
        raise KeyError("a bug")

    monkeypatch.setattr(service._core, "add", add_and_raise)
    client.submit("a")
    assert is_in_bug.wait(WAIT_S)
    lost, refused = order(), order()
    service.reload(lost)
    service.reload(refused)
    assert (refused.phase, refused.reason) == ("failed", "another reload is under way")
    monkeypatch.setattr(service._core, "add", add)
    may_go_on.set()
    wait_over(lost)
    assert (lost.phase, lost.reason) == ("failed", "internal error: KeyError")
    wait_until_up(service)
    after = order()
    service.reload(after)
    wait_over(after)
    assert after.phase == "done"


def test_an_order_that_comes_while_a_bug_is_dealt_with_is_carried_out(service, monkeypatch):
    client = Client(service)
    abandon, late = service._core.abandon, order()

    def abandon_and_be_ordered(error):
        monkeypatch.setattr(service._core, "abandon", abandon)
        abandon(error)
        service.reload(late)

    monkeypatch.setattr(service._core, "abandon", abandon_and_be_ordered)
    monkeypatch.setattr(service._core, "add", lambda request, events, arrived_at: {}["a bug"])
    client.submit("a")
    assert str(client.wait("a")[-1].error) == "internal error: KeyError"
    wait_over(late)
    assert late.phase == "done"


def test_an_order_that_waits_when_the_service_closes_fails(service):
    client = Client(service)
    client.submit("a", max_tokens=FOR_EVER)
    waiting, late = order(drain=True), order()
    service.reload(waiting)
    service.close()
    service.reload(late)
    assert [waiting.reason, late.reason] == ["the server is shutting down"] * 2


def test_where_no_thread_can_look_for_an_engine_the_next_try_waits(monkeypatch):
    """Without a wait the log would be flooded."""

    class Dying(EchoExecutor):
        def open(self, *, replace, on_done):
            opening = EngineOpening(super().open(replace=replace, on_done=lambda: None).result)
            opening.start(on_done)
            return opening

    executor = Dying()
    service = make_service(executor)
    wait_until_up(service)
    client = Client(service)
    with monkeypatch.context() as patch:
        refuse_threads(patch, "charonia-opening")
        executor.die_next = 1
        client.submit("a")
        error = client.wait("a")[-1].error
    assert (error.code, "can't start new thread" in str(error)) == ("UNAVAILABLE", True)
    wait_until_up(service)
    assert service.metrics.counters["charonia_engine_failures_total", "load_failed"] < 10
    client.submit("b")
    assert client.wait("b")[-1].finish_reason == "length"
    service.close()


def test_a_request_that_comes_while_the_engine_is_restarted_waits_for_the_new_one():
    is_restarting, may_go_on = threading.Event(), threading.Event()

    class Dying(EchoExecutor):
        def open(self, *, replace, on_done):
            opening = EngineOpening(self._replace if replace else self.info)
            opening.start(on_done)
            return opening

        def _replace(self):
            is_restarting.set()
            assert may_go_on.wait(WAIT_S)
            self.restart()
            return self.info()

    executor = Dying()
    service = make_service(executor)
    wait_until_up(service)
    client = Client(service)
    executor.die_next = 1
    client.submit("a")
    assert is_restarting.wait(WAIT_S)
    assert service.metrics.gauges["charonia_engine_up", ""] == 0
    client.submit("b")
    client.submit("late", deadline_ms=50)
    client.submit("leaves")
    client.cancel("leaves")
    assert str(client.wait("late")[-1].error) == "deadline_ms has passed"
    assert client.wait("leaves")[-1].error.code == "CANCELLED"
    may_go_on.set()
    for key in "ab":
        assert client.wait(key)[-1].finish_reason == "length"
    service.close()


def test_an_engine_that_is_lost_while_nothing_runs_is_replaced_before_a_request_comes(service):
    executor = service._core._replica._executor
    executor.is_alive = False
    eventually(lambda: executor.num_restarts, "it is replaced")
    assert executor.num_restarts == 1
    wait_until_up(service)
