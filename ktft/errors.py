"""Tells errors that are meant for the person who typed a command from bugs.

An error for the user ends the program with one message; every other error keeps its traceback. The module that raised
the error and the error's type decide which it is. Code that speaks to its user has a `raise` statement with a message;
an error that Python, torch or C++ raises by itself in the same place is a bug. `KTFT_TRACEBACK=1` shows every
traceback.
"""

from __future__ import annotations

import io
import sys
import traceback
from dataclasses import dataclass
from types import TracebackType

from ktft.config import show_tracebacks


@dataclass(frozen=True)
class Speaker:
    """Errors that are meant for the user, by type, of the modules whose names begin with `modules`."""

    modules: str
    types: tuple[type[BaseException], ...]
    raised: bool = True
    """Whether a `raise` statement in these modules must have raised the error; if not, C++ below them may have."""


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
"""Each row is a part of the program that speaks to its user."""


def for_user(error: BaseException) -> BaseException | None:
    """The error itself, or the one it was raised from, whichever has a message for the user; None for a bug."""
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
    """The exit code of a program that ends with this error: 1 for a failed run, 2 for a wrong input."""
    return 1 if isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError) else 2


def install() -> None:
    """Make this process print only the message of an error that is for the user. Other errors are printed as before."""
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
        # In a process of torchrun torch collects what is printed here, and loses it when the process exits below
        place = sys.__stderr__ if isinstance(sys.stderr, io.StringIO) else sys.stderr
        print(f"error: {told}\n(KTFT_TRACEBACK=1 shows where it was raised.)", file=place, flush=True)
        raise SystemExit(exit_code(told))  # Python then runs its exit handlers and ends with this code

    hook.of_ktft = True  # type: ignore[attr-defined]
    sys.excepthook = hook
