"""A process of its own for each runner: `python -m benchmarks.step.worker`, a JSON line in, a JSON line out.

So each runner has clean memory, may change global state, and may crash. Requests: `{"job": ...}` makes the runner,
`{"tokens": T}` times one step, `{"rates": ...}` measures the machine; the end of the input ends the process.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TextIO


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answer each request, or say why not."""
    from benchmarks.step import floor
    from benchmarks.step.cases import Job
    from benchmarks.step.peers import RUNNERS

    runner: Any = None

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal runner
        if "job" in request:
            job = Job.from_dict(request["job"])
            runner = RUNNERS[job.runner](job)
            return dict(runner.facts())
        if "rates" in request:
            return asdict(floor.measure_rates(**request["rates"]))
        return asdict(runner.step(request["tokens"]))

    print(json.dumps({}), file=answers, flush=True)  # all is imported
    for line in requests:
        print(json.dumps(_safely(answer, json.loads(line))), file=answers, flush=True)


def _safely(answer: Callable[[dict[str, Any]], dict[str, Any]], request: dict[str, Any]) -> dict[str, Any]:
    try:
        return answer(request)
    except Exception as error:  # whatever a peer raises: the parent names it and goes on
        traceback.print_exc()
        first = str(error).strip().splitlines()[:1]
        return {"error": f"{type(error).__name__}: {first[0] if first else ''}"}


if __name__ == "__main__":
    # What libraries print goes to stderr; the answers have stdout to themselves.
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        serve(sys.stdin, out)
    sys.stdout.flush()
    os._exit(0)  # peers leave threads and process groups behind that would keep it
