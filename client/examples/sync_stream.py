"""Stream one completion to the terminal.

python client/examples/sync_stream.py "def fibonacci(n):"
"""

import sys

from charonia_client import CharoniaClientError, Client, Timeouts


def main() -> int:
    prompt = sys.argv[1] if len(sys.argv) > 1 else "def fibonacci(n):"
    with Client("127.0.0.1:8001", timeouts=Timeouts(total_s=60, first_token_s=10)) as client:
        print(prompt, end="", flush=True)
        try:
            # Leaving the block early, with Ctrl-C or break, cancels the request on the server.
            with client.stream(prompt, max_tokens=64, temperature=0.2, seed=1) as stream:
                for chunk in stream:
                    print(chunk.text, end="", flush=True)
        except CharoniaClientError as error:
            print(f"\n{type(error).__name__}: {error}", file=sys.stderr)
            return 1
    print(f"\n[{chunk.finish_reason}] {dict(chunk.timing or {})}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
