"""`charonia generate`: one completion, streamed to the terminal.

Owns how chunks are printed. Must not know how they travel (see charonia_client).
"""

import codecs
import dataclasses
import json
import sys

from charonia.errors import ConfigError, LaunchError
from charonia_client import CharoniaClientError, Client, Sampling
from charonia_client.values import Protocol


def generate(
    prompt: str,
    sampling: Sampling,
    *,
    protocol: Protocol,
    url: str | None,
    model_name: str,
    as_json: bool,
) -> None:
    """Stream a completion of `prompt` to stdout: its text, or with `as_json` an object per chunk.

    Args:
        url: `host:port`; None is this machine and the default port of `protocol`.

    Raises:
        ConfigError: `url` is none.
        LaunchError: the server cannot be reached, or refuses the request.
    """
    try:
        connection = Client(url, protocol=protocol, model=model_name)
    except ValueError as error:
        raise ConfigError(f"--{error}") from None
    is_unicode = codecs.lookup(sys.stdout.encoding or "utf-8").name.startswith("utf")
    try:
        with (
            connection as client,
            client.stream(prompt, sampling) as chunks,
        ):
            for chunk in chunks:
                if as_json:
                    fields = {k: v for k, v in dataclasses.asdict(chunk).items() if v is not None}
                    print(json.dumps(fields, ensure_ascii=not is_unicode), flush=True)
                else:
                    print(chunk.text, end="\n" if chunk.is_final else "", flush=True)
    except CharoniaClientError as error:
        raise LaunchError(str(error)) from None
