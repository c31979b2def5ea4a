"""A running server goes on with another engine, and every stream comes to its right end."""

import contextlib
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tritonclient.grpc as grpc

from charonia.launch.commands.cli import main
from charonia.launch.server.run import running_server, wait_serving
from charonia.launch.server.tritonserver import TritonServer
from charonia.supervision.server.probes import Probe
from support.e2e import (
    ONE_THREAD,
    Response,
    error_of,
    one_torch_thread,
    request_inputs,
    scrape,
    stream_grpc,
    wait_for,
    wait_idle,
)
from support.events import events
from support.faults import paced
from support.leftovers import leftovers
from support.live_stream import LiveStream
from support.long import long
from support.many_streams import NUM_TOKENS, PROMPTS, finish, start_streams
from support.serving import CHARONIA

SETTINGS = (
    ONE_THREAD,
    "max_num_seqs=16",
    "max_num_batched_tokens=256",
    "num_gpu_blocks_override=900",
)
SHORT = 40
START_TIMEOUT_S = 120.0
KEPT = "not reloaded"


class Target:
    """A server under test and the command that reloads it."""

    def __init__(
        self, server: TritonServer, log: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.server = server
        self.log = log
        self.repository = server.repository
        self.urls = {"grpc": server.grpc_url, "http": server.http_url}
        self.model_json = server.repository / "engine" / "1" / "model.json"
        self._capsys = capsys

    def reload(self, *arguments: object) -> tuple[int, str, str]:
        """Run `charonia reload`; its exit code, stdout and stderr."""
        code = main(["reload", "--url", self.server.grpc_url, *map(str, arguments)])
        return code, *self._capsys.readouterr()

    @contextlib.contextmanager
    def draining(self, *arguments: object) -> Iterator[None]:
        """Run `charonia reload --drain`, which holds new requests from now on.

        Afterwards it is waited for, and must have succeeded.
        """
        command = [*CHARONIA, "reload", "--url", self.server.grpc_url, "--drain"]
        with subprocess.Popen(
            [*command, *map(str, arguments)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stderr is not None
            draining = next((line for line in process.stderr if "draining" in line), "")
            shown = r"charonia: draining: \d+ requests are running, \d+ wait\n"
            assert re.fullmatch(shown, draining), process.communicate()
            yield
            err = process.stderr.read()
        assert process.returncode == 0, err

    def load(self) -> None:
        """Triton's own model control, as the operator.

        Over gRPC: Triton carries out an HTTP request for it in a thread that other connections
        share, whose streams lose responses meanwhile.
        """
        with grpc.InferenceServerClient(self.server.grpc_url) as client:
            client.load_model(self.server.control_name("engine"), headers=self.server.api_headers)

    def unload(self) -> None:
        """The same, the other way."""
        with grpc.InferenceServerClient(self.server.grpc_url) as client:
            client.unload_model(self.server.control_name("engine"), headers=self.server.api_headers)

    def configure(self, **values: object) -> None:
        """Change the engine's model.json, as an operator with an editor."""
        changed = json.loads(self.model_json.read_text("utf-8")) | values
        self.model_json.write_text(json.dumps(changed), encoding="utf-8")

    def settle(self) -> dict[str, float]:
        """The metrics once nothing is live any more."""
        samples = wait_idle(self.server)
        assert samples["charonia_engine_up"] == 1
        # Triton lets the one that it has replaced go some time after that.
        pids = wait_for(lambda: self.server.pids("engine"), lambda pids: len(pids) == 1)
        assert len(pids) == 1, "an engine beside the engine"
        return samples

    def num_waiting(self) -> float:
        """How many requests wait."""
        return scrape(self.server)["charonia_requests_waiting"]

    def run(
        self, prompt: list[int], index: int = 0, max_tokens: int = NUM_TOKENS, **sampling: object
    ) -> LiveStream:
        """A request of its own, sampled as stream `index` of `start_streams` is."""
        return LiveStream(
            self.server.grpc_url,
            prompt,
            temperature=0.8 * (index % 2),
            seed=index,
            max_tokens=max_tokens,
            ignore_eos=True,
            **sampling,
        )

    def answer(self, prompt: list[int], index: int = 0, **sampling: object) -> list[int]:
        """The tokens of a short request, sampled in the same way."""
        (token_ids,) = finish(self.repository, [self.run(prompt, index, SHORT, **sampling)])
        return token_ids


@pytest.fixture(scope="module")
def other_checkpoint(checkpoint: Callable[..., Path]) -> Path:
    """The same shape and tokenizer as `small_checkpoint`, other weights."""
    return checkpoint("LlamaForCausalLM", max_position_embeddings=4096, seed=1)


@pytest.fixture(scope="module")
def running(
    small_checkpoint: Path, faulty_repository: Path
) -> Iterator[tuple[TritonServer, list[str]]]:
    log: list[str] = []
    with (
        one_torch_thread(),
        running_server(
            model=small_checkpoint, settings=SETTINGS, source=faulty_repository, on_log=log.append
        ) as server,
    ):
        yield server, log
    assert leftovers(server.runtime_dir) == []


@pytest.fixture
def target(
    running: tuple[TritonServer, list[str]],
    small_checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Target]:
    """The server with its first configuration, to which it returns afterwards."""
    target = Target(*running, capsys)
    before = target.model_json.read_bytes()
    yield target
    if target.model_json.read_bytes() != before:
        target.model_json.write_bytes(before)
        num_reloads = len(events(target.log, "engine_reloaded"))
        target.load()
        assert wait_for(lambda: len(events(target.log, "engine_reloaded")) > num_reloads, bool)
        target.settle()


@pytest.fixture(scope="module")
def undisturbed(running: tuple[TritonServer, list[str]]) -> list[list[int]]:
    """The tokens of each stream on the first model when nothing happens."""
    server, _ = running
    streams = start_streams({"grpc": server.grpc_url, "http": server.http_url})
    return finish(server.repository, streams)


def check_changed_over(
    target: Target, streams: list[LiveStream], undisturbed: list[list[int]]
) -> None:
    """Assert that each stream is a run of the old model, and from some token on of the new one."""
    found = finish(target.repository, streams)
    expected, rests = [], []
    for index, (tokens, old) in enumerate(zip(found, undisturbed, strict=True)):
        assert len(tokens) == NUM_TOKENS
        assert tokens != old, "it never ran on the new model"
        same = next(place for place in range(NUM_TOKENS) if tokens[place] != old[place])
        assert same >= 3, "it began anew"
        expected.append(tokens[same:])
        rests.append(target.run(PROMPTS[index] + tokens[:same], index, NUM_TOKENS - same))
    assert finish(target.repository, rests) == expected


def rise(before: dict[str, float], after: dict[str, float], name: str) -> float:
    return after[f"charonia_{name}"] - before[f"charonia_{name}"]


def check_reloaded_once(before: dict[str, float], after: dict[str, float]) -> None:
    """Assert that one reload was counted, and no failure."""
    assert rise(before, after, "engine_reloads_total") == 1
    assert rise(before, after, "engine_restarts_total") == 0
    assert rise(before, after, "requests_recomputed_total") == len(PROMPTS)
    for kind in ("step_failed", "died", "hung", "load_failed"):
        assert rise(before, after, f'engine_failures_total{{kind="{kind}"}}') == 0, kind


def test_streams_go_on_with_another_model(
    target: Target, undisturbed: list[list[int]], other_checkpoint: Path
) -> None:
    before = target.settle()
    streams = start_streams(target.urls)
    code, out, err = target.reload("--model", other_checkpoint)
    assert (code, "Traceback" in err) == (0, False), err
    assert "8 live requests went on" in out
    assert str(other_checkpoint) in out
    check_changed_over(target, streams, undisturbed)
    assert json.loads(target.model_json.read_text("utf-8"))["model"] == str(other_checkpoint)
    check_reloaded_once(before, target.settle())
    assert events(target.log, "engine_reloaded")[-1]["recomputed"] == "8"


@long
def test_with_drain_what_runs_ends_on_the_old_model_and_what_comes_waits_for_the_new_one(
    target: Target, undisturbed: list[list[int]], other_checkpoint: Path
) -> None:
    before = target.settle()
    streams = start_streams(target.urls)
    with target.draining("--model", other_checkpoint):
        late = [target.run([5, 6, 7], index, SHORT) for index in (0, 1)]
        # What is held is shown as waiting.
        assert wait_for(target.num_waiting, lambda num: num == 2) == 2
        assert finish(target.repository, streams) == undisturbed
    new = [target.answer([5, 6, 7], index) for index in (0, 1)]
    assert finish(target.repository, late) == new
    after = target.settle()
    assert rise(before, after, "engine_reloads_total") == 1


@long
def test_a_held_request_can_be_cancelled_and_runs_out_of_time(
    target: Target, other_checkpoint: Path
) -> None:
    target.settle()
    running = target.run([1, 2], max_tokens=3000)
    running.wait_tokens(3)
    with target.draining("--set", "max_num_seqs=8"):
        late = target.run([3], max_tokens=3, deadline_ms=300).wait_over()
        assert (late.error or "").endswith("deadline_ms has passed [charonia:timeout]")
        leaving = target.run([4], max_tokens=3)
        assert wait_for(target.num_waiting, bool) == 1
        leaving.leave()
        assert wait_for(target.num_waiting, lambda num: not num) == 0
        running.leave()
    target.settle()


def test_a_reload_that_fails_leaves_the_old_model_serving(
    target: Target, undisturbed: list[list[int]], other_checkpoint: Path, tmp_path: Path
) -> None:
    damaged = Path(shutil.copytree(other_checkpoint, tmp_path / "damaged"))
    (weights,) = damaged.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1000])
    configured = target.model_json.read_bytes()
    before = target.settle()
    streams = start_streams(target.urls)
    code, out, err = target.reload("--model", damaged)
    assert (code, out) == (1, "")
    assert KEPT in err
    assert "the old configuration stays" in err
    assert finish(target.repository, streams) == undisturbed
    assert target.model_json.read_bytes() == configured
    after = target.settle()
    assert rise(before, after, "engine_reloads_total") == 0
    assert rise(before, after, "engine_restarts_total") == 0
    assert rise(before, after, 'engine_failures_total{kind="load_failed"}') == 1
    assert rise(before, after, 'engine_failures_total{kind="died"}') == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "/no/such/directory"), "no checkpoint directory /no/such/directory"),
        (("--set", "max_seqs=1"), "unknown engine argument 'max_seqs'"),
        (
            ("--set", "scheduler.max_queue_size=1"),
            "scheduler.max_queue_size cannot change while the server runs",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_and_nothing_happens(
    target: Target, arguments: tuple[str, ...], message: str
) -> None:
    pids = target.server.pids("engine")
    code, out, err = target.reload(*arguments)
    assert (code, out) == (1, "")
    assert err.startswith(f"charonia: {message}")
    assert target.server.pids("engine") == pids


def test_another_tokenizer_is_refused_and_nothing_happens(
    target: Target, checkpoint: Callable[..., Path]
) -> None:
    pids = target.server.pids("engine")
    code, _, err = target.reload("--model", checkpoint("LlamaForCausalLM", vocab_size=400))
    assert code == 1
    assert "another tokenizer (tokenizer.json differs)" in err
    assert target.server.pids("engine") == pids


@long
def test_tritons_own_load_is_a_reload_and_no_failure(
    target: Target, undisturbed: list[list[int]], other_checkpoint: Path
) -> None:
    before = target.settle()
    streams = start_streams(target.urls)
    target.configure(model=str(other_checkpoint))
    target.load()
    check_changed_over(target, streams, undisturbed)
    check_reloaded_once(before, target.settle())


@long
def test_streams_wait_while_an_operator_unloads_the_engine_and_loads_it_again(
    target: Target, undisturbed: list[list[int]], other_checkpoint: Path
) -> None:
    before = target.settle()
    streams = start_streams(target.urls)
    num_unloaded = len(events(target.log, "engine_unloaded"))
    target.unload()
    assert wait_for(lambda: len(events(target.log, "engine_unloaded")), lambda n: n > num_unloaded)
    late = target.run([5, 6, 7], max_tokens=SHORT)
    assert wait_for(lambda: target.server.pids("engine"), lambda pids: not pids) == []
    target.configure(model=str(other_checkpoint))
    target.load()
    check_changed_over(target, streams, undisturbed)
    assert finish(target.repository, [late]) == [target.answer([5, 6, 7])]
    after = target.settle()
    assert rise(before, after, "engine_reloads_total") == 1
    assert rise(before, after, "engine_restarts_total") == 0


@long
def test_a_new_configuration_is_taken_over(target: Target, undisturbed: list[list[int]]) -> None:
    """Speculation begins in mid-stream, and changes no token."""
    target.settle()
    streams = start_streams(target.urls)
    speculation = 'speculative_config={"method": "ngram", "adaptive": false}'
    code, out, err = target.reload("--set", speculation, "--set", "block_size=32")
    assert code == 0, err
    assert "block_size: 16 -> 32" in out
    assert finish(target.repository, streams) == undisturbed
    assert sum(stream.timing["drafted_tokens"] for stream in streams) > 0
    tokens_per = 'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per"}'
    assert target.settle()[tokens_per] == 32


@long
def test_a_server_that_ends_in_the_middle_of_a_reload_comes_back_with_the_old_model(
    target: Target, other_checkpoint: Path, undisturbed: list[list[int]]
) -> None:
    num_reloads = len(events(target.log, "engine_reloading"))

    def kill_in_the_middle() -> None:
        wait_for(lambda: len(events(target.log, "engine_reloading")) > num_reloads, bool)
        target.server.kill()

    thread = threading.Thread(target=kill_in_the_middle)
    thread.start()
    code, _, said = target.reload("--model", other_checkpoint)
    thread.join()
    assert code == 1
    assert "the server's scheduler" in said
    assert target.model_json.with_name("model.json.before").exists()

    target.server.start()
    with contextlib.closing(Probe(target.server.http_url, "scheduler")) as probe:
        wait_serving(target.server, probe, START_TIMEOUT_S)
    assert len(events(target.log, "engine_reload_undone")) == 1
    assert not target.model_json.with_name("model.json.before").exists()
    assert finish(target.repository, start_streams(target.urls)) == undisturbed
    target.settle()


@long
def test_what_is_too_long_for_the_new_engine_ends_with_the_reason(target: Target) -> None:
    target.settle()
    long = target.run([1] * 300)
    short = target.run([2, 3], max_tokens=1000)
    for stream in (long, short):
        stream.wait_tokens(3)
    code, _, err = target.reload("--set", "max_model_len=256")
    assert code == 0, err
    with paced(target.repository, 0):
        long.wait_over()
        short.wait_over()
    assert "the engine was restarted with max_model_len 256" in (long.error or "")
    assert (short.error, short.finish_reason) == (None, "length")
    assert len(short.token_ids) == 254
    target.settle()


@long
def test_llm_takes_prompts_as_long_as_the_engine_that_there_is_now(target: Target) -> None:
    def ask(num_tokens: int) -> list[Response]:
        inputs = request_inputs("7" * num_tokens, {"max_tokens": 2}, return_num_input_tokens=True)
        return stream_grpc(target.server, inputs, "llm")

    assert target.reload("--set", "max_model_len=256")[0] == 0
    for _ in range(4):  # so that both processes of `tokenizer` refuse one
        error = error_of(lambda: ask(200_000))
        assert "at most" in str(error)
    assert target.reload("--set", "max_model_len=512")[0] == 0
    for _ in range(4):
        assert ask(300)[0].one("num_input_tokens") == 300


@long
def test_no_cached_prefix_of_one_model_is_used_for_another(
    target: Target, other_checkpoint: Path
) -> None:
    prompt = list(range(1, 101))
    for _ in range(2):
        target.answer(prompt)
    before = target.settle()
    assert target.reload("--model", other_checkpoint)[0] == 0
    first = target.answer(prompt)
    hits = rise(before, target.settle(), "prefix_cache_hit_tokens_total")
    assert hits == 0
    assert target.answer(prompt, cache_salt="alone") == first
