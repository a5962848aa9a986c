"""Version of the interfaces as a whole."""

API_VERSION = 1
"""A plug-in declares the one it was written for."""
