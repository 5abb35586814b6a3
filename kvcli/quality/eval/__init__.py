"""How good answers are: tasks, scorers, and the table of several methods and budgets."""
