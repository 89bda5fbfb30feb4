"""Compares the engine with another implementation, stage by stage, and finds the cause of a difference."""
