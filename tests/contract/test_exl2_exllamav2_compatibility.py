"""EXL2 folders of our writer, as the real exllamav2 package sees them: its own Python, no kernels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.exllamav2_wheel import wheel_folder
from tests.fakes.tiny_models import ARCHITECTURES, make_tiny_model
from tools.exl2_writer.quantize import quantize_folder

pytestmark = pytest.mark.long

LAYERS, LINEARS = 2, 7

LOOK = """
import sys
from unittest.mock import MagicMock

from safetensors.torch import load_file

wheel, *folders = sys.argv[1:]
sys.path.insert(0, wheel)
sys.modules |= {name: MagicMock() for name in ("exllamav2_ext", "PIL", "PIL.Image")}
from exllamav2 import ExLlamaV2, ExLlamaV2Config
from exllamav2.ext import make_group_map_py

for folder in folders:
    config = ExLlamaV2Config()
    config.model_dir = folder
    config.prepare()
    tensors = load_file(folder + "/output.safetensors")
    parts = {part.key: part for module in ExLlamaV2(config).modules for part in (module, *module.submodules)}
    assert {name.rpartition(".")[0] for name in tensors} <= parts.keys(), folder
    packed = [name.removesuffix(".q_weight") for name in tensors if name.endswith(".q_weight")]
    for key in packed:
        words, columns = tensors[key + ".q_weight"].shape
        groups = range(len(tensors[key + ".q_scale_max"]))
        places = make_group_map_py(tensors[key + ".q_groups"], words).view(-1, 2).tolist()
        assert len(places) == parts[key].in_features == len(tensors[key + ".q_invperm"]), (folder, key)
        assert [group for group, rows_left in places if rows_left == 1] == list(groups), (folder, key)
        assert columns == parts[key].out_features, (folder, key)
        assert (key + ".bias" in tensors) == parts[key].has_bias, (folder, key)
    print(len(packed))
"""


@pytest.mark.slow
def test_the_library_finds_every_tensor_in_the_shape_it_wants(tmp_path: Path) -> None:
    folders = []
    for architecture in ARCHITECTURES:
        for tie in (False, True):
            name = f"{architecture}-{'tied' if tie else 'untied'}"
            source = make_tiny_model(
                tmp_path / f"{name}-source", architecture, num_hidden_layers=LAYERS, tie=tie, vocab_size=330
            )
            quantize_folder(source, tmp_path / name, bits=5.0)
            folders.append(str(tmp_path / name))
    done = subprocess.run(
        [sys.executable, "-c", LOOK, str(wheel_folder()), *folders], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-len(folders) :] == [str(LAYERS * LINEARS + 1)] * len(folders)
