"""`quire serve` on the built-in demo model."""

import openai
from tests.oracles.server_process import SERVE, ServerProcess

FLAGS = ("--port", "0", "--max-model-len", "1024", "--kv-cache-memory-bytes", "64M", "--max-num-seqs", "16")


class DemoServer(ServerProcess):
    """A server process on the demo model."""

    def __init__(self, *flags: str) -> None:
        super().__init__(*SERVE, *FLAGS, *flags)

    def openai(self, **options) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **options)

    def complete(self, **fields) -> dict:
        response = self.client.post("/v1/completions", json={"max_tokens": 12, "temperature": 0, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    def metric(self, name: str, **labels: str) -> float:
        """A metric's value; missing labels match anything."""
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith(f"quire:{name}{{") and all(f'{k}="{v}"' in line for k, v in labels.items()):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no metric {name} {labels}")
