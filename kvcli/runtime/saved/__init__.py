"""KV of prompts in directories: written while a prompt is read, found again by what the prompt begins with."""
