import enum

from absent import absent

__getattr__ = absent(__name__)


class InterpolationMode(enum.Enum):
    """transformers makes a table of these."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"
