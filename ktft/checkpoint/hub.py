"""Names of models and adapters: a directory here, or a repository of the Hugging Face Hub."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from huggingface_hub import hf_hub_download, is_offline_mode, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils.logging import set_verbosity_error

_MODEL_FILE = "config.json"
FAILURES = (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError)
"""The errors that huggingface_hub raises for a repository that it cannot provide."""
_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)


def local_path(what: str, name: str | os.PathLike[str]) -> Path | None:
    """The directory or file of that name; None where the name can only be a repository of the hub.

    A repository is `owner/name`. A name whose first part is a folder here is a path, mistyped after that.

    Raises:
        ValueError: there is nothing at a path. `what` says whose name it is.
    """
    path = Path(name)
    if path.exists():
        return path
    if _REPOSITORY.fullmatch(str(name)) and not Path(path.parts[0]).exists():
        return None
    raise ValueError(f"{what} {str(name)!r}: {_nothing_at(path)}")


def require_found(what: str, name: str | os.PathLike[str], file: str, cache: str | None = None) -> None:
    """Refuse, before anything is loaded, a name at which there is no path and, offline, no copy of the hub's `file`.

    Raises:
        ValueError: with what was looked for and, offline, the command that fetches it.
    """
    if local_path(what, name) is not None or not is_offline_mode():
        return
    if not isinstance(try_to_load_from_cache(str(name), file, cache), str):
        raise ValueError(not_fetched(what, name, OfflineModeIsEnabled("HF_HUB_OFFLINE is set")))


def model_path(what: str, name: str | os.PathLike[str]) -> Path:
    """A model's directory or config.json; of a repository of the hub its config.json alone is fetched.

    Raises:
        ValueError: there is none; offline with the command that fetches it.
    """
    path = local_path(what, name)
    if path is None:
        set_verbosity_error()  # else a line for each of six attempts
        try:
            return Path(hf_hub_download(str(name), _MODEL_FILE))
        except FAILURES as error:
            raise ValueError(not_fetched(what, name, error, _MODEL_FILE)) from error
    if path.is_dir() and not (path / _MODEL_FILE).is_file():
        raise ValueError(f"{path} has no {_MODEL_FILE}; give a model's directory, or its {_MODEL_FILE}")
    return path


def not_fetched(what: str, name: str | os.PathLike[str], error: Exception, *files: str) -> str:
    """The message for a repository that huggingface_hub did not provide."""
    if isinstance(error, RepositoryNotFoundError) and not isinstance(error, GatedRepoError):
        said = "has no such repository either, or it is private and `hf auth login` was not run"
    elif isinstance(error, GatedRepoError | EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
        said = f"says: {str(error).strip().splitlines()[-1]}"
    else:
        reason = "HF_HUB_OFFLINE is set" if is_offline_mode() else "there is no connection to it"
        command = " ".join(("hf download", str(name), *files, "--local-dir", Path(name).name))
        said = (
            f"cannot be asked: {reason}. Where there is a network, `{command}` fetches it; then give the directory "
            f"{Path(name).name}"
        )
    return f"{what} {str(name)!r}: {_nothing_at(Path(name))}, and the Hugging Face Hub {said}"


def _nothing_at(path: Path) -> str:
    where = "" if path.is_absolute() else f" from here ({Path.cwd()})"
    return f"no such directory{where}{_nearest(path)}"


def _nearest(path: Path) -> str:
    """The nearest name beside the first part of a path that is not there."""
    missing = next((each for each in (*reversed(path.parents), path) if not each.exists()), path)
    try:
        beside = [each.name for each in missing.parent.iterdir() if each.is_dir()]
    except OSError:
        return ""
    near = difflib.get_close_matches(missing.name, beside, n=1)
    return f"; there is {str(missing.parent / near[0])!r}" if near else ""
