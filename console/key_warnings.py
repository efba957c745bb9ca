"""Where keys of the settings can be seen by others."""

from __future__ import annotations

from collections.abc import Iterator

from console.secret_file import exposed
from console.settings import Settings
from console.sources import Sources


def key_warnings(settings: Settings, sources: Sources) -> Iterator[str]:
    """Yield a sentence for each place from which other users of this machine could read a key."""
    if settings.api_key is not None and sources.origin("api_key").source == "flag":
        yield "Every user of this machine sees --api-key in its list of processes: use `--api-key-file FILE` instead"
    if "api_key" in sources.saved and (problem := exposed(sources.file)):
        yield problem
    for file in (settings.api_key_file, settings.tls_key):
        if file is not None and (problem := exposed(file)):
            yield problem
