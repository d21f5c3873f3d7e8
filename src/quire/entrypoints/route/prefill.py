"""Disaggregated prefill: a prompt is computed by one server, which keeps its pages, and answered by another, which fetches them.

What one server's answer says of the pages (`kv_transfer_params`) goes into the request for the other. Without it the other one
computes the prompt: nothing depends on a prefill server. Knows the fields of requests; knows nothing of pages.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Any, cast

from quire.entrypoints.http.backend_link import BackendGone, Headers, exchange
from quire.entrypoints.route.replica_pool import ReplicaPool
from quire.guards import is_dict
from quire.logger import init_logger

logger = init_logger(__name__)

PARAMS = "kv_transfer_params"
_DECODE_ELSEWHERE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_OF_ANSWERS = ("stream_options", "min_tokens", "best_of", "logprobs", "top_logprobs", "use_beam_search")
"""Fields that say what an answer is to be like; of a prefill server one token is wanted."""
_WHOLE_PROMPT = ("echo", "prompt_logprobs")
"""Fields that need all of a prompt computed where it is answered."""


class PrefillServers:
    """Servers that compute prompts for others.

    Args:
        pool: the servers.
        timeout_s: how long one may take.
        least_tokens: shorter prompts are computed where they are answered.
    """

    def __init__(self, pool: ReplicaPool, timeout_s: float, least_tokens: int) -> None:
        self.pool, self._timeout_s, self._least = pool, timeout_s, least_tokens
        self.num_missed = 0

    async def compute(self, path: str, headers: Headers, body: bytes, keys: Sequence[int], num_tokens: int) -> bytes:
        """Have a request's prompt computed; returns the request for the server that answers it."""
        request = cast("dict[str, Any]", json.loads(body))
        if num_tokens < self._least or PARAMS in request or any(request.get(field) for field in _WHOLE_PROMPT):
            return body
        assignment = self.pool.choose(keys, num_tokens, set())
        if assignment is None:
            return body
        target = self.pool.replicas[assignment.replica].target
        try:
            async with asyncio.timeout(self._timeout_s):
                asked = json.dumps(_for_prefill(request), ensure_ascii=False).encode()
                async with exchange(target, "POST", path, headers, asked) as answer:
                    text = await answer.whole()
                    found = json.loads(text).get(PARAMS) if answer.status == 200 else None
            if is_dict(found):
                return json.dumps({**request, PARAMS: found}, ensure_ascii=False).encode()
            problem = f"it answers {answer.status}, without {PARAMS}"
        except BackendGone as error:
            problem = str(error)
            self.pool.note(assignment.replica, problem)
        except (TimeoutError, ValueError, AttributeError) as error:
            problem = str(error) or f"no answer within {self._timeout_s:g} s"
        finally:
            self.pool.chooser.end(assignment)
        self.num_missed += 1
        logger.warning("%s computed no prompt, the server that answers does: %s", target.url, problem)
        return body


def _for_prefill(request: dict[str, Any]) -> dict[str, Any]:
    """A request that has its prompt computed, and its pages kept for another server."""
    asked = {field: value for field, value in request.items() if field not in _OF_ANSWERS}
    limit = "max_completion_tokens" if "max_completion_tokens" in asked else "max_tokens"
    return asked | {"stream": False, "n": 1, limit: 1, PARAMS: _DECODE_ELSEWHERE}
