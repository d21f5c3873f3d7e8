"""`python -m quire.entrypoints.openai.api_server …`: `quire serve` under the name that scripts written for vLLM call."""

import sys

from quire.entrypoints.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
