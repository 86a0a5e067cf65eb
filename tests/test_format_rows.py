"""What docs/dev/add-a-format.md promises: a format is a codec and rows; no other place of `ktft` asks for its name."""

from __future__ import annotations

import ast
import ctypes
import re
import shutil
import subprocess
from itertools import product
from pathlib import Path

import pytest
import torch
from contract import make_layer
from lanes import decoded, exact
from torch import Tensor
from toy_format import MAGNITUDES, ROW, check_decoding, check_products, toy

from ktft import native
from ktft.config import EXPERT_FORMATS
from ktft.formats import FORMAT_TRAITS
from ktft.lanes.ops import torch_ops
from ktft.native import ExpertLayer
from ktft.native.encodings import CODED
from ktft.native.extension import core
from ktft.native.packed import CODE_BYTES, PACKED_FORMATS, TILE_ROWS
from ktft.serve.runtime import torch_resident

__all__ = ["toy"]

ROOT = Path(__file__).parents[1]
CSRC = ROOT / "csrc"
MAY_COMPARE = {
    "ktft/formats.py": "the rows",
    "ktft/checkpoint/encoded.py": "formats of checkpoints: docs/dev/add-a-format.md",
    "ktft/checkpoint/schemes.py": "formats of checkpoints: docs/dev/add-a-format.md",
    "ktft/native/encodings.py": "formats of checkpoints: docs/dev/add-a-format.md",
}
"""Files that compare with formats' names, and why they may."""


def random_codes(layer: ExpertLayer) -> None:
    """Overwrite all codes, which an encoder does not use all of, and leave the scales."""
    form, generator = PACKED_FORMATS[layer.format], torch.Generator().manual_seed(7)
    for part in layer.slices():
        for expert, matrix in product(range(layer.num_experts), part.matrices.values()):
            tiles = part.address + expert * part.expert_bytes + matrix.tiles
            for strip, tile in product(range(matrix.rows // TILE_ROWS), range(-(-matrix.cols // form.tile_cols))):
                address = tiles + strip * matrix.strip_bytes + tile * form.tile_bytes
                memory = torch.frombuffer((ctypes.c_uint8 * CODE_BYTES).from_address(address), dtype=torch.uint8)
                codes = torch.randint(256, (CODE_BYTES,), generator=generator, dtype=torch.uint8)
                # E4M3 has two codes for NaN, bf16 has many: no encoder writes them
                unused = codes & 127 == 127 if form.code_dtype.is_floating_point else codes == 256
                memory.copy_(codes.masked_fill(unused, 0))


def bits(values: Tensor) -> Tensor:
    """A zero's sign counts."""
    return values.contiguous().view(torch.int32)


@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("fmt", EXPERT_FORMATS)
def test_torch_decodes_every_code_as_the_native_core_does(fmt: str, nodes: int) -> None:
    layer = make_layer(160, 288, fmt, native.default_isa(), nodes=nodes)
    random_codes(layer)
    weights = decoded(layer, [3, 0, 4], None, torch.device("cpu"), torch_ops)
    for ours, theirs in zip((weights.gate_up, weights.down), exact(layer, [3, 0, 4]), strict=True):
        values = ours.values.float() if ours.scale is None else ours.values.float() * ours.scale[..., None]
        assert torch.equal(bits(values), bits(theirs))


def test_every_format_has_its_rows() -> None:
    assert tuple(FORMAT_TRAITS) == tuple(PACKED_FORMATS) == native.FORMATS == EXPERT_FORMATS


def test_every_encoding_of_codes_has_its_row() -> None:
    assert {*CODED.values()} == {*core.Encoding.__members__} - {"f32", "bf16", "f16"}
    assert {*CODED.values()} <= {*EXPERT_FORMATS}


TABLE = ", ".join(f"{sign}{size}f" for sign in "+-" for size in MAGNITUDES)
TOY_CODEC = (CSRC / "quant/mxfp4-inl.h").read_text().replace("Mxfp4", "Toy")
TOY_CODEC = re.sub(r"static inline float power_of_two.*?\n}\n", "", TOY_CODEC, flags=re.DOTALL)
TOY_CODEC = TOY_CODEC.replace("quant/nibble-inl.h", "quant/mxfp4-inl.h").replace("kUnit = 0.5f", f"kUnit = {ROW.unit}f")
TOY_CODEC = re.sub(r"kTable\[16\] = \{.*?\}", f"kTable[16] = {{{TABLE}}}", TOY_CODEC)
TOY_ROW = f"KTFT_FORMAT(toy, ToyCodec, kToy, {ROW.tile_cols}, {ROW.tile_bytes}, false, false, 4)\n"
TOY_CHECK = """
#include "kernels/kernels.h"
#include "quant/with_codec.h"
static_assert(ktft::info(ktft::Format::kToy).dot_tokens == 4);
static_assert(ktft::info(ktft::Format::kToy).tile_cols == 128 && ktft::ToyCodec::kWholeValues.at[7] == 128 + 127);
"""


def compile_core(folder: Path, codec: str = TOY_CODEC, row: str = TOY_ROW) -> str:
    """What the compiler says against the core's packing, tables and kernels with one more format."""
    for name, text in (
        ("toy-inl.h", codec),
        ("codecs.h", (CSRC / "quant/codecs.h").read_text() + '#include "quant/toy-inl.h"\n'),
        ("formats.inc", (CSRC / "quant/formats.inc").read_text() + row),
    ):
        (folder / "quant").mkdir(exist_ok=True)
        (folder / "quant" / name).write_text(text)
    sources = ("quant/codes.cc", "quant/pack.cc", "kernels/scalar.cc")
    unit = folder / "unit.cc"
    unit.write_text("".join(f'#include "{source}"\n' for source in sources) + TOY_CHECK)
    compiler = shutil.which("c++") or pytest.skip("there is no C++ compiler")
    command = [compiler, "-std=c++20", "-fsyntax-only", "-w", "-I", str(folder), "-I", str(CSRC), str(unit)]
    return subprocess.run(command, capture_output=True, text=True).stderr


def test_a_new_format_of_the_core_is_a_codec_and_a_row(tmp_path: Path) -> None:
    assert compile_core(tmp_path) == ""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("kUnit = 0.25f", "kUnit = 0.5f", "not a whole multiple of kUnit"),
        ("kUnit = 0.25f", "kUnit = 0.125f", "at most 127 times"),
        (", false, 4)", ", false)", "requires 8 arguments"),
        (", false, 4)", ", false, 5)", "dot_tokens <= ktft::kFewRows|static assertion failed"),
    ],
)
def test_the_compiler_refuses_an_incomplete_format(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert re.search(message, compile_core(tmp_path, TOY_CODEC.replace(old, new), TOY_ROW.replace(old, new)))


def test_a_new_format_needs_its_row_alone(toy: ExpertLayer) -> None:
    """With Triton's kernels: test_lanes_triton.py, test_hybrid_triton.py."""
    check_decoding(toy, torch_ops, "cpu")
    check_products(toy, torch_resident, "cpu")


def names_branched_on(path: Path) -> set[str]:
    """Formats whose names the file compares with, or looks something up by."""
    formats, found = set(EXPERT_FORMATS) - {"bf16"}, set()  # "bf16" is torch's name of a type too
    for node in ast.walk(ast.parse(path.read_text())):
        branch = isinstance(node, ast.Compare | ast.MatchValue | ast.Dict)
        where = node.keys if isinstance(node, ast.Dict) else [node]
        for part in where if branch else []:
            inside = ast.walk(part) if part is not None else ()
            found |= {n.value for n in inside if isinstance(n, ast.Constant) and n.value in formats}
    return found


def test_no_other_file_branches_on_a_format() -> None:
    found = {path.relative_to(ROOT).as_posix(): names_branched_on(path) for path in (ROOT / "ktft").rglob("*.py")}
    found = {name: names for name, names in found.items() if names}
    wrong = {name: names for name, names in found.items() if name not in MAY_COMPARE}
    assert not wrong, "say it as a row: in ktft/formats.py, or in the codec and PackedFormat"
    assert set(found) == set(MAY_COMPARE), "take files that no longer compare from the list"
