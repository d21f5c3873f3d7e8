"""The routes under `/v1/responses`: each reads what was sent, calls one function, and encodes what it gives."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.entrypoints.database import Missing
from quire.entrypoints.http.errors import bad_field, bad_request, not_ready
from quire.entrypoints.http.push import stream_answer
from quire.entrypoints.http.route_tools import (
    Endpoint,
    flag_of,
    is_ascending,
    json_response,
    number_of,
    page_of,
    read_request,
    state_of,
)
from quire.entrypoints.http.streaming import EVENTS, EventStream, run_while_connected, stream_headers
from quire.entrypoints.responses.prepare import count_input_tokens, prepare_response
from quire.entrypoints.responses.protocol import (
    DeletedResponse,
    InputTokensRequest,
    InputTokensResponse,
    ItemList,
    ResponseObject,
    ResponsesRequest,
)
from quire.entrypoints.responses.run import BackgroundRun, answer_response, find, not_found

MAX_LISTED = 100


async def create_response(request: Request) -> Response:
    """`POST /v1/responses`."""
    state = state_of(request)
    body = await read_request(request, ResponsesRequest)

    async def work() -> Response:
        job = await prepare_response(state, body)
        if body.background:
            run = BackgroundRun(job)
            await run.start()
            if body.stream:
                return EventStream(run.follow())
            return json_response(job.response)
        if body.stream:
            return await stream_answer(request, job, state.settings.sse_keep_alive_interval)
        return json_response(await answer_response(job))

    return await run_while_connected(request, work())


async def count_tokens(request: Request) -> Response:
    """`POST /v1/responses/input_tokens`."""
    body = await read_request(request, InputTokensRequest)
    return json_response(await count_input_tokens(state_of(request), body))


async def retrieve_response(request: Request) -> Response:
    """`GET /v1/responses/{id}`; with `stream=true` its events, those behind number `starting_after`."""
    state, response_id = state_of(request), request.path_params["response_id"]
    after = number_of(request, "starting_after", -1, 0, header="last-event-id")
    run: BackgroundRun | None = state.background.get(response_id)
    if not flag_of(request, "stream", False):
        if run is not None:
            return json_response(run.job.response)
        return _json((await find(state, response_id)).body)
    if run is not None and run.job.has_stream:
        return EventStream(run.follow(after))
    events = None if run is not None else (await find(state, response_id)).events
    if response_id in state.handed_over:
        raise not_ready("The response was left by another server and goes on soon.", 1)
    if events is None:
        raise bad_field("stream", "only a response that was made with background and stream can be streamed again.")
    rest = events.split(b"\n\n", after + 1)  # JSON has no raw line ends
    told = rest[-1] if len(rest) == after + 2 else b""
    return Response(told, headers={name.decode(): value.decode() for name, value in stream_headers(EVENTS)})


async def delete_response(request: Request) -> Response:
    """`DELETE /v1/responses/{id}`; one that is being made is stopped."""
    state, response_id = state_of(request), request.path_params["response_id"]
    if response_id in state.background:
        await state.background[response_id].cancel()
    try:
        await state.responses.delete(response_id)
    except Missing:
        raise not_found(response_id) from None
    return json_response(DeletedResponse(response_id))


async def cancel_response(request: Request) -> Response:
    """`POST /v1/responses/{id}/cancel`; one that is over stays as it is."""
    state, response_id = state_of(request), request.path_params["response_id"]
    run: BackgroundRun | None = state.background.get(response_id)
    if run is not None:
        await run.cancel()
        return json_response(run.job.response)
    body = (await find(state, response_id)).body
    if not msgspec.json.decode(body)["background"]:
        raise bad_request("Cannot cancel a synchronous response: it was made without background.", "response_id")
    return _json(body)


async def list_input_items(request: Request) -> Response:
    """`GET /v1/responses/{id}/input_items`: the request's own items, not those of the conversation before."""
    limit, after = number_of(request, "limit", 20, 1, MAX_LISTED), request.query_params.get("after")
    ascends = is_ascending(request)
    record = await find(state_of(request), request.path_params["response_id"])
    items: list[dict[str, str]] = msgspec.json.decode(record.input)
    items = items if ascends else items[::-1]
    if after is not None:
        places = [index for index, item in enumerate(items) if item["id"] == after]
        if not places:
            raise bad_field("after", f"there is no item {after[:100]!r} in this response's input.")
        items = items[places[0] + 1 :]
    page = items[:limit]
    return json_response(page_of(ItemList, page, [item["id"] for item in page], len(items) > limit))


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


_INPUT = {"input": "What is 17 + 25?"}

WORK = (
    Endpoint(
        "/v1/responses",
        create_response,
        "Answer, and remember: `previous_response_id` goes on from an earlier response; `stream: true` gives OpenAI's events.",
        body=(ResponsesRequest,),
        answer=ResponseObject,
        example={**_INPUT, "max_output_tokens": 32, "temperature": 0},
    ),
    Endpoint(
        "/v1/responses/input_tokens",
        count_tokens,
        "How many tokens a request to /v1/responses has.",
        body=(InputTokensRequest,),
        answer=InputTokensResponse,
        example=_INPUT,
    ),
)
KEPT = (
    Endpoint(
        "/v1/responses/{response_id}",
        retrieve_response,
        "A response that was kept; `stream=true`: its events, behind number `starting_after`.",
        ("GET",),
        answer=ResponseObject,
        query={"stream": "boolean", "starting_after": "integer"},
    ),
    Endpoint("/v1/responses/{response_id}", delete_response, "Forget a response.", ("DELETE",), answer=DeletedResponse),
    Endpoint(
        "/v1/responses/{response_id}/cancel",
        cancel_response,
        "Stop a response made in the background.",
        answer=ResponseObject,
    ),
    Endpoint(
        "/v1/responses/{response_id}/input_items",
        list_input_items,
        "The items that a response was made from.",
        ("GET",),
        answer=ItemList,
        query={"limit": "integer", "order": "string", "after": "string"},
    ),
)
"""What is asked of responses that were kept: served also while the engine starts or the server drains."""
