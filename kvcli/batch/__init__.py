"""Files of prompts: read, checked, run concurrently, and written one by one so that none is lost."""
