"""What the papers claim of four methods, checked on a model that fits anywhere: one module a study."""
