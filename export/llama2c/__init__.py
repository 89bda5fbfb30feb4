"""llama2.c's model files: read (`model`) and written (`write`)."""
