"""What went wrong between this machine and the hub, in one sentence."""

from __future__ import annotations

import errno

from engine.config import quoted
from engine.errors import EngineError, ModelLoadFailed, ModelNotFound
from engine.models.hub_client import HubRefused

_MAX_REASON = 200
"""Characters of another program's words."""


def explain(
    error: Exception, repo_id: str, revision: str | None, endpoint: str, *, withholds_token: bool = False
) -> EngineError:
    """Return the engine's error for one that was raised while fetching a model from the hub at `endpoint`.

    withholds_token: as HubClient has it.
    """
    if isinstance(error, HubRefused):
        token = "; HF_TOKEN was not sent there, for it is no https:// address" if withholds_token else ""
        return _refusal(error, repo_id, revision, endpoint, token)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ModelLoadFailed(f"the disk is full: {repo_id} could not be written to the hub cache", model=repo_id)
    if isinstance(error, OSError) and error.errno == errno.ELOOP:
        return ModelLoadFailed(
            f"{error.filename} is a link, which another user may have put into the hub cache; remove it", model=repo_id
        )
    if isinstance(error, PermissionError):
        return ModelLoadFailed(f"the hub cache cannot be written: {error.filename}", model=repo_id)
    reason = quoted((str(error).splitlines() or [type(error).__name__])[0], _MAX_REASON)
    return ModelLoadFailed(f"{repo_id} could not be fetched from the hub at {endpoint}: {reason}", model=repo_id)


def _refusal(error: HubRefused, repo_id: str, revision: str | None, endpoint: str, token: str) -> EngineError:
    if error.code == "GatedRepo":
        return ModelLoadFailed(
            f"{repo_id} is gated: accept its licence at {endpoint}/{repo_id} and set HF_TOKEN to that account's"
            f" token{token}",
            model=repo_id,
        )
    if error.code == "RevisionNotFound":
        return ModelNotFound(f"{repo_id} has no revision {revision}", model=repo_id)
    if error.code == "RepoNotFound" or error.status == 401:
        return ModelNotFound(
            f"the hub at {endpoint} has no model {repo_id}, or it is private and HF_TOKEN does not open it{token}",
            model=repo_id,
        )
    return ModelLoadFailed(
        f"the hub at {endpoint} answered {error.status} for {repo_id}{token}", model=repo_id, status=error.status
    )
