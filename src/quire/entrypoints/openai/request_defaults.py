"""What the operator has set for requests that do not say it themselves; the template's part of it is in `prompts.py`.

Knows fields. Called once a request, before anything else reads them.
"""

from quire.entrypoints.openai.protocol import GenerationFields, StreamOptions
from quire.entrypoints.openai.state import ServerSettings


def apply_defaults(settings: ServerSettings, request: GenerationFields) -> None:
    """Write the operator's choices into a request; what it says itself stays."""
    if request.return_tokens_as_token_ids is None:
        request.return_tokens_as_token_ids = settings.return_tokens_as_token_ids
    if request.stream and settings.enable_force_include_usage:
        request.stream_options = request.stream_options or StreamOptions()
        request.stream_options.include_usage = True
