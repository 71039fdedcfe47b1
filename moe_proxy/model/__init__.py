"""What is in a GGUF file."""
