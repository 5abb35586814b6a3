"""The bundled demo checkpoint in Hugging Face format."""
