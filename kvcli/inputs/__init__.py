"""The inputs of a run: documents and questions in tokens, options, and settings profiles."""
