"""The hook, for metadata of an install before it was `ktft_autoload`, which stays until ktft is installed again."""

from ktft_autoload import install

__all__ = ["install"]
