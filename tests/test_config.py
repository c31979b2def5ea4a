"""Configuration: what is read as what, and that a mistake is named."""

from pathlib import Path
from typing import Any

import pytest

from charonia.config import DEMO_CHECKPOINT, DEMO_DRAFT_CHECKPOINT, EngineArgs, SchedulerArgs
from charonia.errors import ConfigError


def test_the_schedulers_parameters_are_read_from_strings():
    args = SchedulerArgs.from_parameters(
        {"engine_model": "e", "max_queue_size": "7", "min_step_deadline_s": "2.5"}
    )
    assert args == SchedulerArgs(engine_model="e", max_queue_size=7, min_step_deadline_s=2.5)


@pytest.mark.parametrize(
    ("value", "is_wanted"), [("yes", True), ("True", True), ("no", False), (None, False)]
)
def test_vllms_metrics_are_asked_for_by_the_name_that_vllm_gave_it(value, is_wanted):
    parameters = {} if value is None else {"REPORT_CUSTOM_METRICS": value}
    assert SchedulerArgs.from_parameters(parameters).report_custom_metrics == is_wanted


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"report_custom_metrics": "yes"}, "unknown .*; accepted are .*, REPORT_CUSTOM_METRICS"),
        ({"max_queue_size": "0"}, "max_queue_size"),
        (
            {"num_sender_threads": "many"},
            "^num_sender_threads must be an integer from 1 to 256, but is 'many'$",
        ),
        (
            {"tenant_header": "a b"},
            r"^tenant_header must be a string like \^\[A.* or null, but is 'a b'$",
        ),
        ({"degradation_ladder": "all"}, "^degradation_ladder = 'all' must name some of"),
    ],
)
def test_a_wrong_parameter_of_the_scheduler_is_named(parameters, message):
    with pytest.raises(ConfigError, match=message):
        SchedulerArgs.from_parameters(parameters)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("[1]", "not a JSON object"),
        ('{"model": "m", "max_num_seq": 1}', "unknown engine argument 'max_num_seq'"),
        (
            '{"model": "m", "max_num_seqs": "abc"}',
            "^max_num_seqs must be an integer from 1 to 2147483647 or 'auto', but is 'abc'$",
        ),
        (
            '{"model": "m", "memory_reserve": 1}',
            "memory_reserve must be a number from 0 to below 1, but is 1$",
        ),
        (
            '{"model": "m", "gpu_memory_utilization": 0}',
            "must be a number above 0 and at most 1, but is 0$",
        ),
        ('{"model": "m", "speculative_config": 5}', "must be an object or null, but is 5$"),
        ('{"model": "m", "seed": "%s"}' % ("x" * 9999), "seed must be an integer or null, .*…$"),
        (
            f'{{"model": "m", "seed": {2**64}}}',
            r"^seed must be from -2\*\*63 to 2\*\*64 - 1, or null, but is 18446744073709551616$",
        ),
        ('{"model": "m", "tensor_parallel_size": 0}', "tensor_parallel_size"),
        (
            '{"model": "m", "speculative_config": {"model": "d", "draft_tensor_parallel_size": 2}}',
            "draft_tensor_parallel_size = 2 must be at most tensor_parallel_size",
        ),
        (
            '{"model": "m", "tensor_parallel_size": 2, "num_local_ranks": 3}',
            "num_local_ranks = 3, but .* makes 2 ranks",
        ),
        (
            '{"model": "m", "tensor_parallel_size": 2, "num_local_ranks": 1}',
            "num_local_ranks = 1 leaves 1 to other machines",
        ),
        (
            '{"model": "m", "tensor_parallel_size": 2, "rendezvous": "here"}',
            "rendezvous = 'here' is not HOST:PORT",
        ),
        (
            '{"model": "m", "rank_timeout_s": 1.9}',
            "rank_timeout_s must be a number from 2 to 31536000, but is 1.9",
        ),
    ],
)
def test_a_wrong_model_json_is_refused_by_name(tmp_path: Path, text, message):
    path = tmp_path / "model.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        EngineArgs.from_file(path)
    assert str(tmp_path) not in str(caught.value)


def test_an_argument_that_is_needed_is_named():
    with pytest.raises(ConfigError, match="model must be given"):
        EngineArgs.from_dict({})


def test_without_a_model_it_is_the_demo_pair_and_the_log_says_so(tmp_path: Path):
    path, lines = tmp_path / "model.json", []
    path.write_text('{"max_num_seqs": 3}')
    args = EngineArgs.from_file(path, lines.append)
    assert lines == ["model.json names no model: it is the demo model"]
    assert (args.model, args.max_num_seqs) == (str(DEMO_CHECKPOINT), 3)
    assert args.speculative_config.model == str(DEMO_DRAFT_CHECKPOINT)
    path.write_text('{"speculative_config": null}')
    assert EngineArgs.from_file(path).speculative_config is None


def test_paths_in_model_json_are_relative_to_it_and_the_tokenizer_is_the_models(tmp_path: Path):
    path = tmp_path / "model.json"
    path.write_text('{"model": "../m"}')
    args = EngineArgs.from_file(path)
    assert args.tokenizer_dir == Path(args.model) == tmp_path.parent / "m"
    path.write_text('{"model": "/a/m", "tokenizer": "t"}')
    assert EngineArgs.from_file(path).tokenizer_dir == tmp_path / "t"


def speculative(**values):
    return EngineArgs.from_dict({"model": "m", "speculative_config": values}).speculative_config


@pytest.mark.parametrize(
    ("values", "method_is_draft_model", "max_drafts"),
    [
        ({"model": "d"}, True, 5),
        ({"model": "d", "method": "draft_model", "num_speculative_tokens": 3}, True, 3),
        ({"method": "ngram"}, False, 10),
        ({"method": "suffix"}, False, 16),
    ],
)
def test_a_method_has_its_own_number_of_drafts(values, method_is_draft_model, max_drafts):
    config = speculative(**values)
    assert (config.has_draft_model, config.max_drafts) == (method_is_draft_model, max_drafts)
    assert config.adaptive


@pytest.mark.parametrize(
    ("values", "lengths"),
    [
        ({}, (2, 5)),
        ({"prompt_lookup_min": 3}, (3, 5)),
        ({"prompt_lookup_min": 7}, (7, 7)),
        ({"prompt_lookup_max": 1}, (1, 1)),
        ({"prompt_lookup_max": 4, "prompt_lookup_min": 4}, (4, 4)),
    ],
)
def test_one_length_of_an_n_gram_makes_room_for_the_other(values, lengths):
    assert speculative(method="ngram", **values).prompt_lookup == lengths


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "neither a method nor a model; methods are 'draft_model', 'ngram' and 'suffix'"),
        ({"method": "draft_model"}, "'draft_model' needs a model"),
        ({"method": "ngram", "model": "d"}, "'ngram' takes no model, but one is named"),
        (
            {"method": "eagle", "model": "d"},
            "method of speculative_config must be 'draft_model', 'ngram', 'suffix' or null, .*eagl",
        ),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens"),
        (
            {"method": "ngram", "num_speculative_tokens": 65},
            "num_speculative_tokens of .* an integer from 1 to 64 or null, but is 65",
        ),
        ({"method": "ngram", "prompt_lookup_min": 3, "prompt_lookup_max": 2}, r"must be at most"),
        ({"method": "suffix", "synthetic_acceptance_rate": 1.5}, "synthetic_acceptance_rate"),
        (
            {"method": "suffix", "depth": 1},
            "unknown key of speculative_config 'depth'; accepted are method, model, ",
        ),
    ],
)
def test_a_wrong_speculative_config_is_refused_by_name(values, message):
    with pytest.raises(ConfigError, match=message):
        speculative(**values)


def kv_events(**values) -> EngineArgs:
    return EngineArgs.from_dict({"model": "m", "kv_events_config": values})


@pytest.mark.parametrize(
    ("values", "is_on"),
    [
        ({}, False),
        ({"enable_kv_cache_events": True}, True),
        ({"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv-events"}, True),
        ({"enable_kv_cache_events": True, "publisher": "null"}, False),
        ({"enable_kv_cache_events": False, "publisher": "zmq"}, False),
    ],
)
def test_kv_events_are_published_where_vllm_would_publish_them(values, is_on):
    args = kv_events(**values)
    assert args.kv_events == (args.kv_events_config if is_on else None)
    assert EngineArgs(model="m").kv_events is None


@pytest.mark.parametrize(
    ("endpoint", "is_bound"),
    [
        ("tcp://*:5557", True),
        ("tcp://0.0.0.0:5557", True),
        ("tcp://[::]:5557", True),
        ("tcp://127.0.0.1:5557", True),
        ("tcp://[::1]:5557", True),
        ("tcp://localhost:5557", True),
        ("ipc:///run/events", True),
        ("tcp://indexer.llm-d.svc:5557", False),
        ("tcp://[fd00::7]:5557", False),
        ("tcp://10.0.0.7:65535", False),
    ],
)
def test_an_endpoint_of_this_machine_is_bound_and_another_one_is_connected_to(endpoint, is_bound):
    assert kv_events(endpoint=endpoint).kv_events_config.is_bound == is_bound


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"end_point": "x"}, "unknown key of kv_events_config 'end_point'; accepted are .*topic"),
        (
            {"publisher": "kafka"},
            "publisher of kv_events_config must be 'null' or 'zmq', but is 'kafka'",
        ),
        (
            {"enable_kv_cache_events": "yes"},
            "enable_kv_cache_events of .* must be true or false, but is 'yes'",
        ),
        ({"endpoint": "5557"}, "endpoint = '5557' is neither tcp://HOST:PORT nor ipc://PATH"),
        ({"endpoint": "inproc://x"}, "endpoint = 'inproc://x' is neither"),
        ({"endpoint": "tcp://*"}, "endpoint = 'tcp://\\*' is neither"),
        ({"endpoint": "tcp://*:0"}, "endpoint = 'tcp://\\*:0' is neither"),
        ({"endpoint": "tcp://*:65536"}, "endpoint = 'tcp://\\*:65536' is neither"),
        ({"endpoint": "ipc://"}, "endpoint = 'ipc://' is neither"),
        ({"endpoint": "tcp://\ud800:1"}, "endpoint = .* is neither"),
        ({"replay_endpoint": "tcp:/x:1"}, "replay_endpoint = 'tcp:/x:1' is neither"),
        (
            {"endpoint": "ipc:///run/a", "replay_endpoint": "ipc:///run/a"},
            "replay_endpoint = 'ipc:///run/a' is the same place as endpoint = 'ipc:///run/a'; each",
        ),
        ({"endpoint": "ipc:///run/a", "replay_endpoint": "ipc:///run/./a"}, "is the same place"),
        ({"endpoint": "ipc://a", "replay_endpoint": "ipc://./a"}, "is the same place as"),
        ({"replay_endpoint": "tcp://127.0.0.1:5557"}, "is the same place as endpoint"),
        ({"buffer_steps": 0}, "buffer_steps = 0 must be 1 to 2147483646"),
        ({"hwm": -1}, "hwm = -1 must be 1 to"),
        ({"max_queue_size": 2**31}, "max_queue_size = 2147483648 must be 1 to"),
        ({"hwm": "many"}, "hwm of kv_events_config must be an integer, but is 'many'"),
    ],
)
def test_a_wrong_kv_events_config_is_refused_by_name(values, message):
    with pytest.raises(ConfigError, match=message):
        kv_events(**values)


def test_kv_events_may_have_two_paths_in_one_directory():
    paths = {"endpoint": "ipc:///run/a", "replay_endpoint": "ipc:///run/b"}
    assert kv_events(**paths).kv_events_config.replay_endpoint == "ipc:///run/b"


def test_the_bound_of_a_large_integer_has_all_of_its_digits():
    with pytest.raises(ConfigError, match="an integer from 1 to 9007199254740992 or null, but"):
        EngineArgs.from_dict({"model": "m", "kv_cache_memory_bytes": 2**53 + 1})


def test_kv_events_need_a_prefix_cache():
    values = {"model": "m", "kv_events_config": {"enable_kv_cache_events": True}}
    with pytest.raises(ConfigError, match="enable_prefix_caching = False has none"):
        EngineArgs.from_dict(values | {"enable_prefix_caching": False})


@pytest.mark.parametrize(
    ("name", "value", "default", "without", "needed"),
    [
        (
            "eviction_policy",
            "lru",
            "adaptive",
            {"enable_prefix_caching": False},
            {"enable_prefix_caching": True},
        ),
        ("kv_cache_file_space", 2.0, 4.0, {}, {"kv_cache_path": "/cache"}),
    ],
)
def test_an_argument_that_has_no_effect_without_another_one_is_logged(
    name: str, value: Any, default: Any, without: dict[str, Any], needed: dict[str, Any]
):
    lines: list[str] = []
    EngineArgs.from_dict({"model": "m", name: value} | needed, lines.append)
    EngineArgs.from_dict({"model": "m", name: default} | without, lines.append)
    EngineArgs.from_dict({"model": "m"} | without, lines.append)
    assert lines == []
    args = EngineArgs.from_dict({"model": "m", name: value} | without, lines.append)
    assert getattr(args, name) == value
    (other,) = needed
    assert lines == [f"warning: engine argument {name} = {value!r} has no effect without {other}"]


def test_a_directory_for_the_kv_cache_must_have_a_name(tmp_path: Path):
    path = tmp_path / "model.json"
    path.write_text('{"model": "m", "kv_cache_path": ""}')
    with pytest.raises(ConfigError, match="kv_cache_path = '' names no directory"):
        EngineArgs.from_dict({"model": "m", "kv_cache_path": ""})
    with pytest.raises(ConfigError, match="kv_cache_path = '' names no directory"):
        EngineArgs.from_file(path)


def test_the_draft_models_path_in_model_json_is_relative_to_it(tmp_path: Path):
    path = tmp_path / "model.json"
    path.write_text('{"model": "m", "speculative_config": {"model": "../d"}}')
    config = EngineArgs.from_file(path).speculative_config
    assert config is not None
    assert config.model == str(tmp_path.parent / "d")


def test_rows_and_tokens_of_a_step_may_be_left_to_the_scheduler():
    fixed = EngineArgs.from_dict({"model": "m", "max_num_seqs": 3, "max_num_batched_tokens": 5})
    assert (fixed.most_rows, fixed.most_step_tokens) == (3, 5)
    adapts = {"model": "m", "max_num_seqs": "auto", "max_num_batched_tokens": "auto"}
    args = EngineArgs.from_dict(adapts)
    assert (args.most_rows, args.most_step_tokens) == (256, 4096)
    with pytest.raises(ConfigError, match="max_num_seqs"):
        EngineArgs.from_dict({"model": "m", "max_num_seqs": "many"})


def test_tokens_of_a_step_are_not_left_to_the_scheduler_where_prompts_are_not_cut():
    values = {"model": "m", "enable_chunked_prefill": False}
    with pytest.raises(
        ConfigError, match="max_num_batched_tokens = 'auto' has no effect with enable"
    ):
        EngineArgs.from_dict(values | {"max_num_batched_tokens": "auto"})
    EngineArgs.from_dict(values | {"max_num_seqs": "auto"})
