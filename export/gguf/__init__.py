"""GGUF files: read (`model`) and written (`write`)."""
