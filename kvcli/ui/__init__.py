"""Presentation to people: the console, words and tables, HTML pages."""
