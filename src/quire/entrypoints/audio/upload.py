"""A form with a sound: its file, within bounds, and its other fields as a typed request."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from quire import envs
from quire.entrypoints.audio.transcription_protocol import TranscriptionRequest
from quire.entrypoints.http.decoding import stream_body
from quire.entrypoints.http.errors import bad_field
from quire.entrypoints.http.form import FormReader, read_form
from quire.entrypoints.http.route_tools import state_of

MAX_FIELD_BYTES = 64 << 10
FORM_BYTES = 256 << 10
"""Room for a form's fields besides its file."""
UPLOAD_TIMEOUT_S = 600.0
LISTS = ("timestamp_granularities",)


async def read_upload(request: Request) -> tuple[bytes, TranscriptionRequest]:
    """The file's bytes and the request.
    Raises HTTPError: a 400 with the field, or a 413 for a file that is too large."""
    limit = envs.QUIRE_MAX_AUDIO_CLIP_FILESIZE_MB << 20
    pieces = stream_body(request, limit + FORM_BYTES, UPLOAD_TIMEOUT_S)
    form = FormReader(request.headers.get("content-type", ""), pieces)
    file = bytearray()

    async def write(piece: bytes) -> None:
        file.extend(piece)

    _, fields = await read_form(form, write, limit, "QUIRE_MAX_AUDIO_CLIP_FILESIZE_MB", MAX_FIELD_BYTES)
    if not file:
        raise bad_field("file", "it is empty.")
    warnings: list[str] = request.scope["state"].setdefault("warnings", [])
    return bytes(file), state_of(request).decoder.decode_form(_typed(fields), TranscriptionRequest, warnings)


def _typed(fields: Mapping[str, list[str]]) -> dict[str, Any]:
    """Each field's text, or its texts where it is a list."""
    for name, given in fields.items():
        if len(given) > 1 and name not in LISTS:
            raise bad_field(name[:60], "the form has more than one.")
    return {name: given if name in LISTS else given[0] for name, given in fields.items()}
