"""Names of models on the hub, and the GGUF model of a repository that each means."""

from __future__ import annotations

import pytest

from engine.errors import ModelLoadFailed, ModelNotFound
from engine.models.hub_id import HubId, choose_gguf, gguf_models

GIB = 2**30
SIZES = {
    "README.md": 100,
    "model-Q2_K.gguf": GIB // 2,
    "model-Q8_0.gguf": 3 * GIB,
    "model-Q4_K_M.gguf": 2 * GIB,
    "model-UD-Q4_K_M.gguf": 2 * GIB + 1,
    "model-UD-Q4_K_XL.gguf": 2 * GIB + 2,
    "BF16/model-BF16-00001-of-00002.gguf": 3 * GIB,
    "BF16/model-BF16-00002-of-00002.gguf": 3 * GIB,
    "mmproj-F16.gguf": GIB,
    "model-mmproj-Q8_0.gguf": GIB,
    "imatrix_unsloth.gguf": 1000,
}


def meant(name: str, *files: str) -> str:
    """The file that `name` means in a repository of these files, of SIZES without any."""
    wanted = HubId.parse(name)
    assert wanted is not None
    return choose_gguf(gguf_models(dict.fromkeys(files, 5) or SIZES), wanted).name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/name", HubId(repo_id="org/name")),
        ("org/name@v1", HubId(repo_id="org/name", revision="v1")),
        ("org/name:Q4_K_M", HubId(repo_id="org/name", tag="Q4_K_M")),
        ("org/name:Q4_K_M@refs/pr/1", HubId(repo_id="org/name", tag="Q4_K_M", revision="refs/pr/1")),
        ("hf.co/org/name:Q8_0", HubId(repo_id="org/name", tag="Q8_0")),
        ("huggingface.co/org/name", HubId(repo_id="org/name")),
        ("hf.co/name", HubId(repo_id="hf.co/name")),
        ("org/name/a.gguf", HubId(repo_id="org/name", file="a.gguf")),
        ("org/name/Q8 0/a.GGUF@main", HubId(repo_id="org/name", file="Q8 0/a.GGUF", revision="main")),
        ("org/name/a", None),
        ("org/name:", None),
        ("org/name:Q8/a.gguf", None),
        ("org/name/../a.gguf", None),
        ("org/name/.a.gguf", None),
        ("org/name/b//a.gguf", None),
        ("/org/name/a.gguf", None),
        ("~/name/a.gguf", None),
    ],
)
def test_a_name_is_a_repository_with_a_quantisation_or_a_file_and_a_revision(name: str, expected: HubId | None) -> None:
    assert HubId.parse(name) == expected


def test_a_hub_id_is_written_as_it_is_read() -> None:
    for name in ("org/name", "org/name@v1", "org/name:Q4_K_M@v1", "org/name/b/a.gguf@v1"):
        found = HubId.parse(name)
        assert found is not None and found.name == name


@pytest.mark.parametrize(
    ("tag", "file"),
    [
        ("Q2_K", "model-Q2_K.gguf"),
        ("q4_k_m", "model-Q4_K_M.gguf"),
        ("ud-q4_k_m", "model-UD-Q4_K_M.gguf"),
        ("UD-Q4_K_XL", "model-UD-Q4_K_XL.gguf"),
        ("Q4_K_XL", "model-UD-Q4_K_XL.gguf"),
        ("bf16", "BF16/model-BF16-00001-of-00002.gguf"),
        ("Q8_0", "model-Q8_0.gguf"),
    ],
)
def test_a_tag_means_the_model_of_that_quantisation_in_any_case(tag: str, file: str) -> None:
    assert meant(f"org/name:{tag}") == file


@pytest.mark.parametrize(
    ("tag", "file"),
    [
        ("Q4_K_M", "name.i1-Q4_K_M.gguf"),
        ("Q4_K_M", "name.Q4_K_M.gguf"),
        ("Q4_K_M", "name_Q4_K_M.gguf"),
        ("Q4_K_M", "Q4_K_M/name-00001-of-00001.gguf"),
        ("q4_0", "name-q4_0-imat.gguf"),
        ("mxfp4", "gpt-oss-20b-mxfp4.gguf"),
        ("IQ3_XXS", "name-IQ3_XXS.gguf"),
        ("fp16", "name-fp16.gguf"),
    ],
)
def test_a_tag_is_found_as_publishers_write_it(tag: str, file: str) -> None:
    assert meant(f"org/name:{tag}", file, "name-Q6_K.gguf") == file


@pytest.mark.parametrize("tag", ["Q4_K", "K_M", "M", "Q4", "model-Q"])
def test_a_part_of_a_quantisation_is_none(tag: str) -> None:
    with pytest.raises(ModelNotFound, match=f"org/name has no GGUF model of {tag}; it has "):
        meant(f"org/name:{tag}", "model-Q4_K_M.gguf", "model-Q8_0.gguf")


def test_an_unknown_tag_is_answered_with_the_quantisations_by_size() -> None:
    with pytest.raises(ModelNotFound) as caught:
        meant("org/name:Q3_K")
    assert caught.value.message == (
        "org/name has no GGUF model of Q3_K; it has Q2_K (512 MiB), Q4_K_M (2.0 GiB), UD-Q4_K_M (2.0 GiB), "
        "UD-Q4_K_XL (2.0 GiB), Q8_0 (3.0 GiB), BF16 (6.0 GiB)"
    )


def test_a_repository_alone_means_its_only_model_or_q4_k_m() -> None:
    assert meant("org/name") == "model-Q4_K_M.gguf"
    assert meant("org/name", "model-Q8_0.gguf", "mmproj-F16.gguf") == "model-Q8_0.gguf"
    with pytest.raises(ModelNotFound) as caught:
        meant("org/name", "model-Q8_0.gguf", "model-Q6_K.gguf")
    assert caught.value.message == (
        "org/name has no GGUF model of Q4_K_M: name another as org/name:TAG or org/name/FILE; it has Q6_K (0 MiB), "
        "Q8_0 (0 MiB)"
    )


def test_a_file_is_named_by_its_path_and_any_part_stands_for_all() -> None:
    assert meant("org/name/model-Q8_0.gguf") == "model-Q8_0.gguf"
    for part in (1, 2):
        wanted = HubId(repo_id="org/name", file=f"BF16/model-BF16-0000{part}-of-00002.gguf")
        assert list(choose_gguf(gguf_models(SIZES), wanted).files) == [
            "BF16/model-BF16-00001-of-00002.gguf",
            "BF16/model-BF16-00002-of-00002.gguf",
        ]
    with pytest.raises(ModelNotFound, match=r"has no GGUF model mmproj-F16\.gguf; it has Q2_K"):
        meant("org/name/mmproj-F16.gguf")


def test_several_models_of_a_tag_are_told_apart_by_their_files() -> None:
    with pytest.raises(ModelNotFound, match=r"2 GGUF models of Q8_0: name one as org/name/FILE \(a-Q8_0\.gguf, b-"):
        meant("org/name:Q8_0", "a-Q8_0.gguf", "b-Q8_0.gguf")
    with pytest.raises(ModelNotFound, match=r"it has a-Q8_0\.gguf \(0 MiB\), b-Q8_0\.gguf \(0 MiB\)"):
        meant("org/name:Q6_K", "a-Q8_0.gguf", "b-Q8_0.gguf")


def test_a_split_model_whose_parts_the_repository_lacks_is_refused() -> None:
    with pytest.raises(ModelLoadFailed, match=r"org/name lacks 2 of 3 parts of m-Q8_0-00001-of-00003\.gguf"):
        meant("org/name", "m-Q8_0-00002-of-00003.gguf")


def test_a_repository_without_gguf_says_so() -> None:
    with pytest.raises(ModelNotFound, match=r"^org/name has no GGUF model$"):
        meant("org/name:Q8_0", "config.json", "mmproj-F16.gguf")
