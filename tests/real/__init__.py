"""Tests that run a real model, SmolLM2-135M-Instruct."""
