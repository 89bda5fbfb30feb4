"""Computation on graphics processors. Only models that are loaded for a device import this package."""
