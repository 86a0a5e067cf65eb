"""How near each family with a row is to stock transformers: logits, and the losses of twenty steps of LoRA.

    .venv-newest/bin/python tests/scripts/family_figures.py [NAME ...] [--record docs/benchmarks/families.json]

Every family that the installed transformers has gets a tiny random checkpoint of its real architecture. ktft holds its
experts in bf16; stock has the rest in fp32, as ktft does, and so do stock's experts. For the logits, both choose the
same experts; for the losses each router chooses for itself, and the same LoRA is trained on the same batches.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import torch
from measuring import attempt, end

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from stock import IDS, load, same_choices
from test_parity import SLOWER, STEPS, ktft_model, losses, torch_model
from tiny import FAMILIES, MORE_FAMILIES, write_checkpoint
from tiny_newer import NEWER

from ktft.model.experts import experts_family, find_experts

LEFT_OUT = "gpt_oss"  # test_parity.py's experts in plain torch have no biases
COLUMNS = {
    "family": "Family",
    "class": "transformers' class",
    "logits": "logits apart",
    "losses": f"losses of {STEPS} steps apart, at most",
    "last": "last loss",
}


def beside_stock(path: Path) -> tuple[str, str, float]:
    """A checkpoint's family and class, and how far its logits are from stock's."""
    stock, mine = load(path, None), load(path)
    same_choices(stock, mine, list(find_experts(mine)))
    with torch.no_grad():
        expected, found = stock(input_ids=IDS).logits, mine(input_ids=IDS).logits
    apart = float((found - expected).norm() / expected.norm())
    return experts_family(mine).name, f"`{type(stock).__name__}`", apart


def figures(name: str, folder: Path) -> dict[str, Any]:
    # An indexer that chooses all tokens: rounding would otherwise tip a near tie, as it hardly does for routers
    options = {"index_topk": 64} if "index_topk" in NEWER.get(name, ("", {}))[1] else {}
    path = write_checkpoint(name, folder / "model", **options)
    *names, logits = beside_stock(path)
    mine = ktft_model(path, name)
    rate = SLOWER.get(name, 3e-3)
    expected, found = losses(torch_model(path, mine, name), folder, rate), losses(mine, folder, rate)
    worst = max(abs(one / other - 1) for one, other in zip(found, expected, strict=True))
    shown = *names, f"{100 * logits:.2f} %", f"{100 * worst:.3f} %", f"{found[-1]:.2f}"
    return dict(zip(COLUMNS, shown, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of tests/tiny.py and tests/tiny_newer.py; by default all")
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    rows = []
    for name in args.names or [each for each in (*FAMILIES, *MORE_FAMILIES) if each != LEFT_OUT]:
        with attempt(name), tempfile.TemporaryDirectory() as folder:
            rows.append(figures(name, Path(folder)))
            print(*rows[-1].values(), flush=True)
    if args.record is not None:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        record = {
            "commands": [f".venv-newest/bin/python tests/scripts/family_figures.py --record {args.record}"],
            "machine": f"{torch.get_num_threads()} virtual CPUs of an AMD EPYC with AVX-512 BF16, no GPU.",
            "date": str(date.today()),
            "commit": commit,
            "columns": COLUMNS,
            "rows": rows,
        }
        args.record.write_text(json.dumps(record, indent=2) + "\n")
    end()


if __name__ == "__main__":
    main()
