"""What a run is given: documents and questions in tokens, and settings profiles."""
