"""Print what building and running ktft needs, from pyproject.toml: `python ci/requirements.py [extra ...]`."""

import sys
import tomllib
from pathlib import Path

declared = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
needs = declared["build-system"]["requires"] + declared["project"]["dependencies"]
for extra in sys.argv[1:]:
    needs += declared["project"]["optional-dependencies"][extra]
# With build isolation scikit-build-core would ask for these by itself.
print(*needs, "cmake>=3.24,<5", "ninja>=1.11,<2", sep="\n")
