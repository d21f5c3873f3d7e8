"""Answers an OpenAI batch file, without a server: python examples/batch.py [FOLDER]

The same on the command line: quire run-batch -i requests.jsonl -o answers.jsonl
"""

import json
import sys
from pathlib import Path

from quire.entrypoints.cli.main import main as quire

QUESTIONS = {"sum": "What is 17 + 25?", "capital": "What is the capital of France?"}


def main(folder: str = ".") -> None:
    """Writes a file of requests, answers it, and prints the answers."""
    requests, answers = Path(folder, "requests.jsonl"), Path(folder, "answers.jsonl")
    with requests.open("w", encoding="utf-8") as file:
        for name, question in QUESTIONS.items():
            body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 64}
            line = {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    quire(["run-batch", "-i", str(requests), "-o", str(answers), "--overwrite", "--max-model-len", "1024"])
    for line in answers.read_text(encoding="utf-8").splitlines():
        answer = json.loads(line)
        print(answer["custom_id"], "->", answer["response"]["body"]["choices"][0]["message"]["content"])


if __name__ == "__main__":
    main(*sys.argv[1:2])
