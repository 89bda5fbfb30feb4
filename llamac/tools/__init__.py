"""Answers as messages: reasoning, content and tool calls in the formats of chat models."""
