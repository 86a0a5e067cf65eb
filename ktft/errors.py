"""Which errors are for the person who typed a command: these end in one message, all others keep their traceback.

What decides is who raised the error and as what type. Code that speaks to its user has a `raise` statement with the
words; an error that Python, torch or C++ raise by themselves in the same place is a bug. `KTFT_TRACEBACK=1` shows every
traceback.
"""

from __future__ import annotations

import errno
import sys
import traceback
from dataclasses import dataclass
from types import TracebackType

from ktft.config import show_tracebacks


@dataclass(frozen=True)
class Speaker:
    """Modules, by the beginning of their names, whose errors of these types are for the person at the keyboard."""

    modules: str
    types: tuple[type[BaseException], ...]
    raised: bool = True
    """Whether a `raise` statement of these modules must have made the error; else C++ below them may have."""


SPEAKERS = (
    Speaker("ktft.native", (ValueError, OSError), raised=False),
    Speaker("ktft", (ValueError, OSError, RuntimeError)),
    Speaker("llamafactory.hparams", (ValueError, ImportError)),
    Speaker("llamafactory.data", (ValueError, RuntimeError, NotImplementedError)),
    Speaker("llamafactory.extras", (ValueError, ImportError)),
    Speaker("omegaconf", (ValueError,)),
    Speaker("transformers.hf_argparser", (ValueError,)),
    Speaker("transformers.training_args", (ValueError, ImportError)),
    Speaker("transformers.utils.hub", (OSError,)),
    Speaker("transformers.configuration_utils", (OSError, ValueError)),
    Speaker("transformers.models.auto", (ValueError,)),
    Speaker("huggingface_hub", (OSError, ValueError)),
    Speaker("yaml", (Exception,)),
)
"""One row for each part of a program that speaks to its user."""

DISK = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG}
"""What a disk refuses, whoever asked it."""


def message_for_user(error: BaseException) -> str | None:
    """The words for the person at the keyboard, of the error or of one that it was raised from; None of a bug."""
    spoken = _is_spoken(error) or (isinstance(error, OSError) and error.errno in DISK)
    if spoken and str(error):
        return str(error)
    return None if error.__cause__ is None else message_for_user(error.__cause__)


def _is_spoken(error: BaseException) -> bool:
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    module = f"{trace.tb_frame.f_globals.get('__name__', '')}."
    line = traceback.extract_tb(trace)[-1].line or ""
    return any(
        module.startswith(f"{each.modules}.")
        and isinstance(error, each.types)
        and (line.startswith("raise ") or not each.raised)
        for each in SPEAKERS
    )


def exit_code(error: BaseException) -> int:
    """Of a program that such an error ends: 2 of a wrong input, 1 of a run that failed."""
    return 2 if isinstance(error, ValueError | OSError | ImportError | NotImplementedError) else 1


def install() -> None:
    """Have this process, if such an error ends it, print the message alone. Other errors are printed as before."""
    previous = sys.excepthook
    if getattr(previous, "of_ktft", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        words = None if show_tracebacks() else message_for_user(error)
        if words is None:
            previous(kind, error, trace)
            return
        sys.stdout.flush()
        print(f"error: {words}\n(KTFT_TRACEBACK=1 shows where it was raised.)", file=sys.stderr, flush=True)
        raise SystemExit(exit_code(error))  # what Python then ends with, exit handlers included

    hook.of_ktft = True  # type: ignore[attr-defined]
    sys.excepthook = hook
