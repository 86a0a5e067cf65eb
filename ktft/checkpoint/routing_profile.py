"""A file with the number of tokens of each expert in each layer, as a training run or a server counted them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktft.checkpoint.files import write_whole

ROUTING_NAME = "expert_routing.json"
LAYOUT = 1


@dataclass(frozen=True)
class Routing:
    """Counts of (token, expert) pairs: a layer's number in the model -> pairs by expert."""

    tokens: Mapping[int, Sequence[int]]

    def to_dict(self) -> dict[str, Any]:
        """JSON's values: `{"layout": 1, "layers": {"3": [of expert 0, ...]}}`."""
        return {"layout": LAYOUT, "layers": {str(layer): list(each) for layer, each in sorted(self.tokens.items())}}

    def save(self, path: Path) -> None:
        """Write them as JSON, the whole file or nothing."""
        write_whole(path, (json.dumps(self.to_dict()) + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> Routing:
        """What `save` wrote.

        Raises:
            OSError: the file cannot be read. ValueError: it is something else.
        """
        try:
            content = json.loads(path.read_bytes())
            if content["layout"] != LAYOUT:
                raise ValueError(f"its layout is {content['layout']}, this ktft reads {LAYOUT}")
            found = {int(number): [_count(each) for each in tokens] for number, tokens in content["layers"].items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{path} is no routing profile ({type(error).__name__}: {error}); training writes {ROUTING_NAME} into "
                "its output_dir"
            ) from None
        return cls(found)

    def check(self, num_experts: Mapping[int, int], path: Path | str) -> None:
        """Refuse counts of another model, whose layers have `num_experts` experts. `path` is named in messages.

        Raises:
            ValueError: the counts have other layers, or other numbers of experts.
        """
        if self.tokens.keys() != num_experts.keys():
            odd = sorted(self.tokens.keys() ^ num_experts.keys())[0]
            raise ValueError(
                f"{path} counts experts of {len(self.tokens)} layers, the model has {len(num_experts)}; layer {odd} "
                f"is only in the {'profile' if odd in self.tokens else 'model'}. It is of another model: give the one "
                "that this model's training wrote"
            )
        for number, tokens in self.tokens.items():
            if len(tokens) != num_experts[number]:
                raise ValueError(
                    f"{path} counts {len(tokens)} experts in layer {number}, the model has {num_experts[number]}. It "
                    "is of another model: give the one that this model's training wrote"
                )


def find_routing(*directories: Path | None) -> Path | None:
    """The first profile that lies in one of these, an adapter's and a checkpoint's for instance; None without one."""
    paths = (directory / ROUTING_NAME for directory in directories if directory is not None)
    return next((path for path in paths if path.is_file()), None)


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value
