"""Files of prompts: read, checked, run with others beside them, and written down one by one so that none is lost."""
