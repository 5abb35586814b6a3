"""The bundled demo model: tokenizer, training text and training script."""
