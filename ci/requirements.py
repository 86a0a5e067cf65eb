"""Print what building and running ktft needs, from pyproject.toml: `python ci/requirements.py [extra ...]`.

`--only` before the extras leaves out ktft's own requirements, `--build` alone prints those of the build alone.
"""

import sys
import tomllib
from pathlib import Path

declared = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
# With build isolation scikit-build-core would ask for the last two by itself.
build = [*declared["build-system"]["requires"], "cmake>=3.24,<5", "ninja>=1.11,<2"]
extras, needs = sys.argv[1:], [*build, *declared["project"]["dependencies"]]
if extras[:1] == ["--build"]:
    extras, needs = [], build
elif extras[:1] == ["--only"]:
    extras, needs = extras[1:], []
for extra in extras:
    needs += declared["project"]["optional-dependencies"][extra]
print(*needs, sep="\n")
