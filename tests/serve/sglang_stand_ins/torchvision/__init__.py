from absent import absent

__version__ = "0.28.0"
__getattr__ = absent(__name__)
