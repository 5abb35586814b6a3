"""Page arithmetic and the two tiers of memory that KV lives in."""
