"""KV of prompts in directories: written during the prefill, found again by the beginning of a prompt."""
