"""The tenants' file: what it may say, and that it may change while the server runs."""

import json
import os
from pathlib import Path

import pytest

from charonia.core.gate.tenants import LOOK_EVERY_S, MAX_LABELS, TenantArgs, Tenants
from charonia.errors import ConfigError
from charonia.metrics.metric_table import OTHERS

FILE = {
    "default": {"max_queue_size": 5},
    "tenants": {"search": {"weight": 4}, "batch": {"requests_per_s": 0.5}},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "tenants.json", FILE)


def write(path: Path, content) -> Path:
    """Replace a file as an editor does: the new one has an inode of its own."""
    draft = path.with_suffix(".draft")
    draft.write_text(content if isinstance(content, str) else json.dumps(content))
    os.replace(draft, path)
    return path


def read(path: Path | None, log=None, **options) -> Tenants:
    return Tenants(path, log=[].append if log is None else log.append, **options)


def test_each_tenant_has_its_own_and_all_others_have_the_default(path):
    tenants = read(path, has_shares=True)
    assert tenants.of("search") == TenantArgs(weight=4)
    assert tenants.weight_of("search") == 4
    assert tenants.of("batch").bucket_size == 1
    for other in ("", "anybody"):
        assert tenants.of(other) == TenantArgs(max_queue_size=5)
        assert tenants.accepts(other)


def test_without_a_file_nobody_is_limited():
    tenants = read(None)
    assert tenants.of("anybody") == TenantArgs()
    tenants.refresh(100.0)
    assert tenants.accepts("anybody")


def test_a_bucket_holds_a_second_of_requests_unless_it_is_said_otherwise():
    assert TenantArgs(requests_per_s=20).bucket_size == 20
    assert TenantArgs(requests_per_s=20, burst=3).bucket_size == 3


def test_those_that_the_file_does_not_name_may_be_refused(path):
    write(path, FILE | {"unknown": "refuse"})
    tenants = read(path, has_shares=True)
    assert tenants.accepts("search")
    assert not tenants.accepts("anybody")
    assert not tenants.accepts("")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "^tenants.json is not a JSON object: "),
        ("[]", "^tenants.json is not a JSON object: "),
        ({"tenant": {}}, "^tenants.json: unknown key 'tenant'; accepted are unknown, default, te"),
        (
            {"tenants": {"a": {}, "b": {"wait": 1}}},
            r"^tenants.json: unknown key of tenants\['b'\] 'wait'; accepted are weight, max_",
        ),
        (
            {"tenants": {"a": {}, "b": {"weight": 0}}},
            r"weight of tenants\['b'\] must be a number from 0.001 to 1000000, but is 0$",
        ),
        (
            '{"tenants": {"a": {"weight": 2}, "b": {}, "a": {}}}',
            "^tenants.json: the key 'a' is there 2 times in one object$",
        ),
        ({"tenants": {"a": 5}}, r"tenants\['a'\] must be an object, but is 5$"),
        ({"tenants": []}, r"tenants must be an object, but is \[\]$"),
        ({"tenants": {"other": {}}}, "no tenant may be called 'other'"),
        (
            {"default": {"max_queue_size": "many"}},
            "max_queue_size of default must be an integer from 1 to 2147483647 or null, .*'many'$",
        ),
        (
            {"tenants": {"a": {"burst": 2}}},
            r"^tenants.json: tenants\['a'\]: burst is given without requests_per_s$",
        ),
        ({"unknown": "ignore"}, "unknown must be 'accept' or 'refuse', but is 'ignore'$"),
        ({"tenants": {"a": {"weight": 2}}}, "weight of 'a' has no effect without .* fair_share"),
    ],
)
def test_what_is_wrong_is_named(path, content, says):
    write(path, content)
    with pytest.raises(ConfigError, match=says):
        read(path)


def test_a_file_that_is_not_there_is_named_without_its_directory(tmp_path):
    with pytest.raises(ConfigError, match=r"^tenants.json cannot be read: No such file"):
        read(tmp_path / "tenants.json")


def test_a_file_that_changes_is_read_again(path):
    log: list[str] = []
    tenants = read(path, log, has_shares=True)
    tenants.refresh(LOOK_EVERY_S)
    write(path, {"tenants": {"search": {"weight": 2}}})
    tenants.refresh(1.5 * LOOK_EVERY_S)
    assert tenants.weight_of("search") == 4, "it is not looked at all the time"
    tenants.refresh(2 * LOOK_EVERY_S)
    assert tenants.weight_of("search") == 2
    assert [line.split()[0] for line in log] == ["tenants_reloaded"]


def test_a_file_that_is_written_in_place_with_its_size_and_time_is_read_again(path):
    tenants = read(path, has_shares=True)
    status = path.stat()
    path.write_text(path.read_text().replace('"weight": 4', '"weight": 2'))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    tenants.refresh(LOOK_EVERY_S)
    assert tenants.weight_of("search") == 2


@pytest.mark.parametrize("content", ['{"unknown"', None])
def test_a_file_that_becomes_wrong_changes_nothing_and_is_told_of_once(path, content):
    log: list[str] = []
    tenants = read(path, log, has_shares=True)
    if content is None:
        path.unlink()
    else:
        write(path, content)
    for turn in range(1, 4):
        tenants.refresh(turn * LOOK_EVERY_S)
    assert tenants.weight_of("search") == 4
    assert [line.split()[0] for line in log] == ["tenants_not_reloaded"]
    write(path, {})
    tenants.refresh(4 * LOOK_EVERY_S)
    assert tenants.weight_of("search") == 1


def test_metrics_know_those_of_the_file_by_name_and_all_others_together(path):
    tenants = read(path, has_shares=True)
    assert tenants.label_of("search") == "search"
    assert {tenants.label_of(name) for name in ("", "anybody", OTHERS)} == {OTHERS}
    assert tenants.labels == ["search", "batch", OTHERS]


def test_there_are_only_so_many_names_however_often_the_file_changes(path):
    tenants = read(path, has_shares=True)
    for number in range(5):
        names = [f"{number}-{index}" for index in range(20)]
        write(path, {"tenants": {name: {} for name in names}})
        tenants.refresh(10.0 * (number + 1))
    assert len(tenants.labels) == MAX_LABELS + 1
    assert tenants.label_of("search") == "search", "its series are there for ever"
    assert tenants.label_of("4-19") == OTHERS
