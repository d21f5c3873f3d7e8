"""Which served model a client of Ollama means: there, every model has a tag, and `latest` is the one that goes without saying."""

from quire.entrypoints.http.state import ServerState
from quire.entrypoints.ollama.protocol import ModelFields

LATEST = ":latest"


def served_name(state: ServerState, request: ModelFields) -> str:
    """The name under which the model is served. Raises HTTPError, a 404: it is not served."""
    name = request.model or request.name
    if name and name.endswith(LATEST) and name not in state.model_names and state.adapters.find(name) is None:
        name = name.removesuffix(LATEST)
    return state.resolve_model(name)
