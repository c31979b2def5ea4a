"""Fuzz a gateway with schemathesis, and record what it found.

    make gateway-fuzz
    make gateway-fuzz ARGS="--max-examples 200 --seed 7"

schemathesis reads the OpenAPI document of a real gateway, in front of a real tritonserver with a
small random model, and sends requests to every route that the document has: its examples, the
boundaries of every field, and random ones, right and wrong. Settings and further checks are in
tests/contract. A context of the model is short, so that an answer without a limit is short too.

The exit code is 0 where every answer passed all checks, the gateway logged no fault of its own, and
every route that can stream has streamed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
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
COUNTS = "CHARONIA_FUZZ_COUNTS"
STREAMS = ("text/event-stream", "application/x-ndjson")
Counts = Sequence[tuple[str, str, str, int]]
"""How many answers there were by route, status and media type."""


def fuzz(
    url: str, document: dict[str, Any], max_examples: int, seed: int, folder: Path
) -> tuple[int, dict[str, Any]]:
    """Run schemathesis; its exit code, and what it reports.

    Args:
        document: that of the gateway. folder: for files.
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


def as_markdown(about: dict[str, Any], counts: Counts) -> str:
    """A table with a row for each route: how many answers there were of each status."""
    machine = about["machine"].get("Model name", "unknown")
    head = (
        f"{about['date']}, commit {about['commit']}, {about['machine'].get('CPU(s)')} x {machine}, "
        f"schemathesis {about['schemathesis']}, seed {about['seed']}, at most "
        f"{about['max_examples']} random requests for each route: {about['outcome']}"
    )
    rows = []
    for route in dict.fromkeys(row[0] for row in counts):
        statuses: Counter[str] = Counter()
        for name, status, _, count in counts:
            statuses[status] += count if name == route else 0
        streams = sum(row[3] for row in counts if row[0] == route and row[2] in STREAMS)
        listed = ", ".join(f"{count} x {status}" for status, count in statuses.items() if count)
        rows.append([route, str(statuses.total()), listed, str(streams)])
    return f"{head}\n\n{markdown_table(['route', 'requests', 'statuses', 'streams'], rows)}\n"


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
    with tempfile.TemporaryDirectory(prefix="charonia-fuzz-") as name:
        folder = Path(name)
        model = make_checkpoint(folder / MODEL, max_position_embeddings=MAX_MODEL_LEN)
        (model / "chat_template.jinja").write_text(TEMPLATE)
        arguments = ("--served-model-name", MODEL, f"--max-prompts={MAX_PROMPTS}")
        with (
            one_torch_thread(),
            running_server(model=model, settings=SETTINGS) as server,
            running_gateway([server.grpc_url], model, *arguments) as gateway,
        ):
            document = gateway.http.get("/openapi.json").json()
            code, found = fuzz(gateway.url, document, options.max_examples, options.seed, folder)
    if unheard := silent(document, found["counts"]):
        print(f"no stream came of {', '.join(unheard)}")
        code = code or 1
    about["outcome"] = "all checks passed" if code == 0 else "**failed**"
    table = as_markdown(about, found["counts"])
    print(table)
    print(write_record(stem, about | found, table=table))
    sys.exit(code)


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
