"""The prebuilt wheels of exllamav2 0.3.2: one per Python, torch and CUDA, for Linux on x86_64.

Source: the build matrix of the project's release workflow, and the files of release v0.3.2.
"""

from __future__ import annotations

from engine.doctor.facts import Version

RELEASE = "https://github.com/turboderp-org/exllamav2/releases/download/v0.3.2"
PYTHONS = ((3, 11), (3, 12), (3, 13))
CUDA_BY_TORCH: dict[Version, tuple[str, ...]] = {
    (2, 6): ("12.4", "11.8"),
    (2, 7): ("12.8",),
    (2, 8): ("12.8",),
    (2, 9): ("12.8",),
}
NEWEST_TORCH = max(CUDA_BY_TORCH)
NEWEST_CUDA = CUDA_BY_TORCH[NEWEST_TORCH][0]


def numbers(version: str) -> Version:
    """ "2.9.1+cu128" -> (2, 9, 1); what is no number ends it."""
    found: list[int] = []
    for part in version.partition("+")[0].split("."):
        if not part.isdecimal():
            break
        found.append(int(part))
    return tuple(found)


def cuda_tag(cuda: str) -> str:
    """ "12.8" -> "cu128"."""
    return "cu" + "".join(cuda.split(".")[:2])


def wheel_for(python: Version, machine: str, torch: str, cuda: str) -> str:
    """The file name of the wheel for this Python, processor, torch and CUDA; "" where the release has none."""
    release = numbers(torch)[:2]
    if machine != "x86_64" or python[:2] not in PYTHONS or cuda not in CUDA_BY_TORCH.get(release, ()):
        return ""
    tag = "cp" + "".join(map(str, python[:2]))
    return f"exllamav2-0.3.2+{cuda_tag(cuda)}.torch{'.'.join(map(str, release))}.0-{tag}-{tag}-linux_x86_64.whl"


def url(wheel: str) -> str:
    """Where `wheel` is fetched."""
    return f"{RELEASE}/{wheel}"
