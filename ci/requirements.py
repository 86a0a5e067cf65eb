"""Print what building and running ktft needs, from pyproject.toml: `python ci/requirements.py [extra ...]`.

`--only` before the extras leaves out ktft's own requirements.
"""

import sys
import tomllib
from pathlib import Path

declared = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
extras, needs = sys.argv[1:], []
if extras[:1] == ["--only"]:
    extras = extras[1:]
else:
    # With build isolation scikit-build-core would ask for the last two by itself.
    needs += declared["build-system"]["requires"] + declared["project"]["dependencies"]
    needs += ["cmake>=3.24,<5", "ninja>=1.11,<2"]
for extra in extras:
    needs += declared["project"]["optional-dependencies"][extra]
print(*needs, sep="\n")
