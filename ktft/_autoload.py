"""The hook under its old name. An installation from before `ktft_autoload` refers to it until ktft is reinstalled."""

from ktft_autoload import install

__all__ = ["install"]
