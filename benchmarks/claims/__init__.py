"""What the papers claim, checked on a model that fits anywhere: one module a study."""
