"""Why a call to the Hugging Face hub failed, and what to do about it, in one sentence each.

Versions of the client before 1.0 raise what `requests` does, later ones what `httpx` does; both wrap some of it.
"""

import errno
from pathlib import Path
from typing import Any, NamedTuple

_TRANSPORTS = ("requests", "urllib3", "httpx", "httpx2", "httpcore", "socket", "ssl")


class Failure(NamedTuple):
    """`why`: what went wrong, to follow a semicolon. `remedy`: what to do. `is_final`: a copy in the cache is no answer."""

    why: str
    remedy: str
    is_final: bool = False


def explain(
    repository: str,
    revision: str,
    endpoint: str,
    error: BaseException,
    *,
    has_token: bool,
    cache: Path,
    progress: str = "",
) -> Failure:
    """One sentence for each kind of failure; of an unknown one, the first line of what the client said. `progress`: how much of
    what was being fetched has come."""
    causes = list(_causes(error))
    for cause in causes:
        found = _by_answer(repository, revision, endpoint, cause, has_token)
        found = found or _by_system(cause, cache)
        if found is not None:
            return found
    if any(_is_transport(cause) for cause in causes):
        reason = next((text for cause in causes[::-1] if (text := _first_line(cause))), type(error).__name__)
        if progress:
            told = f"the connection broke at {progress} ({reason})"
            return Failure(told, "check the network, and start it again: it goes on from there")
        return Failure(
            f"{endpoint} cannot be reached ({reason})",
            "check the network and proxy (HF_ENDPOINT chooses a mirror), or give a local folder",
        )
    return Failure(
        f"that failed with {type(error).__name__}: {_first_line(error) or 'no message'}",
        "try again, or give a local folder",
    )


def is_transient(error: BaseException) -> bool:
    """Whether the network failed, not the hub or the disk: the same may succeed a moment later."""
    causes = _causes(error)
    has_answer = any(getattr(getattr(cause, "response", None), "status_code", None) for cause in causes)
    return not has_answer and any(_is_transport(cause) for cause in causes)


def _causes(error: BaseException) -> list[BaseException]:
    """The error and what it was raised from, outermost first."""
    found: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in found:
        found.append(current)
        current = current.__cause__ or current.__context__
    return found


def _by_answer(repository: str, revision: str, endpoint: str, error: BaseException, has_token: bool) -> Failure | None:
    """What the hub's answer says; None for an error that is no answer."""
    from huggingface_hub import errors

    if isinstance(error, errors.HFValidationError):
        return Failure("that is not a valid hub id", "give a local folder, or a hub id such as 'owner/name'", True)
    if isinstance(error, errors.RevisionNotFoundError):
        return Failure(f"the repository has no revision {revision!r}", "check the setting revision", True)
    if isinstance(error, errors.GatedRepoError):
        login = "with the token's account" if has_token else "and set HF_TOKEN (or use hf_token, or `hf auth login`)"
        return Failure(
            "the hub gives this model only to those who accept its terms",
            f"accept them at {endpoint}/{repository} {login}",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        remedy = (
            "check the spelling; for a private model set HF_TOKEN (or use hf_token, or `hf auth login`); `quire search` "
            "finds names"
        )
        if has_token:
            remedy = "check the spelling, and that the token may read it"
        return Failure("the hub has no such model, or it is private", remedy)
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return Failure(f"a file is missing there: {_first_line(error)}", "try again: the repository may have changed")
    return _by_status(endpoint, error)


def _by_status(endpoint: str, error: BaseException) -> Failure | None:
    status: Any = getattr(getattr(error, "response", None), "status_code", None)
    if not isinstance(status, int):
        return None
    if status == 401:
        return Failure(
            "the hub refuses the token", "check HF_TOKEN (or hf_token), or log in again with `hf auth login`"
        )
    if status == 403:
        return Failure("the token may not read this model", "use a token that may read it")
    if status == 429:
        return Failure("the hub answers that there are too many requests", "wait some minutes, or use a token")
    if status >= 500:
        return Failure(f"{endpoint} answers with an error of its own ({status})", "try again later")
    return Failure(f"{endpoint} answers {status}", "check HF_ENDPOINT, or give a local folder")


def _by_system(error: BaseException, cache: Path) -> Failure | None:
    code = error.errno if isinstance(error, OSError) else None
    if code in (errno.ENOSPC, errno.EDQUOT):
        return Failure(
            f"the disk of {cache} is full", "free space there, or name another folder: download_dir or HF_HOME"
        )
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        return Failure(
            f"the cache {cache} cannot be written", "check its owner, or name another folder: download_dir or HF_HOME"
        )
    return None


def _is_transport(error: BaseException) -> bool:
    module = type(error).__module__.partition(".")[0]
    return module in _TRANSPORTS or isinstance(error, ConnectionError | TimeoutError)


def _first_line(error: BaseException) -> str:
    return next((line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()), "")
