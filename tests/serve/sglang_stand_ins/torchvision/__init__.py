from absent import absent

__getattr__ = absent(__name__)
__version__ = "0.28.0"
