"""What a person sees: the console, words and tables, HTML pages."""
