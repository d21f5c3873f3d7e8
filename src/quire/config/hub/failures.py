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


_LOG_IN = "set HF_TOKEN (or use hf_token, or `hf auth login`)"
_STATUSES = {
    401: Failure("the hub refuses the token", "check HF_TOKEN (or hf_token), or log in again with `hf auth login`"),
    403: Failure("the token may not read this model", "use a token that may read it"),
    429: Failure("the hub answers that there are too many requests", "wait some minutes, or use a token"),
}
_OF_THE_DISK: dict[int | None, tuple[str, str]] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), ("the disk of {} is full", "free space there")),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), ("the cache {} cannot be written", "check its owner")),
}
"""What is wrong with the cache's folder, and what to do, by the system's number of the error."""


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

    login = "with the token's account" if has_token else f"and {_LOG_IN}"
    spelling = (
        ", and that the token may read it"
        if has_token
        else f"; for a private model {_LOG_IN}; `quire search` finds names"
    )
    answers = (  # the first that fits
        (
            errors.HFValidationError,
            Failure("that is not a valid hub id", "give a local folder, or a hub id such as 'owner/name'", True),
        ),
        (
            errors.RevisionNotFoundError,
            Failure(f"the repository has no revision {revision!r}", "check the setting revision", True),
        ),
        (
            errors.GatedRepoError,
            Failure(
                "the hub gives this model only to those who accept its terms",
                f"accept them at {endpoint}/{repository} {login}",
            ),
        ),
        (
            errors.RepositoryNotFoundError,
            Failure("the hub has no such model, or it is private", f"check the spelling{spelling}"),
        ),
        (errors.LocalEntryNotFoundError, None),
        (
            errors.EntryNotFoundError,
            Failure(f"a file is missing there: {_first_line(error)}", "try again: the repository may have changed"),
        ),
    )
    found = next((failure for kind, failure in answers if isinstance(error, kind)), None)
    return found or _by_status(endpoint, error)


def _by_status(endpoint: str, error: BaseException) -> Failure | None:
    status: Any = getattr(getattr(error, "response", None), "status_code", None)
    if not isinstance(status, int):
        return None
    if status >= 500:
        return Failure(f"{endpoint} answers with an error of its own ({status})", "try again later")
    return _STATUSES.get(status) or Failure(f"{endpoint} answers {status}", "check HF_ENDPOINT, or give a local folder")


def _by_system(error: BaseException, cache: Path) -> Failure | None:
    why, remedy = _OF_THE_DISK.get(error.errno if isinstance(error, OSError) else None, ("", ""))
    return Failure(why.format(cache), f"{remedy}, or name another folder: download_dir or HF_HOME") if why else None


def _is_transport(error: BaseException) -> bool:
    module = type(error).__module__.partition(".")[0]
    return module in _TRANSPORTS or isinstance(error, ConnectionError | TimeoutError)


def _first_line(error: BaseException) -> str:
    return next((line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()), "")
