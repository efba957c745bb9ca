"""What went wrong between this machine and the hub, in one sentence."""

from __future__ import annotations

import errno

from engine.errors import EngineError, ModelLoadFailed, ModelNotFound


def explain(error: Exception, repo_id: str, revision: str | None, endpoint: str) -> EngineError:
    """The engine's error for one that huggingface_hub (or its HTTP client) raised while fetching a model."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return ModelLoadFailed(
            f"{repo_id} is gated: accept its licence at {endpoint}/{repo_id} and set HF_TOKEN to that account's token",
            model=repo_id,
        )
    if isinstance(error, RepositoryNotFoundError):
        return ModelNotFound(
            f"the hub at {endpoint} has no model {repo_id}, or it is private and HF_TOKEN does not open it",
            model=repo_id,
        )
    if isinstance(error, RevisionNotFoundError):
        return ModelNotFound(f"{repo_id} has no revision {revision}", model=repo_id)
    if isinstance(error, HFValidationError):
        return ModelNotFound(f"{repo_id} is no valid hub id", model=repo_id)
    if isinstance(error, HfHubHTTPError):
        return ModelLoadFailed(
            f"the hub at {endpoint} answered {error.response.status_code} for {repo_id}",
            model=repo_id,
            status=error.response.status_code,
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ModelLoadFailed(f"the disk is full: {repo_id} could not be written to the hub cache", model=repo_id)
    if isinstance(error, PermissionError):
        return ModelLoadFailed(f"the hub cache cannot be written: {error.filename}", model=repo_id)
    cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) and error.__cause__ else error
    reason = (str(cause).splitlines() or [type(cause).__name__])[0]
    return ModelLoadFailed(f"{repo_id} could not be fetched from the hub at {endpoint}: {reason}", model=repo_id)
