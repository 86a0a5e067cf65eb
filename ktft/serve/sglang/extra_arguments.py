"""The arguments of SGLang that a user adds after `--`. ktft passes on those that it knows not to change the numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

PASSED = (
    "attention-backend",
    "chat-template",
    "chunked-prefill-size",
    "log-level",
    "log-level-http",
    "log-requests",
    "mem-fraction-static",
    "random-seed",
    "reasoning-parser",
    "sampling-backend",
    "schedule-policy",
    "stream-interval",
    "tool-call-parser",
)
"""SGLang's options that go on to it. It has some five hundred, many of which move work to where ktft's experts are not,
or open paths beside ktft's gate."""


def check_extra(extra: Iterable[str]) -> None:
    """Raise ValueError for an argument that is not among `PASSED`. The message names it."""
    for argument in extra:
        name = argument.partition("=")[0]
        if name.startswith("-") and name.removeprefix("--").replace("_", "-") not in PASSED:
            raise ValueError(
                f"{name} cannot be passed on to SGLang; ktft was tested with --{', --'.join(PASSED)}. See ktft serve "
                "--help for what ktft itself sets"
            )


def allowed_origins(extra: Sequence[str]) -> tuple[str, ...]:
    """No web page of another origin: SGLang has no argument for it. See `ktft.serve.engine.Engine`."""
    return ()
