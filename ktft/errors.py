"""Which errors are for the person who typed a command: these end in one message, all others keep their traceback.

What decides is who raised the error and as what type. Code that speaks to its user has a `raise` statement with the
words; an error that Python, torch or C++ raise by themselves in the same place is a bug. `KTFT_TRACEBACK=1` shows every
traceback.
"""

from __future__ import annotations

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
    Speaker("transformers.utils.generic", (ValueError,)),
    Speaker("transformers.utils.hub", (OSError,)),
    Speaker("transformers.configuration_utils", (OSError, ValueError)),
    Speaker("transformers.models.auto", (ValueError,)),
    Speaker("huggingface_hub", (OSError, ValueError)),
    Speaker("yaml", (Exception,), raised=False),
)
"""One row for each part of a program that speaks to its user."""


def for_user(error: BaseException) -> BaseException | None:
    """The error, or the one it was raised from, whose words are for the person at the keyboard; None of a bug."""
    of_the_system = isinstance(error, OSError) and error.errno is not None  # a full disk, a file that is not there
    if str(error) and (of_the_system or _is_spoken(error)):
        return error
    return None if error.__cause__ is None else for_user(error.__cause__)


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
    """Of a program that such an error ends: 1 of a run that failed, 2 of an input that was wrong."""
    return 1 if isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError) else 2


def install() -> None:
    """Have this process, if such an error ends it, print the message alone. Other errors are printed as before."""
    previous = sys.excepthook
    if getattr(previous, "of_ktft", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt) and not show_tracebacks():
            print("\n".join(getattr(error, "__notes__", [])) or "interrupted", file=sys.stderr, flush=True)
            raise SystemExit(130)
        told = None if show_tracebacks() else for_user(error)
        if told is None:
            previous(kind, error, trace)
            return
        sys.stdout.flush()
        print(f"error: {told}\n(KTFT_TRACEBACK=1 shows where it was raised.)", file=sys.stderr, flush=True)
        raise SystemExit(exit_code(told))  # what Python then ends with, exit handlers included

    hook.of_ktft = True  # type: ignore[attr-defined]
    sys.excepthook = hook
