"""Fuzz a gateway with schemathesis, and record what it found.

    make gateway-fuzz
    make gateway-fuzz ARGS="--max-examples 200 --seed 7"

schemathesis reads the OpenAPI document of a real gateway, in front of a real tritonserver with a
small random model, and sends requests to every route that the document has: its examples, the
boundaries of every field, and random ones, right and wrong. Then it does so with a gateway that
asks for API keys. Settings and further checks are in tests/contract. A context of the model is
short, so that an answer without a limit is short too.

The record has how many answers of each status and media type each route of each gateway gave.

The exit code is 0 where every answer passed all checks, no gateway logged a fault of its own, every
route that can stream has streamed, and the gateway with keys has refused some requests with 401 and
some with 403.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paths import TESTS

# It shares the gateway and checkpoints with the tests.
sys.path.append(str(TESTS))

from charonia.launch.server.run import running_server
from command_line import add_output, exit_on_sigterm, make_parser, positive
from record import circumstances, output_stem, write_record
from report import markdown_table
from support.checkpoints import make_checkpoint
from support.e2e import ONE_THREAD, one_torch_thread
from support.gateway import running_gateway

CONTRACT = TESTS / "contract"
MODEL = "small"
TEMPLATE = """{% for message in messages %}<{{ message.role }}>{{ message.content }}</>
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
MAX_MODEL_LEN = 48
MAX_PROMPTS = 8
SETTINGS = (
    ONE_THREAD,
    f"max_model_len={MAX_MODEL_LEN}",
    "max_num_seqs=64",
    "num_gpu_blocks_override=1025",
    "scheduling_policy=priority",  # another one refuses `priority`
)
COUNTS, KEYS = "CHARONIA_FUZZ_COUNTS", "CHARONIA_FUZZ_KEYS"
OPEN, KEYED = "without API keys", "with API keys"
API_KEYS = {"sk-of-anyone": None, "sk-of-a-team": "team"}
"""The keys of a gateway, each with its tenant."""
STREAMS = ("text/event-stream", "application/x-ndjson")
Counts = Sequence[tuple[str, str, str, int]]
"""Numbers of answers by route, status and media type."""


def fuzz(
    url: str,
    document: dict[str, Any],
    keys: Mapping[str, str | None],
    max_examples: int,
    seed: int,
    folder: Path,
) -> tuple[int, dict[str, Any]]:
    """Run schemathesis; its exit code, and what it reports.

    Args:
        document: that of the gateway. keys: it asks for one of these, if there are any.
        folder: for files.
    """
    # From the URL of the document, its own route would be left out.
    path = folder / "openapi.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    report, counts = folder / "report.json", folder / "counts.json"
    command = [
        str(Path(sys.executable).with_name("schemathesis")),
        f"--config-file={CONTRACT / 'schemathesis.toml'}",
        "run",
        str(path),
        f"--url={url}",
        f"--max-examples={max_examples}",
        f"--seed={seed}",
        f"--report-json-path={report}",
        "--continue-on-failure",
        "--no-color",
    ]
    environment = os.environ | {
        "SCHEMATHESIS_HOOKS": str(CONTRACT / "hooks.py"),
        COUNTS: str(counts),
        KEYS: json.dumps(keys),
    }
    code = subprocess.run(command, cwd=folder, env=environment, check=False).returncode
    found = json.loads(report.read_text(encoding="utf-8"))
    del found["command"]  # with this machine's paths; the record has the command that was given
    return code, {"report": found, "counts": json.loads(counts.read_text(encoding="utf-8"))}


def silent(document: dict[str, Any], counts: Counts) -> list[str]:
    """The routes that can stream, and have not."""
    streamed = {route for route, _, media_type, _ in counts if media_type in STREAMS}
    return [
        f"{method.upper()} {path}"
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        if any(name in operation["responses"].get("200", {}).get("content", {}) for name in STREAMS)
        and f"{method.upper()} {path}" not in streamed
    ]


def missing(document: dict[str, Any], counts: Counts, keys: Mapping[str, str | None]) -> list[str]:
    """List what a run must have seen, and has not."""
    found = [f"no stream came of {route}" for route in silent(document, counts)]
    if keys:
        seen = {status for _, status, _, _ in counts}
        found += [f"no answer was a {status}" for status in ("401", "403") if status not in seen]
    return found


def as_markdown(about: dict[str, Any], gateways: Mapping[str, Mapping[str, Any]]) -> str:
    """A table for each gateway, with a row for each route: how many answers of each status."""
    machine = about["machine"].get("Model name", "unknown")
    head = (
        f"{about['date']}, commit {about['commit']}, {about['machine'].get('CPU(s)')} x {machine}, "
        f"schemathesis {about['schemathesis']}, seed {about['seed']}, at most "
        f"{about['max_examples']} random requests for each route: {about['outcome']}"
    )
    parts = [head]
    for name, found in gateways.items():
        parts += [f"A gateway {name}:", _table(found["counts"])]
    return "\n\n".join(parts) + "\n"


def _table(counts: Counts) -> str:
    rows = [_row(name, [row for row in counts if row[0] == name]) for name in _routes(counts)]
    head = ["route", "requests", "statuses", "streams"]
    return markdown_table(head, [*rows, _row("all", counts)])


def _routes(counts: Counts) -> list[str]:
    return list(dict.fromkeys(row[0] for row in counts))


def _row(name: str, counts: Counts) -> list[str]:
    statuses: Counter[str] = Counter()
    for _, status, _, count in counts:
        statuses[status] += count
    listed = ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items()))
    streams = sum(count for _, _, media_type, count in counts if media_type in STREAMS)
    return [name, str(statuses.total()), listed, str(streams)]


def main() -> None:
    """Start what is fuzzed, run schemathesis, and write the record."""
    exit_on_sigterm("gateway_fuzz.py")
    options = _parser().parse_args()
    stem = output_stem(options.output, "gateway-fuzz")
    about = circumstances("gateway_fuzz.py") | {
        "schemathesis": version("schemathesis"),
        "seed": options.seed,
        "max_examples": options.max_examples,
    }
    code, gateways = _fuzz_all(options.max_examples, options.seed)
    about["outcome"] = "all checks passed" if code == 0 else "**failed**"
    table = as_markdown(about, gateways)
    print(table)
    print(write_record(stem, about | {"gateways": gateways}, table=table))
    sys.exit(code)


def _fuzz_all(max_examples: int, seed: int) -> tuple[int, dict[str, dict[str, Any]]]:
    """Fuzz both gateways; the exit code, and what is reported of each."""
    code, gateways = 0, {}
    with tempfile.TemporaryDirectory(prefix="charonia-fuzz-") as name:
        folder = Path(name)
        model = make_checkpoint(folder / MODEL, max_position_embeddings=MAX_MODEL_LEN)
        (model / "chat_template.jinja").write_text(TEMPLATE)
        file = folder / "keys"
        lines = [f"{key} {tenant or ''}\n" for key, tenant in API_KEYS.items()]
        file.write_text("".join(lines), encoding="utf-8")
        arguments = ("--served-model-name", MODEL, f"--max-prompts={MAX_PROMPTS}")
        with one_torch_thread(), running_server(model=model, settings=SETTINGS) as server:
            for which, keys in ((OPEN, {}), (KEYED, API_KEYS)):
                more = ("--api-key-file", str(file)) if keys else ()
                with running_gateway([server.grpc_url], model, *arguments, *more) as gateway:
                    document = gateway.http.get("/openapi.json").json()
                    failed, found = fuzz(gateway.url, document, keys, max_examples, seed, folder)
                unseen = missing(document, found["counts"], keys)
                for what in unseen:
                    print(f"a gateway {which}: {what}")
                code = code or failed or int(bool(unseen))
                gateways[which] = found
    return code, gateways


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--max-examples",
        type=positive,
        default=60,
        metavar="N",
        help="random requests for each route, at most (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=1, metavar="N", help="of random requests (default: %(default)s)"
    )
    add_output(parser, "gateway-fuzz", "md")
    return parser


if __name__ == "__main__":
    main()
