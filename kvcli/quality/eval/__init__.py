"""Evaluation of answers: tasks, scorers, and the table of several methods and budgets."""
