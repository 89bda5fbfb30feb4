"""Tests that run real models, and where those come from."""
